"""Facility location loss: no clustering should fit the embeddings better than the classes do."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from nearfar.engine import LossComputation, masked, unit
from nearfar.engine.autograd import Gradients, Needed, Tensors, no_compile, run
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
        (classes + replaced medoids) · m². NMI is 2 I / (H(y) + H(ŷ)). The loss is a sum, as printed, and grows with the
        batch. On a GPU the host waits for the number of classes and for each medoid that is replaced.

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

    @no_compile
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
            search = _Search(self, unit(embeddings.double()), labels)
            medoids, error = search.clustering()
        points = unit(embeddings)
        gain = _distances(points, search.class_medoids()) - _distances(points, medoids)
        return (gain.sum() + error.to(gain.dtype)).relu()


class _Search:
    """Search for the medoids S with the largest A(S) = F(S) + gamma (1 − NMI).

    Every step scores all candidates at once. On a GPU the greedy search is one CUDA graph and a swap another one.
    """

    def __init__(self, loss: FacilityLocation, points: Tensor, labels: Tensor) -> None:
        names, self.classes = torch.unique(labels, return_inverse=True)
        self.loss, self.size = loss, len(names)
        self.distances = torch.cdist(points, points, compute_mode="donot_use_mm_for_euclid_dist")  # 0 for equal points
        # The rank of each point among the neighbors of another; of equal distances the lowest index is the nearest.
        order = self.distances.argsort(dim=1, stable=True)
        index = torch.arange(len(labels), device=labels.device)
        self.ranks = torch.empty_like(order).scatter_(1, order, index.expand_as(order))

    def class_medoids(self) -> Tensor:
        """The medoid of each point's class, [m]."""
        same = self.classes.unsqueeze(1) == self.classes
        return masked(masked(self.distances, same).sum(dim=0).expand_as(same), same, math.inf).argmin(dim=1)

    def clustering(self) -> tuple[Tensor, Tensor]:
        """Each point's medoid, [m], in the best clustering found, and gamma (1 − NMI) of it."""
        medoids = self._run(_Step.greedy)
        for _ in range(self.loss.refinements):
            before, first = medoids, 0
            slots = self.ranks[:, medoids].argmin(dim=1)  # the medoid that each point can replace in this pass
            while first < self.size:
                # A swap changes the scores of all later medoids, so only the first one that improves is done.
                found = self._run(_Step.swap, medoids, slots, slots.new_tensor(first))
                slot, candidate = found.tolist()
                if slot == self.size:
                    break
                medoids = torch.where(torch.arange(self.size, device=medoids.device) == slot, candidate, medoids)
                first = slot + 1
            if medoids is before:
                break
        owners = medoids[self.ranks[:, medoids].argmin(dim=1)]
        return owners, self._run(_Step.error, owners)

    def _run(self, step: Callable[..., Tensor], *state: Tensor) -> Tensor:
        """A step of the search, as a CUDA graph on a GPU."""
        gamma, size = self.loss.gamma, self.size

        def compute(inputs: Tensors, constants: Tensors, needed: Needed) -> tuple[Tensor, Gradients]:
            distances, ranks, classes, *state = (tensor for tensor in (*inputs, *constants) if tensor is not None)
            return step(_Step(distances, ranks, classes, size, gamma), *state), []

        constants = (self.ranks, self.classes, *state)
        key = step.__name__, gamma, size
        computation = LossComputation(compute, constants, self.loss, lambda: key, self.distances.numel())
        return run(computation, (self.distances,), (False,))[0]


@dataclass(frozen=True)
class _Step:
    """What a step of the search depends on."""

    distances: Tensor  # [m, m]
    ranks: Tensor  # [m, m]
    classes: Tensor  # [m], from 0 to size − 1
    size: int
    gamma: float

    def greedy(self) -> Tensor:
        """Add the best medoid to those that were chosen, one for each class; returns them, [size]."""
        count, index = len(self.classes), self._index()
        rank = torch.full_like(index, count)  # of each point's medoid; everything is nearer than none
        owner, cell, nearest = torch.zeros_like(index), torch.zeros_like(index), torch.zeros_like(self.distances[0])
        chosen = torch.zeros_like(index, dtype=torch.bool)
        medoids = []
        for _ in range(self.size):
            takes = self.ranks < rank.unsqueeze(1)
            scores = self.scores(takes, *(each.unsqueeze(1) for each in (owner, cell, nearest)))
            best = _first_best(scores.masked_fill_(chosen, -math.inf))
            chosen.index_fill_(0, best, True)
            medoids.append(best)
            column = self.ranks.index_select(1, best).squeeze(1)
            is_taken, rank = column < rank, torch.minimum(column, rank)
            owner = torch.where(is_taken, best, owner)
            nearest = torch.where(is_taken, self.distances.index_select(1, best).squeeze(1), nearest)
            cell = self.cells(owner)
        return torch.cat(medoids)

    def swap(self, medoids: Tensor, slots: Tensor, first: Tensor) -> Tensor:
        """The first medoid, from ``first`` on, that one of its candidates can replace, and the best of them, [2].

        Args:
            medoids: The medoids, [size].
            slots: Which medoid each point may replace, [m].
            first: The first medoid to look at.
        """
        count = len(self.classes)
        # The nearest medoid of each point and the next one, or none, for which every candidate is nearer.
        near = torch.cat([self.ranks.index_select(1, medoids), torch.full_like(self.ranks[:, :1], count)], dim=1)
        (rank, next_rank), (slot, next_slot) = (each.T for each in near.topk(2, dim=1, largest=False))
        names = torch.cat([medoids, medoids[:1]])
        owners = torch.stack([names[slot], names[next_slot]])  # [2, m]
        distances = self.distances.gather(1, owners.T).T
        cells = self.cells(owners.flatten()).view_as(owners)
        removed = slot.unsqueeze(1) == slots  # [m, m], whether a point loses its medoid to a candidate
        takes = self.ranks < torch.where(removed, next_rank.unsqueeze(1), rank.unsqueeze(1))
        kept = (torch.where(removed, two[1].unsqueeze(1), two[0].unsqueeze(1)) for two in (owners, cells, distances))
        scores = self.scores(takes, *kept)
        nobody = torch.zeros_like(takes[:, :1])
        now = self.scores(nobody, *(two[0].unsqueeze(1) for two in (owners, cells, distances)))
        better = (scores > now + TIE) & (slots >= first)
        place = torch.where(better, slots, self.size).amin(dim=0, keepdim=True)
        return torch.cat([place, _first_best(masked(scores, slots == place, -math.inf))])

    def error(self, owners: Tensor) -> Tensor:
        """gamma (1 − NMI) of a clustering."""
        nobody = torch.zeros_like(self.ranks[:, :1], dtype=torch.bool)
        return self.errors(nobody, owners.unsqueeze(1), self.cells(owners).unsqueeze(1)).squeeze(0)

    def scores(self, takes: Tensor, owner: Tensor, cell: Tensor, nearest: Tensor) -> Tensor:
        """A of each of c candidates, [c].

        Args:
            takes: Which points a candidate takes, [m, c].
            owner: The medoids of the other points, [m, c] or [m, 1].
            cell: Their cells, see ``cells``.
            nearest: Their distances.
        """
        reach = self.distances[:, : takes.shape[1]]
        return self.errors(takes, owner, cell) - torch.where(takes, reach, nearest).sum(dim=0)

    def errors(self, takes: Tensor, owner: Tensor, cell: Tensor) -> Tensor:
        """gamma (1 − NMI) after each of c candidates has taken its points, [c]."""
        taken = takes.float()  # counts are exact up to 2^24
        left, count = 1.0 - taken, len(self.classes)
        of_clusters = taken.new_zeros(count, taken.shape[1]).scatter_add_(0, owner.expand_as(left), left)
        of_cells = taken.new_zeros(2 * count, taken.shape[1]).scatter_add_(0, cell.expand_as(left), left)
        of_classes = taken.new_zeros(self.size, taken.shape[1]).index_add_(0, self.classes, taken)
        sizes = torch.zeros_like(of_classes[:, :1]).index_add_(0, self.classes, torch.ones_like(taken[:, :1]))
        clusters = self._entropy(torch.cat([of_clusters, taken.sum(dim=0, keepdim=True)]))
        both = self._entropy(sizes) + clusters
        joint = self._entropy(torch.cat([of_cells, of_classes]))
        error: Tensor = self.gamma * (1.0 - masked(2.0 * (both - joint) / both, both > 0, 1.0))
        return error

    def cells(self, owners: Tensor) -> Tensor:
        """The cells of the table classes × medoids: one number below 2m for each cell that occurs.

        Args:
            owners: The medoids of all points, [m], or twice as many, [2m].
        """
        count = len(self.classes)
        codes = self.classes.repeat(len(owners) // count) * count + owners
        names = torch.empty(self.size * count, dtype=torch.long, device=codes.device)
        return names.scatter_(0, codes, torch.arange(len(codes), device=codes.device))[codes]

    def _index(self) -> Tensor:
        return torch.arange(len(self.classes), device=self.classes.device)

    def _entropy(self, counts: Tensor) -> Tensor:
        """Entropy of each column of counts, [c]."""
        count = len(self.classes)
        table = torch.special.entr(torch.arange(count + 1, dtype=torch.float64, device=counts.device) / count)
        entropies: Tensor = table.index_select(0, counts.int().flatten()).view_as(counts)
        return entropies.sum(dim=0)


def _first_best(scores: Tensor) -> Tensor:
    """The lowest index of a score that is the largest, [1]."""
    return (scores >= scores.max() - TIE).int().argmax(dim=0, keepdim=True)


def _distances(points: Tensor, centers: Tensor) -> Tensor:
    """From each point to its center, one of the points, [m]; without a gradient where they are equal."""
    squares = (points - points[centers]).square().sum(dim=1)
    apart = ~(squares <= 0)  # NaN stays NaN
    return masked(masked(squares, apart, 1.0).sqrt(), apart)
