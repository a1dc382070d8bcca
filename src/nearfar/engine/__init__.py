"""Rows and tiles: everything a pair-based loss stands on."""

from nearfar.engine.masks import (
    FLOOR,
    count,
    masked,
    masked_logsumexp,
    masked_sum,
    masks,
    positive_columns,
    scatter_mask,
)
from nearfar.engine.measures import Measure
from nearfar.engine.measures import create as measure
from nearfar.engine.problem import DEFAULT_BUDGET, Batch, Mean, Tile
from nearfar.engine.rows import Row, count_nonzero, row_hinge, row_logsumexp, row_sum
from nearfar.engine.tiles import pair_weights, row_loss

__all__ = [
    "DEFAULT_BUDGET",
    "FLOOR",
    "Batch",
    "Mean",
    "Measure",
    "Row",
    "Tile",
    "count",
    "count_nonzero",
    "masked",
    "masked_logsumexp",
    "masked_sum",
    "masks",
    "measure",
    "pair_weights",
    "positive_columns",
    "row_hinge",
    "row_logsumexp",
    "row_loss",
    "row_sum",
    "scatter_mask",
]
