"""Triplet loss, over mined triplets or over all of them without listing any."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from nearfar import mining as minings
from nearfar.engine import Mean, Tile, count, masked, positive_columns
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
        nearness = -tile.values if tile.measure.is_distance else tile.values
        triplets = self.mining.triplets(tile)
        if triplets is not None:
            total, active, chosen = self.chosen(nearness, triplets)
        else:
            total, active, chosen = every_triplet(nearness, *self.mining.select(tile), self.margin)
        return [Mean(total, active if self.average == "active" else chosen)]

    def chosen(self, nearness: Tensor, triplets: Triplets) -> tuple[Tensor, Tensor, Tensor]:
        """Loss, number of active triplets and number of triplets of each anchor."""
        gap = nearness.gather(1, triplets.negative) - nearness.gather(1, triplets.positive)
        hinge = masked((gap + self.margin).relu(), triplets.real)
        return hinge.sum(dim=1), count(hinge > 0, gap), count(triplets.real, gap)


def every_triplet(nearness: Tensor, pos: Tensor, neg: Tensor, margin: float) -> tuple[Tensor, Tensor, Tensor]:
    """Σ over all (p, n) of [s_n − s_p + margin]+ for each row, the number of active triplets, and of all.

    A triplet is active when s_n is above the threshold t_p = s_p − margin. With c_n the number of
    thresholds below s_n, and c_p the number of negatives above t_p, the sum is Σ c_n s_n − Σ c_p t_p, and
    the counts are its derivatives. One sort of the thresholds gives the c_n; their histogram gives the c_p.
    """
    columns, filled = positive_columns(pos)
    thresholds = masked(nearness.gather(1, columns) - margin, filled, math.inf)
    thresholds, order = thresholds.sort(dim=1)
    with torch.no_grad():
        below = torch.searchsorted(thresholds.detach(), nearness.detach())
        per_negative = masked(below, neg)
        histogram = torch.zeros(len(pos), thresholds.shape[1] + 1, dtype=torch.int32, device=pos.device)
        histogram.scatter_add_(1, per_negative, neg.to(torch.int32))
        # Negatives above the r-th threshold: those with more than r thresholds below them.
        above = histogram.sum(dim=1, keepdim=True) - histogram.cumsum(dim=1)[:, :-1]
        per_negative, per_positive = per_negative.to(nearness.dtype), above.to(nearness.dtype)
    thresholds = masked(thresholds, filled.gather(1, order))
    total = torch.linalg.vecdot(per_negative, nearness) - torch.linalg.vecdot(per_positive, thresholds)
    return total, per_negative.sum(dim=1), count(pos, nearness) * count(neg, nearness)
