"""How well a clustering agrees with the classes: NMI, AMI and the F1 of pairs.

All three need no more than sizes: of the classes, of the clusters, and of what a class and a cluster share. With
F(sizes) = Σ s log s over n samples, the entropy of a clustering is log n − F / n, and mutual information is
log n + (F(shared) − F(classes) − F(clusters)) / n. Chance enters through the expectation of F(shared) alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from nearfar.utils.inputs import Array, as_labels
from nearfar.utils.validation import one_of

NORMALIZATIONS = ("arithmetic", "geometric")
CHUNK = 1 << 20  # probabilities held at a time


class Sizes(NamedTuple):
    """How many samples each class has, each cluster, and each pair of them that shares any."""

    classes: Tensor  # [c]
    clusters: Tensor  # [k]
    shared: Tensor  # [p]

    @property
    def samples(self) -> int:
        """How many there are in all."""
        return int(self.classes.sum())

    @property
    def equal(self) -> bool:
        """Whether classes and clusters are the same sets."""
        return len(self.classes) == len(self.clusters) == len(self.shared)

    @property
    def trivial(self) -> bool:
        """Whether the classes or the clusters put all samples together or each on its own."""
        return not {len(self.classes), len(self.clusters)}.isdisjoint((1, self.samples))


def nmi(labels: Array, assignment: Array, *, normalization: str = "arithmetic") -> float:
    """Normalised mutual information of classes and clusters: 1 where they are the same sets, 0 where independent.

    Args:
        labels, assignment: [n], the class and the cluster of each sample, any whole numbers.
        normalization: Mutual information is divided by the ``"arithmetic"`` mean of the two entropies, or by
            the ``"geometric"`` one, as older papers and code do.

    A single class and a single cluster are the same set: 1. If only one of the two is single: 0.

    >>> nmi(torch.tensor([0, 0, 1, 1]), torch.tensor([7, 7, 5, 5]))
    1.0
    """
    one_of("normalization", normalization, NORMALIZATIONS)
    sizes = _sizes(labels, assignment)
    if sizes.equal:
        return 1.0
    if 1 in (len(sizes.classes), len(sizes.clusters)):
        return 0.0
    n, log_n = sizes.samples, math.log(sizes.samples)
    of_classes, of_clusters, of_shared = (_sum_x_log_x(some) for some in sizes)
    information = max(0.0, log_n + (of_shared - of_classes - of_clusters) / n)
    entropies = log_n - of_classes / n, log_n - of_clusters / n
    scale = sum(entropies) / 2 if normalization == "arithmetic" else math.sqrt(math.prod(entropies))
    return information / scale


def ami(labels: Array, assignment: Array) -> float:
    """Mutual information of classes and clusters, adjusted for chance: about 0 for clusters drawn at random.

    (I − E[I]) / (mean entropy − E[I]), with the exact expectation over all clusterings of the same sizes
    (Vinh, Epps and Bailey, 2010) and the arithmetic mean. 1 where classes and clusters are the same sets. Otherwise 0
    where either puts all samples together or each on its own: no clustering of those sizes says more than another.

    >>> round(ami(torch.tensor([0, 0, 1, 1]), torch.tensor([0, 1, 0, 1])), 9)
    -0.5
    """
    sizes = _sizes(labels, assignment)
    if sizes.equal:
        return 1.0
    if sizes.trivial:
        return 0.0
    of_classes, of_clusters, of_shared = (_sum_x_log_x(some) for some in sizes)
    expected = _expected_sum_x_log_x(sizes)
    return (of_shared - expected) / ((of_classes + of_clusters) / 2 - expected)


def f1(labels: Array, assignment: Array) -> float:
    """F1 of pairs: of two samples in one cluster, are they of one class, and the other way round?

    2PR / (P + R) over all pairs of samples; 1 where no two samples share a class and none a cluster.

    >>> f1(torch.tensor([0, 0, 0, 1]), torch.tensor([0, 0, 1, 1]))  # of 3 pairs and 2 pairs, 1 is the same
    0.4
    """
    of_classes, of_clusters, of_shared = (int((some * (some - 1)).sum()) for some in _sizes(labels, assignment))
    pairs = of_classes + of_clusters
    return 2 * of_shared / pairs if pairs else 1.0


def _sizes(labels: Array, assignment: Array) -> Sizes:
    """Counted without a table of all classes by all clusters."""
    codes = as_labels("labels", labels).cpu()
    _, classes, class_sizes = torch.unique(codes, return_inverse=True, return_counts=True)
    codes = as_labels("assignment", assignment, len(codes)).cpu()
    _, clusters, cluster_sizes = torch.unique(codes, return_inverse=True, return_counts=True)
    _, shared = torch.unique(classes * len(cluster_sizes) + clusters, return_counts=True)
    return Sizes(class_sizes, cluster_sizes, shared)


def _sum_x_log_x(sizes: Tensor) -> float:
    """Σ s log s, the same for the same sizes in any order."""
    different, times = torch.unique(sizes.double(), return_counts=True)
    return float((times * different.xlogy(different)).sum())


def _expected_sum_x_log_x(sizes: Sizes) -> float:
    """E[Σ s log s] of what classes and clusters share, were samples dealt to the clusters at random.

    A class of size a and a cluster of size b share a hypergeometric number of samples, so equal sizes are
    counted together: there are no more than √(2n) different ones.
    """
    classes, class_times = torch.unique(sizes.classes, return_counts=True)
    clusters, cluster_times = torch.unique(sizes.clusters, return_counts=True)
    total = 0.0
    for a, times in zip(classes.tolist(), class_times.tolist(), strict=True):
        for some, lowest, width in _windows(a, clusters, sizes.samples):
            expected = _hypergeometric_x_log_x(a, clusters[some], sizes.samples, lowest, width)
            total += times * float(cluster_times[some].double() @ expected)
    return total


def _windows(a: int, b: Tensor, n: int) -> Iterator[tuple[slice, Tensor, int]]:
    """Where each hypergeometric distribution is: its first number, and how many follow, for some of b at a time.

    By Bernstein's inequality less than 1e-25 lies beyond t of the mean where t² = 40 t + 120 σ².
    """
    mean = a * b.double() / n
    variance = mean * (1 - b / n)  # of as many draws with replacement: never less
    reach = 20 + (400 + 120 * variance).sqrt()
    lowest = torch.maximum((mean - reach).floor().long(), (a + b - n).clamp(min=0))
    highest = torch.minimum((mean + reach).ceil().long(), b.clamp(max=a))
    width = int((highest - lowest).max()) + 1
    step = max(1, CHUNK // width)
    for start in range(0, len(b), step):
        some = slice(start, start + step)
        yield some, lowest[some], width


def _hypergeometric_x_log_x(a: int, b: Tensor, n: int, lowest: Tensor, width: int) -> Tensor:
    """E[x log x] of the number x that sets of a and of b among n share, for each b."""
    x = lowest.unsqueeze(1) + torch.arange(width, device=lowest.device)
    b = b.unsqueeze(1)
    # p(x) by its ratio to p(x − 1): factorials of n would cost five digits. Beyond the last x the ratio is 0.
    more, fewer = (a - x + 1) * (b - x + 1), x * (n - a - b + x)
    ratio = torch.where(x > lowest.unsqueeze(1), more.clamp(min=0).double() / fewer.clamp(min=1), 1.0)
    logarithm = ratio.log().cumsum(dim=1)
    weights = (logarithm - logarithm.amax(dim=1, keepdim=True)).exp()
    values = x.double().xlogy(x.double())
    return (weights * values).sum(dim=1) / weights.sum(dim=1)
