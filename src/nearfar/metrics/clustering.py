"""Clustering metrics: k-means clusters of the embeddings compared with the classes by NMI, AMI and pairwise F1.

The three scores depend only on sizes: of the classes, of the clusters, and of their intersections. With
F(sizes) = Σ s log s over n samples, the entropy of a clustering is log n − F / n, and mutual information is
log n + (F(shared) − F(classes) − F(clusters)) / n. AMI also needs the expectation of F(shared) under random assignment.

NMI and AMI agree with scikit-learn. They are computed here because scikit-learn is slower: for 60,502 samples in 11,316
classes its AMI took 90 s (here 2 s) with an error of 1e-9, and its NMI 0.25 s (here 0.12 s).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from nearfar.metrics.kmeans import MEMORY_BUDGET, kmeans
from nearfar.utils.progress import Progress
from nearfar.utils.tensors import ArrayInput, as_labels, as_vectors, check_finite
from nearfar.utils.validation import one_of, whole

NORMALIZATIONS = ("arithmetic", "geometric")
CHUNK = 1 << 20  # probabilities held at a time


def clustering(
    embeddings: ArrayInput,
    labels: ArrayInput,
    *,
    k: int | None = None,
    restarts: int = 5,
    iterations: int = 100,
    seed: int = 0,
    normalize: bool = True,
    normalization: str = "arithmetic",
    memory_budget: int = MEMORY_BUDGET,
    progress: Progress | None = None,
) -> dict[str, float]:
    """Cluster embeddings with k-means and compare the clusters with the classes.

    Args:
        embeddings: [n, d], floating point: a tensor on any device, a NumPy array or a memory map.
        labels: [n], integers, or strings in a NumPy array; at least two classes.
        k: Number of clusters; by default the number of classes.
        restarts: Number of k-means runs; the clusters with the lowest inertia are used.
        iterations: Largest number of iterations of each run.
        seed: Seed of the initial centers.
        normalize: Scale the embeddings to unit length first.
        normalization: Normalization of NMI, see :func:`nmi`.
        memory_budget: Working memory in bytes, see :func:`kmeans`.
        progress: Called with the number of iterations done and their total.

    Returns:
        ``{"nmi": …, "ami": …, "f1": …, "clusters": k}``. All scores are 1 if every class has one member.

    Raises:
        ValueError: If there is only one class, or an argument is invalid.

    Example:
        >>> embeddings = torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0], [0.1, 0.9]])
        >>> clustering(embeddings, torch.tensor([3, 3, 8, 8]))
        {'nmi': 1.0, 'ami': 1.0, 'f1': 1.0, 'clusters': 2}
    """
    vectors = as_vectors("embeddings", embeddings)
    codes = as_labels("labels", labels, len(vectors)).cpu()
    one_of("normalization", normalization, NORMALIZATIONS)
    classes = len(torch.unique(codes))
    if classes == 1:
        raise ValueError("labels have one class; at least two are required")
    k = classes if k is None else whole("k", k, high=len(vectors))
    check_finite("embeddings", vectors)
    assignment = kmeans(
        vectors,
        k,
        restarts=restarts,
        iterations=iterations,
        seed=seed,
        normalize=normalize,
        memory_budget=memory_budget,
        progress=progress,
    ).assignment
    return {
        "nmi": nmi(codes, assignment, normalization=normalization),
        "ami": ami(codes, assignment),
        "f1": f1(codes, assignment),
        "clusters": k,
    }


class _Sizes(NamedTuple):
    """Number of samples in each class, each cluster, and each nonempty intersection of the two."""

    classes: Tensor  # [c]
    clusters: Tensor  # [k]
    shared: Tensor  # [p]

    @property
    def samples(self) -> int:
        """Number of samples."""
        return int(self.classes.sum())

    @property
    def equal(self) -> bool:
        """Whether classes and clusters are the same partition."""
        return len(self.classes) == len(self.clusters) == len(self.shared)

    @property
    def trivial(self) -> bool:
        """Whether the classes or the clusters are one set, or all of size one."""
        return not {len(self.classes), len(self.clusters)}.isdisjoint((1, self.samples))


def nmi(labels: ArrayInput, assignment: ArrayInput, *, normalization: str = "arithmetic") -> float:
    """Compute the normalized mutual information of classes and clusters.

    Args:
        labels: [n], the class of each sample: integers, or strings in a NumPy array.
        assignment: [n], the cluster of each sample.
        normalization: Divide mutual information by the ``"arithmetic"`` mean of the two entropies, or by the
            ``"geometric"`` mean, as older papers and code do.

    Returns:
        1 if classes and clusters are the same partition, 0 if they are independent or only one of them has a single
        set.

    Example:
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
    of_classes, of_clusters, of_shared = (_sum_x_log_x(counts) for counts in sizes)
    information = max(0.0, log_n + (of_shared - of_classes - of_clusters) / n)
    entropies = log_n - of_classes / n, log_n - of_clusters / n
    scale = sum(entropies) / 2 if normalization == "arithmetic" else math.sqrt(math.prod(entropies))
    return information / scale


def ami(labels: ArrayInput, assignment: ArrayInput) -> float:
    """Compute the mutual information of classes and clusters, adjusted for chance.

    Formula:
        (I − E[I]) / (mean entropy − E[I]), with the exact expectation over all clusterings of the same sizes and the
        arithmetic mean.

    Args:
        labels: [n], the class of each sample: integers, or strings in a NumPy array.
        assignment: [n], the cluster of each sample.

    Returns:
        1 if classes and clusters are the same partition, about 0 for random clusters, and 0 if either is one set or
        has only sets of size one.

    Reference:
        Vinh, Epps and Bailey, "Information Theoretic Measures for Clusterings Comparison", JMLR 2010.

    Example:
        >>> round(ami(torch.tensor([0, 0, 1, 1]), torch.tensor([0, 1, 0, 1])), 9)
        -0.5
    """
    sizes = _sizes(labels, assignment)
    if sizes.equal:
        return 1.0
    if sizes.trivial:
        return 0.0
    of_classes, of_clusters, of_shared = (_sum_x_log_x(counts) for counts in sizes)
    expected = _expected_sum_x_log_x(sizes)
    return (of_shared - expected) / ((of_classes + of_clusters) / 2 - expected)


def f1(labels: ArrayInput, assignment: ArrayInput) -> float:
    """Compute the F1 score of pairs of samples.

    A pair in one cluster is predicted positive; a pair of one class is positive.

    Args:
        labels: [n], the class of each sample: integers, or strings in a NumPy array.
        assignment: [n], the cluster of each sample.

    Returns:
        2PR / (P + R) over all pairs; 1 if no two samples share a class or a cluster.

    Example:
        >>> f1(torch.tensor([0, 0, 0, 1]), torch.tensor([0, 0, 1, 1]))  # 3 pairs and 2 pairs have 1 in common
        0.4
    """
    of_classes, of_clusters, of_shared = (int((counts * (counts - 1)).sum()) for counts in _sizes(labels, assignment))
    pairs = of_classes + of_clusters
    return 2 * of_shared / pairs if pairs else 1.0


def _sizes(labels: ArrayInput, assignment: ArrayInput) -> _Sizes:
    """Count without a table of all classes by all clusters."""
    codes = as_labels("labels", labels).cpu()
    _, classes, class_sizes = torch.unique(codes, return_inverse=True, return_counts=True)
    codes = as_labels("assignment", assignment, len(codes)).cpu()
    _, clusters, cluster_sizes = torch.unique(codes, return_inverse=True, return_counts=True)
    _, shared = torch.unique(classes * len(cluster_sizes) + clusters, return_counts=True)
    return _Sizes(class_sizes, cluster_sizes, shared)


def _sum_x_log_x(sizes: Tensor) -> float:
    """Return Σ s log s, the same for the same sizes in any order."""
    different, times = torch.unique(sizes.double(), return_counts=True)
    return float((times * different.xlogy(different)).sum())


def _expected_sum_x_log_x(sizes: _Sizes) -> float:
    """Return E[Σ s log s] of the intersections if samples were assigned to the clusters at random.

    The intersection of a class of size a and a cluster of size b is hypergeometric, so equal sizes are grouped; there
    are at most √(2n) different ones.
    """
    classes, class_times = torch.unique(sizes.classes, return_counts=True)
    clusters, cluster_times = torch.unique(sizes.clusters, return_counts=True)
    total = 0.0
    for a, times in zip(classes.tolist(), class_times.tolist(), strict=True):
        for group, lowest, width in _windows(a, clusters, sizes.samples):
            expected = _hypergeometric_x_log_x(a, clusters[group], sizes.samples, lowest, width)
            total += times * float(cluster_times[group].double() @ expected)
    return total


def _windows(a: int, b: Tensor, n: int) -> Iterator[tuple[slice, Tensor, int]]:
    """Yield slices of b with the support of each hypergeometric distribution: its start and width.

    By Bernstein's inequality less than 1e-25 of the probability is farther than t from the mean, t² = 40 t + 120 σ².
    """
    mean = a * b.double() / n
    variance = mean * (1 - b / n)  # of as many draws with replacement: an upper bound
    reach = 20 + (400 + 120 * variance).sqrt()
    lowest = torch.maximum((mean - reach).floor().long(), (a + b - n).clamp(min=0))
    highest = torch.minimum((mean + reach).ceil().long(), b.clamp(max=a))
    width = int((highest - lowest).max()) + 1
    step = max(1, CHUNK // width)
    for start in range(0, len(b), step):
        group = slice(start, start + step)
        yield group, lowest[group], width


def _hypergeometric_x_log_x(a: int, b: Tensor, n: int, lowest: Tensor, width: int) -> Tensor:
    """Return E[x log x] of the size x of the intersection of sets of size a and b among n, for each b."""
    x = lowest.unsqueeze(1) + torch.arange(width, device=lowest.device)
    b = b.unsqueeze(1)
    # p(x) from its ratio to p(x − 1): factorials of n would lose five digits. Beyond the last x the ratio is 0.
    more, fewer = (a - x + 1) * (b - x + 1), x * (n - a - b + x)
    ratio = torch.where(x > lowest.unsqueeze(1), more.clamp(min=0).double() / fewer.clamp(min=1), 1.0)
    logarithm = ratio.log().cumsum(dim=1)
    weights = (logarithm - logarithm.amax(dim=1, keepdim=True)).exp()
    values = x.double().xlogy(x.double())
    return (weights * values).sum(dim=1) / weights.sum(dim=1)
