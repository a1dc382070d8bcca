"""Triplet loss, over mined triplets or over all of them without listing any."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from nearfar import mining as minings
from nearfar.engine import Mean, Row, Tile, count, masked, positive_columns, row_sum
from nearfar.losses.base import PairLoss
from nearfar.losses.registry import register
from nearfar.losses.settings import number, one_of
from nearfar.mining import Mining, Triplets

MARGINS = {"cosine": 0.1, "squared_distance": 1.0}


@register
class Triplet(PairLoss):
    """Wants each positive nearer than each negative by a margin.

    Formula
        cosine:            mean over triplets of [s_an − s_ap + margin]+
        squared_distance:  mean over triplets of [d²_ap − d²_an + margin]+

    Parameters
        form     "cosine", or "squared_distance" between unit vectors.
        margin   λ = 0.1 for cosine, m = 1 for squared_distance.
        mining   "semi_hard", "hard", "random" and "distance_weighted" choose triplets; "all" and
                 "valid_triplet" choose sets and mean every triplet of them, in O(m² log m).
        average  "all": over the chosen triplets; "active": over those with a loss.

    Reference
        Schroff, Kalenichenko, Philbin: FaceNet, 2015.
    """

    key = "triplet"
    source = "Thesis 2.17 and 2.20, NRA 2, RLL 1"
    minings = tuple(minings.names())
    row_bytes = 96
    closed_form = True

    def __init__(
        self,
        *,
        form: str = "cosine",
        margin: float | None = None,
        mining: str | Mining = "semi_hard",
        average: str = "all",
    ) -> None:
        super().__init__(mining)
        self.form = one_of("form", form, ("cosine", "squared_distance"))
        self.measure = "cosine" if form == "cosine" else "squared_euclidean"
        self.margin = number("margin", MARGINS[form] if margin is None else margin)
        self.average = one_of("average", average, ("all", "active"))

    def on_tile(self, tile: Tile) -> Sequence[Mean]:
        triplets = self.mining.triplets(tile)
        if triplets is not None:
            total, active, chosen = listed_triplets(tile.similarity, triplets, self.margin)
        else:
            total, active, chosen = every_triplet(tile.similarity, *self.mining.select(tile), self.margin)
        if tile.measure.is_distance:  # the derivative by minus the distance
            total = total.chain(total.value, -1.0)
        return [Mean(total, active if self.average == "active" else chosen)]


def listed_triplets(sim: Tensor, triplets: Triplets, margin: float) -> tuple[Row, Tensor, Tensor]:
    """Σ of [s_n − s_p + margin]+ over each row's triplets, the number of active ones, and of all."""
    positive, negative, real = triplets
    hinge = masked((sim.gather(1, negative) - sim.gather(1, positive) + margin).relu_(), real)
    active = hinge.sign()
    weights = torch.zeros_like(sim).scatter_add_(1, negative, active).scatter_add_(1, positive, -active)
    return row_sum(hinge, weights), active.sum(dim=1), count(real, sim)


def every_triplet(sim: Tensor, pos: Tensor, neg: Tensor, margin: float) -> tuple[Row, Tensor, Tensor]:
    """Σ over all (p, n) of [s_n − s_p + margin]+ for each row, the number of active triplets, and of all.

    A triplet is active when s_n is above the threshold t_p = s_p − margin. With c_n the number of
    thresholds below s_n, and c_p the number of negatives above t_p, the sum is Σ c_n s_n − Σ c_p t_p, and
    c_n and −c_p are its derivatives. Counting them needs order, not triplets.
    """
    levels = torch.where(pos, sim - margin, sim)
    weights = (counts_by_histogram if sim.device.type == "cpu" else counts_by_sorting)(levels, pos, neg)
    total = Row(torch.linalg.vecdot(weights, levels), [(1.0, weights)])
    return total, weights.relu().sum(dim=1), count(pos, sim) * count(neg, sim)


def counts_by_histogram(levels: Tensor, pos: Tensor, neg: Tensor) -> Tensor:
    """c_n for negatives and −c_p for positives, [a, n], when positives are few and easily listed.

    One sort of the thresholds gives the c_n; their histogram gives the c_p.
    """
    columns, filled = positive_columns(pos)
    thresholds, order = masked(levels.gather(1, columns), filled, math.inf).sort(dim=1)
    below = masked(torch.searchsorted(thresholds, levels), neg)
    histogram = torch.zeros(len(pos), thresholds.shape[1] + 1, dtype=torch.int32, device=pos.device)
    histogram.scatter_add_(1, below, neg.to(torch.int32))
    # Negatives above the r-th threshold: those with more than r thresholds below them.
    above = histogram.sum(dim=1, keepdim=True) - histogram.cumsum(dim=1)[:, :-1]
    return below.to(levels.dtype).scatter_add_(1, columns.gather(1, order), above.to(levels.dtype).neg_())


def counts_by_sorting(levels: Tensor, pos: Tensor, neg: Tensor) -> Tensor:
    """The same with one sort of everything, for devices where many threads would meet in a histogram."""
    # A negative that is level with a threshold is not above it: it has to come first.
    just_above = torch.nextafter(levels, torch.full_like(levels, math.inf))
    order = masked(torch.where(pos, just_above, levels), pos | neg, math.inf).argsort(dim=1)
    is_positive, is_negative = (mask.gather(1, order).to(torch.int32) for mask in (pos, neg))
    below = is_positive.cumsum(dim=1, dtype=torch.int32)
    above = is_negative.sum(dim=1, keepdim=True) - is_negative.cumsum(dim=1, dtype=torch.int32)
    counts = is_negative * below - is_positive * above
    return torch.empty_like(levels).scatter_(1, order, counts.to(levels.dtype))
