"""Smooth-AP loss."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from nearfar.engine import Mean, Row, masked
from nearfar.engine.rows import positive_columns, slot_chunks
from nearfar.losses.base import PairLoss, register
from nearfar.utils.tensors import readable
from nearfar.utils.validation import positive, whole


@register("smooth_ap", "Brown et al. 2020")
class SmoothAP(PairLoss):
    """Increases the average precision of each anchor's ranking, with smooth ranks.

    Formula:
        rank⁺_j = 1 + Σ_{k∈P, k≠j} σ((s_ik − s_ij) / temperature), rank_j the same over P ∪ N
        ℓ_i = 1 − mean over j∈P_i of rank⁺_j / rank_j

    Args:
        temperature: τ of the logistic function σ, which is a step for τ → 0.
        max_positives: The largest number of positives of an anchor, if it is known before. On a GPU the host then does
            not wait for that number, and the loss is recorded as a CUDA graph. If an anchor has more, this is an error
            on a CPU, and loss and gradients are NaN on a GPU. None: the host waits.

    Differences:
        Classes may have any size, the mean is over the anchors that have a positive, and the anchor is not part of its
        own ranking. Common implementations need classes of one size and rank the anchor as well: pass the batch as its
        own gallery, without positions, for that. A positive can be moved to make room for another one: its pair weight
        is then negative. Time grows with the number of pairs times the largest number of positives of an anchor, or
        times ``max_positives`` on a GPU.

    Reference:
        Brown et al., "Smooth-AP: Smoothing the Path Towards Large-Scale Image Retrieval", ECCV 2020.

    Example:
        >>> import torch, nearfar as nf
        >>> nf.losses.SmoothAP(temperature=0.1)(torch.eye(4), torch.tensor([0, 0, 1, 1]))
        tensor(0.5000)
    """

    deterministic = True  # no CUDA graph without `max_positives`: the host waits for the number of positives
    closed_form = True
    row_bytes = 128

    def __init__(self, *, temperature: float = 0.01, max_positives: int | None = None) -> None:
        super().__init__()
        self.temperature = positive("temperature", temperature)
        self.max_positives = None if max_positives is None else whole("max_positives", max_positives, low=1)
        if self.max_positives is not None:
            self.cuda_graph = True

    def rows(self, sim: Tensor, pos: Tensor, neg: Tensor) -> Sequence[Mean]:
        scaled = sim / self.temperature
        columns, filled = positive_columns(pos, self._width(pos))
        of_positives = scaled.gather(1, columns)
        positives, negatives = masked(of_positives, filled, -math.inf), masked(scaled, neg, -math.inf)
        of_positives = masked(of_positives, filled, math.inf).unsqueeze(2)  # an empty slot is ranked first
        total, weights, by_positives = torch.zeros_like(sim[:, 0]), torch.zeros_like(sim), torch.zeros_like(positives)
        for slots in slot_chunks(columns.shape[1], sim, self.memory_budget):
            positives_before, moved_by_positives = _before(positives, of_positives[:, slots])
            negatives_before, moved_by_negatives = _before(negatives, of_positives[:, slots])
            rank = positives_before + 0.5  # each is compared with itself, which counts as ½ instead of 1
            rank_of_all = rank + negatives_before
            total += (rank / rank_of_all * filled[:, slots]).sum(dim=1)
            slope = filled[:, slots] / rank_of_all.square()
            moved_by_positives.mul_((-slope * negatives_before).unsqueeze(2))
            moved_by_negatives.mul_((slope * rank).unsqueeze(2))
            weights += moved_by_negatives.sum(dim=1)
            by_positives += moved_by_positives.sum(dim=1)
            by_positives[:, slots] -= moved_by_positives.sum(dim=2) + moved_by_negatives.sum(dim=2)
        number = filled.sum(dim=1, dtype=sim.dtype)
        has_positive = number.sign()
        number.clamp_(min=1.0)
        if self.max_positives is not None and not readable(pos):
            number.masked_fill_(pos.sum(dim=1) > self.max_positives, math.nan)
        weights.scatter_add_(1, columns, by_positives)
        factor = (self.temperature * number).reciprocal_()
        return [Mean(Row(has_positive - total / number, [(factor, weights)]), has_positive)]

    def _width(self, pos: Tensor) -> int | None:
        """How many positives of each anchor are ranked; None: every column, since a CUDA graph is being recorded."""
        if not readable(pos):
            if self.max_positives is not None:
                return min(self.max_positives, pos.shape[1])
            if pos.is_cuda and torch.cuda.is_current_stream_capturing():
                return None
        most = int(pos.sum(dim=1).max())
        if self.max_positives is not None and most > self.max_positives:
            raise ValueError(f"an anchor has {most} positives, but max_positives is {self.max_positives}")
        return max(1, most)


def _before(values: Tensor, bounds: Tensor) -> tuple[Tensor, Tensor]:
    """The smooth number of values, [a, n], above each of the bounds, [a, c, 1], and the derivatives, [a, c, n]."""
    above = (values.unsqueeze(1) - bounds).sigmoid_()
    number = above.sum(dim=2)
    return number, torch.addcmul(above, above, above, value=-1.0, out=above)
