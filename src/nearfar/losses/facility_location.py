"""Facility location loss: no clustering should fit the embeddings better than the classes do."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from nearfar.engine import masked, unit
from nearfar.losses.base import Loss, refuse_gallery
from nearfar.losses.registry import register
from nearfar.utils.validation import non_negative, whole

TIE = 1e-9  # scores that differ by less than this are equal up to rounding, and the lowest index is used


@register
class FacilityLocation(Loss):
    """Penalizes any clustering that fits the embeddings better than the classes do.

    Formula:
        F(S) = −Σ_i min_{j∈S} d_ij,  and for the classes  F(y) = −Σ_c min_{j∈c} Σ_{i∈c} d_ij
        loss = [max over S of F(S) + gamma (1 − NMI(y, ŷ_S)) − F(y)]+,  ŷ_S the nearest medoid of each embedding

    Args:
        gamma: Weight of the clustering error.
        refinements: Maximum number of passes over the medoids after the greedy search.

    Differences:
        The search for S follows the paper: greedy, with one medoid for each class in the batch; then, in passes, each
        medoid is replaced by the member of its cluster that improves the score of the whole clustering most (the
        authors' code only counts distances within that cluster). The result is a constant for the gradient. Ties go to
        the lowest index, and the search runs in float64, so that rounding decides nothing. Its time grows with
        classes · m². NMI is 2 I / (H(y) + H(ŷ)). The loss is a sum, as printed, and grows with the batch. On a GPU the
        host waits for the number of classes and after each pass.

    Reference:
        Oh Song et al., "Deep Metric Learning via Facility Location", CVPR 2017. RLL 6–7.

    Example:
        >>> import torch, nearfar as nf
        >>> labels = torch.tensor([0, 0, 1, 1])
        >>> nf.losses.FacilityLocation(gamma=1.0)(torch.eye(4), labels)
        tensor(0.6563)
    """

    key = "facility_location"
    source = "RLL 6–7"
    deterministic = True

    def __init__(self, *, gamma: float = 1.0, refinements: int = 5) -> None:
        super().__init__()
        self.gamma = non_negative("gamma", gamma)
        self.refinements = whole("refinements", refinements, low=0)

    def compute(
        self,
        embeddings: Tensor,
        labels: Tensor,
        gallery: Tensor | None,
        gallery_labels: Tensor,
        positions: Tensor | None,
    ) -> Tensor:
        refuse_gallery(self, gallery, "clusters the batch")
        with torch.no_grad():
            search = _Search(unit(embeddings.double()), labels, self.gamma)
            medoids, error = search.clustering(self.refinements)
        points = unit(embeddings)
        gain = _distances(points, search.class_medoids()) - _distances(points, medoids)
        return (gain.sum() + error.to(gain.dtype)).relu()


class _Search:
    """Search for the medoids S with the largest A(S) = F(S) + gamma (1 − NMI)."""

    def __init__(self, points: Tensor, labels: Tensor, gamma: float) -> None:
        names, self.classes, sizes = torch.unique(labels, return_inverse=True, return_counts=True)
        self.size, self.gamma = len(names), gamma
        self.distances = torch.cdist(points, points, compute_mode="donot_use_mm_for_euclid_dist")  # 0 for equal points
        self.index = torch.arange(len(labels), device=labels.device)
        shares = torch.arange(len(labels) + 1, dtype=points.dtype, device=labels.device) / len(labels)
        self.entropy: Tensor = torch.special.entr(shares)  # −p log p for every number of points
        self.class_entropy = self.entropy[sizes].sum()

    def class_medoids(self) -> Tensor:
        """The medoid of each point's class, [m]."""
        same = self.classes.unsqueeze(1) == self.classes
        return masked(masked(self.distances, same).sum(dim=0).expand_as(same), same, math.inf).argmin(dim=1)

    def clustering(self, refinements: int) -> tuple[Tensor, Tensor]:
        """Each point's medoid, [m], in the best clustering found, and gamma (1 − NMI) of it."""
        chosen = torch.zeros_like(self.index, dtype=torch.bool)
        medoids = []
        for _ in range(self.size):
            best = _first_best(self.scores(chosen, self.index).masked_fill_(chosen, -math.inf))
            chosen = chosen | (self.index == best)
            medoids.append(best)
        for _ in range(refinements):
            before, owners = chosen, self.assign(chosen)[1]
            for slot, old in enumerate(medoids):
                members = (owners == old) | (self.index == old)
                # On a GPU the number of members would need a synchronization, so all points are candidates.
                candidates = members.nonzero().squeeze(1) if members.device.type == "cpu" else self.index
                others = chosen & (self.index != old)
                scores = self.scores(others, candidates).masked_fill_(~members[candidates], -math.inf)
                best = _first_best(scores)
                better = scores[best] > masked(scores, candidates == old, -math.inf).max() + TIE
                medoids[slot] = torch.where(better, candidates[best], old)
                chosen = others | (self.index == medoids[slot])
            if torch.equal(chosen, before):
                break
        owners = self.assign(chosen)[1]
        return owners, self.errors(owners, torch.zeros_like(owners, dtype=torch.bool).unsqueeze(1)).squeeze(0)

    def assign(self, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """The distance of each point to the nearest of the chosen, infinite if there are none, and its index."""
        nearest, owners = self.distances.masked_fill(~chosen, math.inf).min(dim=1)
        return nearest, owners

    def scores(self, chosen: Tensor, candidates: Tensor) -> Tensor:
        """A of the chosen and each candidate, [c]."""
        nearest, owners = (each.unsqueeze(1) for each in self.assign(chosen))
        reach = self.distances[:, candidates]
        takes = (reach < nearest) | ((reach == nearest) & (candidates < owners))
        return self.errors(owners.squeeze(1), takes) - torch.minimum(reach, nearest).sum(dim=0)

    def errors(self, owners: Tensor, takes: Tensor) -> Tensor:
        """gamma (1 − NMI) after each candidate has taken its points, [m, c], from their owners, [c]."""
        # The non-empty cells of the table classes × owners, each identified by one of its points.
        cells = self.classes * len(owners) + owners
        names = torch.empty(self.size * len(owners), dtype=torch.long, device=cells.device)
        cells = names.scatter_(0, cells, self.index)[cells]
        taken = takes.float()  # counts are exact up to 2^24
        clusters = self._remaining(owners, taken) + self.entropy[takes.sum(dim=0)]
        joint = self._remaining(cells, taken) + self._entropy(_count(self.classes, taken, self.size))
        both = self.class_entropy + clusters
        return self.gamma * (1.0 - masked(2.0 * (both - joint) / both, both > 0, 1.0))

    def _remaining(self, groups: Tensor, taken: Tensor) -> Tensor:
        """Entropy of what each candidate leaves of the groups, [c]."""
        sizes = _count(groups, taken.new_ones(len(groups), 1), len(groups))
        return self._entropy(sizes - _count(groups, taken, len(groups)))

    def _entropy(self, counts: Tensor) -> Tensor:
        return self.entropy.index_select(0, counts.int().flatten()).view_as(counts).sum(dim=0)


def _count(groups: Tensor, taken: Tensor, number: int) -> Tensor:
    """How many points of each group each candidate takes, [number, c]."""
    return taken.new_zeros(number, taken.shape[1]).index_add_(0, groups, taken)


def _first_best(scores: Tensor) -> Tensor:
    """The lowest index of a score that is the largest, [1]."""
    return (scores >= scores.max() - TIE).int().argmax(dim=0, keepdim=True)


def _distances(points: Tensor, centers: Tensor) -> Tensor:
    """From each point to its center, one of the points, [m]; without a gradient where they are equal."""
    squares = (points - points[centers]).square().sum(dim=1)
    apart = ~(squares <= 0)  # NaN stays NaN
    return masked(masked(squares, apart, 1.0).sqrt(), apart)
