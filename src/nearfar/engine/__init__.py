"""The engine of the losses: tiles of similarities, rows, measures and gradients."""

from nearfar.engine.autograd import LossComputation, by_autograd, differentiable
from nearfar.engine.class_tiles import ClassShard, class_loss
from nearfar.engine.fused import (
    AllTriplets,
    FusedProgram,
    HardPairs,
    Program,
    SemiHardPairs,
    Sums,
    Terms,
    mean_over,
    use_triton,
)
from nearfar.engine.histograms import SoftHistograms, running_sum
from nearfar.engine.measures import Measure, propagate_nan, unit
from nearfar.engine.measures import create as measure
from nearfar.engine.rows import (
    FLOOR,
    Row,
    count,
    count_nonzero,
    masked,
    masked_logsumexp,
    masked_sum,
    masks,
    positive_columns,
    row_hinge,
    row_logsumexp,
    row_sum,
    scatter_mask,
    slot_chunks,
)
from nearfar.engine.tiles import DEFAULT_BUDGET, Mean, Relations, RowLoss, Tile, Totals, pair_weights, row_loss

__all__ = [
    "DEFAULT_BUDGET", "FLOOR", "AllTriplets", "ClassShard", "FusedProgram", "HardPairs", "LossComputation", "Mean",
    "Measure", "Program", "Relations", "Row", "RowLoss", "SemiHardPairs", "SoftHistograms", "Sums", "Terms", "Tile",
    "Totals", "by_autograd", "class_loss", "count", "count_nonzero", "differentiable", "masked", "masked_logsumexp",
    "masked_sum", "masks", "mean_over", "measure", "pair_weights", "positive_columns", "propagate_nan", "row_hinge",
    "row_logsumexp", "row_loss", "row_sum", "running_sum", "scatter_mask", "slot_chunks", "unit", "use_triton",
]  # fmt: skip
