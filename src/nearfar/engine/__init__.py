"""The engine of the losses: tiles of similarities, rows, measures and gradients."""

from nearfar.engine.batch import LossBatch
from nearfar.engine.measures import unit
from nearfar.engine.programs import use_triton
from nearfar.engine.rows import Row, masked, row_logsumexp, row_sum
from nearfar.engine.tiles import Mean, Tile

__all__ = ["LossBatch", "Mean", "Row", "Tile", "masked", "row_logsumexp", "row_sum", "unit", "use_triton"]
