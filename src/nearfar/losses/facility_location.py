"""Facility location loss: no clustering should fit the embeddings better than the classes do."""

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch
from torch import Tensor

from nearfar.engine import LossBatch, masked, unit
from nearfar.engine.autograd import Gradients, LossComputation, Needed, Tensors, no_compile, run
from nearfar.losses.base import Loss, refuse_gallery, register
from nearfar.utils.validation import non_negative, whole

TIE = 1e-9  # scores that differ by less than this are equal up to rounding, and the lowest index is used


@register("facility_location", "RLL 6–7")
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
        >>> nf.losses.FacilityLocation(gamma=1.0)(torch.eye(4), torch.tensor([0, 0, 1, 1]))
        tensor(0.6563)
    """

    cuda_graph = deterministic = True

    def __init__(self, *, gamma: float = 1.0, refinements: int = 5) -> None:
        super().__init__()
        self.gamma = non_negative("gamma", gamma)
        self.refinements = whole("refinements", refinements, low=0)

    @no_compile
    def compute(self, batch: LossBatch) -> Tensor:
        refuse_gallery(self, batch, "clusters the batch")
        with torch.no_grad():
            search = _Search(self, unit(batch.embeddings.double()), batch.labels)
            medoids, error = search.clustering()
        points = unit(batch.embeddings)
        gain = _distances(points, search.class_medoids()) - _distances(points, medoids)
        return (gain.sum() + error.to(gain.dtype)).relu()


class _Search:
    """Search for the medoids S with the largest A(S) = F(S) + gamma (1 − NMI).

    Every step scores all candidates at once. On a GPU the greedy search is one CUDA graph and a swap another one.
    """

    def __init__(self, loss: FacilityLocation, points: Tensor, labels: Tensor) -> None:
        _, self.classes, sizes = torch.unique(labels, return_inverse=True, return_counts=True)
        self.loss, self.size, count = loss, len(sizes), len(labels)
        self.distances = torch.cdist(points, points, compute_mode="donot_use_mm_for_euclid_dist")  # 0 for equal points
        # The rank of each point among the neighbors of another; of equal distances the lowest index is the nearest.
        order = self.distances.argsort(dim=1, stable=True)
        index = torch.arange(count, dtype=torch.int32, device=labels.device)
        self.ranks = torch.empty_like(order, dtype=torch.int32).scatter_(1, order, index.expand_as(order))
        self.entropies = torch.special.entr(torch.arange(count + 1, device=labels.device).double() / count)
        self.entropy = self.entropies[sizes].sum()

    def class_medoids(self) -> Tensor:
        """The medoid of each point's class, [m]."""
        same = self.classes.unsqueeze(1) == self.classes
        return masked(masked(self.distances, same).sum(dim=0).expand_as(same), same, math.inf).argmin(dim=1)

    def clustering(self) -> tuple[Tensor, Tensor]:
        """Each point's medoid, [m], in the best clustering found, and gamma (1 − NMI) of it."""
        state = self._run(_Step.greedy)
        for _ in range(self.loss.refinements):
            slots = self._slots(state)  # the medoid that each point can replace in this pass
            first, swapped = 0, False
            while first < self.size:
                # A swap changes the scores of all later medoids, so only the first one that improves is done.
                state = self._run(_Step.swap, state, slots)
                first = int(state[-1])
                swapped = swapped or first <= self.size
            if not swapped:
                break
            state[-1] = 0
        owners = state[: self.size].long()[self._slots(state)]
        return owners, state[-2] + self.distances.gather(1, owners.unsqueeze(1)).sum()

    def _slots(self, state: Tensor) -> Tensor:
        """Which medoid is the nearest of each point, [m]."""
        return self.ranks.index_select(1, state[: self.size].long()).argmin(dim=1)

    def _run(self, step: Callable[..., Tensor], *state: Tensor) -> Tensor:
        """A step of the search, as a CUDA graph on a GPU."""
        gamma, size = self.loss.gamma, self.size

        def compute(inputs: Tensors, constants: Tensors, needed: Needed) -> tuple[Tensor, Gradients]:
            tensors = (tensor for tensor in (*inputs, *constants) if tensor is not None)
            distances, ranks, classes, entropies, entropy, *state = tensors
            return step(_Step(distances, ranks, classes, entropies, entropy, size, gamma), *state), []

        def graph_key() -> Hashable:
            settings = self.loss.graph_key()
            return None if settings is None else (step.__name__, size, settings)

        constants = self.ranks, self.classes, self.entropies, self.entropy, *state
        computation = LossComputation(compute, constants, self.loss, graph_key, self.distances.numel())
        return run(computation, (self.distances,), (True,))[0]  # what needs no gradient would not be recorded


@dataclass(frozen=True)
class _Step:
    """What a step of the search depends on.

    Its state is one tensor, [size + 2]: the medoids, A, and the first medoid that the next swap may replace.
    """

    distances: Tensor  # [m, m]
    ranks: Tensor  # [m, m]
    classes: Tensor  # [m], from 0 to size − 1
    entropies: Tensor  # [m + 1], contribution of a group of each size to an entropy
    entropy: Tensor  # of the classes
    size: int
    gamma: float

    def greedy(self) -> Tensor:
        """Add the best medoid to those that were chosen, one for each class; returns the state."""
        slot = torch.zeros_like(self.classes)
        rank = torch.full_like(self.ranks[0], len(slot))  # of each point's medoid; everything is nearer than none
        cell, nearest = torch.zeros_like(slot), torch.zeros_like(self.distances[0])
        chosen = torch.zeros_like(slot, dtype=torch.bool)
        medoids, scores = [], nearest
        for number in range(self.size):
            takes = self.ranks < rank.unsqueeze(1)
            scores = self.scores(takes, *(numbers.unsqueeze(1) for numbers in (slot, cell, nearest)), cells=len(slot))
            best = _first_best(scores.masked_fill_(chosen, -math.inf))
            chosen.index_fill_(0, best, True)
            medoids.append(best)
            column = self.ranks.index_select(1, best).squeeze(1)
            taken = column < rank
            rank = torch.minimum(column, rank)
            nearest = torch.where(taken, self.distances.index_select(0, best).squeeze(0), nearest)
            slot.masked_fill_(taken, number)
            cell = self.cells(slot)
        return torch.cat([torch.cat(medoids), scores.index_select(0, medoids[-1]), torch.zeros_like(nearest[:1])])

    def swap(self, state: Tensor, slots: Tensor) -> Tensor:
        """Replace the first medoid that one of its candidates improves, by the best of them; returns the next state."""
        medoids, score, first = state[: self.size].long(), state[-2], state[-1]
        # The nearest medoid of each point and the next one, or none, for which every candidate is nearer.
        none = torch.full_like(self.ranks[:, :1], len(slots))
        ranked = torch.cat([self.ranks.index_select(1, medoids), none], dim=1)
        ranks, places = (table.T.contiguous() for table in ranked.topk(2, dim=1, largest=False))  # [2, m]
        owners = torch.cat([medoids, medoids[:1]])[places]
        nearest = self.distances.gather(1, owners.T).T
        cells = self.cells(places.flatten()).view_as(places)
        removed = places[0].unsqueeze(1) == slots  # [m, m], whether a point loses its medoid to a candidate
        rank, *kept = (
            torch.where(removed, two[1].unsqueeze(1), two[0].unsqueeze(1)) for two in (ranks, places, cells, nearest)
        )
        scores = self.scores(self.ranks < rank, *kept, cells=2 * len(slots))
        better = (scores > score + TIE) & (slots >= first)
        place = masked(slots, better, self.size).amin(dim=0, keepdim=True)
        best = _first_best(masked(scores, slots == place, -math.inf))
        medoids = torch.where(torch.arange(self.size, device=place.device) == place, best, medoids)
        reached = torch.where(place < self.size, scores.index_select(0, best), score)
        return torch.cat([medoids, reached, place + 1])

    def scores(self, takes: Tensor, slot: Tensor, cell: Tensor, nearest: Tensor, *, cells: int) -> Tensor:
        """A of each of m candidates, [m]."""
        fit = torch.where(takes, self.distances, nearest).sum(dim=0)
        if self.size == 1:
            return -fit  # there is one clustering
        taken = takes.float()  # counts are exact up to 2^24
        left = 1.0 - taken
        # Groups of points: the clusters, then that of the candidate; the cells, then those of the candidate.
        clusters = self.size + 2
        counts = taken.new_zeros(clusters + cells + self.size, len(taken))
        counts.scatter_add_(0, slot.expand_as(left), left)
        counts[clusters - 1] = taken.sum(dim=0)
        counts[clusters:].scatter_add_(0, cell.expand_as(left), left)
        counts[-self.size :].index_add_(0, self.classes, taken)
        entropies = self.entropies.index_select(0, counts.int().flatten()).view_as(counts)
        both = entropies[:clusters].sum(dim=0).add_(self.entropy)
        joint = entropies[clusters:].sum(dim=0)
        # 1 − NMI = 1 − 2 (both − joint) / both
        return joint.div_(both).mul_(2.0 * self.gamma).sub_(self.gamma).sub_(fit)

    def cells(self, slots: Tensor) -> Tensor:
        """The cells of the table classes × medoids: a number for each cell that occurs, below that of ``slots``."""
        width = self.size + 1
        codes = (self.classes * width).repeat(len(slots) // len(self.classes)).add_(slots)
        names = torch.empty(self.size * width, dtype=torch.long, device=codes.device)
        return names.scatter_(0, codes, torch.arange(len(codes), device=codes.device))[codes]


def _first_best(scores: Tensor) -> Tensor:
    """The lowest index of a score that is the largest, [1]."""
    return (scores >= scores.max() - TIE).int().argmax(dim=0, keepdim=True)


def _distances(points: Tensor, centers: Tensor) -> Tensor:
    """From each point to its center, one of the points, [m]; without a gradient where they are equal."""
    squares = (points - points[centers]).square().sum(dim=1)
    apart = ~(squares <= 0)  # NaN stays NaN
    return masked(masked(squares, apart, 1.0).sqrt(), apart)
