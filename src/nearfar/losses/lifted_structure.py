"""Lifted structure loss: the original, and the generalised form of later papers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nearfar import mining as minings
from nearfar.engine import Mean, Row, Tile, count, masked, masked_logsumexp, positive_columns, row_logsumexp
from nearfar.losses.base import PairLoss
from nearfar.losses.registry import register
from nearfar.mining import Choice
from nearfar.utils.validation import number


@register
class LiftedStructure(PairLoss):
    """Holds each positive pair against all the negatives of both its ends (raw embeddings).

    Formula:
        J_ij = log(Σ_{k∈N_i} e^(margin − d_ik) + Σ_{l∈N_j} e^(margin − d_jl)) + d_ij
        loss = 1/(2·#pairs) Σ over unordered positive pairs of [J_ij]+²

    Args:
        margin: Α = 1.
        squared: False leaves out the square, as the Ranked List Loss paper prints it.

    Differences:
        With a gallery, the negatives of a gallery embedding are the anchors of other classes.

    Reference:
        Oh Song et al.: Deep Metric Learning via Lifted Structured Feature Embedding, 2016.
    """

    key = "lifted_structure"
    source = "NRA 3, RLL 3"
    measure = "euclidean"
    raw = True
    surveys = True
    row_bytes = 72

    def __init__(self, *, margin: float = 1.0, squared: bool = True) -> None:
        super().__init__()
        self.margin = number("margin", margin)
        self.squared = bool(squared)

    def survey(self, tile: Tile) -> Tensor:
        """log Σ_N e^(margin − d) of each row."""
        return masked_logsumexp(self.margin - tile.values, tile.negatives)

    def on_tile(self, tile: Tile) -> Sequence[Mean]:
        assert tile.survey is not None
        columns, filled = positive_columns(tile.positives)
        ends = torch.logaddexp(self.survey(tile).unsqueeze(1), tile.survey[columns])
        hinge = masked((ends + tile.values.gather(1, columns)).relu(), filled)
        total = (hinge.square() if self.squared else hinge).sum(dim=1)
        return [Mean(0.5 * total, count(filled, hinge))]


@register
class LiftedStructureGeneralized(PairLoss):
    """Holds the soft farthest positive against the soft nearest negative.

    Formula:
        ℓ_i = [log Σ_P e^(margin − s) + log Σ_N e^s]+

    Args:
        margin: Λ = 0.5.
        mining: Which pairs count.

    Differences:
        The unified view prints a minus before the second logarithm, which contradicts the weights it
        derives; this is the form with those weights. An anchor without positives or negatives costs 0.

    Reference:
        Hermans, Beyer, Leibe: In Defense of the Triplet Loss for Person Re-Identification, 2017.
    """

    key = "lifted_structure_generalized"
    source = "Thesis 2.21, Unified View 9"
    minings = tuple(minings.names())
    closed_form = True

    def __init__(self, *, margin: float = 0.5, mining: Choice = "all") -> None:
        super().__init__(mining)
        self.margin = number("margin", margin)

    def rows(self, sim: Tensor, pos: Tensor, neg: Tensor) -> Row:
        return (row_logsumexp(sim, pos, -1.0) + row_logsumexp(sim, neg) + self.margin).relu()
