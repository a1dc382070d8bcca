"""Rows and tiles: everything a pair-based loss stands on."""

from nearfar.engine.autograd import by_autograd, differentiable
from nearfar.engine.batch import DEFAULT_BUDGET, Batch, Mean, RowLoss, Tile, Totals
from nearfar.engine.class_tiles import class_loss
from nearfar.engine.cuda_graphs import Step
from nearfar.engine.histograms import SoftHistograms, running_sum
from nearfar.engine.masks import (
    FLOOR,
    count,
    masked,
    masked_logsumexp,
    masked_sum,
    masks,
    positive_columns,
    scatter_mask,
    slot_chunks,
)
from nearfar.engine.measures import Measure, show_nan, unit
from nearfar.engine.measures import create as measure
from nearfar.engine.rows import Row, count_nonzero, row_hinge, row_logsumexp, row_sum
from nearfar.engine.tiles import pair_weights, row_loss

__all__ = [
    "DEFAULT_BUDGET",
    "FLOOR",
    "Batch",
    "Mean",
    "Measure",
    "Row",
    "RowLoss",
    "SoftHistograms",
    "Step",
    "Tile",
    "Totals",
    "by_autograd",
    "class_loss",
    "count",
    "count_nonzero",
    "differentiable",
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
    "running_sum",
    "scatter_mask",
    "show_nan",
    "slot_chunks",
    "unit",
]
