"""What a loss is computed on: a batch, its columns, and one tile of rows at a time."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from nearfar.engine.masks import masks
from nearfar.engine.measures import Measure
from nearfar.engine.measures import create as measure
from nearfar.engine.rows import Row

DEFAULT_BUDGET = 256 * 1024 * 1024
# On a CPU smaller tiles stay in its cache; with fewer rows than this, matrix products get slow.
CPU_TILE_PAIRS = 1 << 20
CPU_TILE_ROWS = 128


@dataclass(frozen=True)
class Mean:
    """A share of the batch loss with a denominator of its own: Σ total / Σ count over all anchors."""

    total: Tensor | Row  # [a]
    count: Tensor  # [a], not differentiated


@dataclass
class Tile:
    """Some anchors against all columns."""

    values: Tensor  # [a, n], what the measure says; differentiable
    positives: Tensor  # [a, n]
    negatives: Tensor  # [a, n]
    rows: slice  # which anchors these are
    measure: Measure
    dim: int
    noise: tuple[Tensor, Tensor] | None = None  # [a, 1] and [1, n], uniform in [0, 1)
    anchor_values: Tensor | None = None  # [a], the loss's own numbers for these anchors
    survey: Tensor | None = None  # [n], what the loss's survey said of each column

    @property
    def similarity(self) -> Tensor:
        """The values without a gradient, turned so that larger is nearer."""
        values = self.values.detach()
        return -values if self.measure.is_distance else values

    def uniform(self) -> Tensor:
        """A random number in [0, 1) for every pair, [a, n].

        frac(r_i + c_j), from one number per row and one per column: independent along each row, which is
        where mining draws, and the same however the rows are tiled.
        """
        assert self.noise is not None, "a mining that draws must say so: draws = True"
        down, across = self.noise
        return (down + across).frac_()

    def transposed(self) -> Tile:
        """Columns as anchors (of a tile that holds all anchors)."""
        parts = self.values.T, self.positives.T, self.negatives.T
        return Tile(*parts, slice(None), self.measure, self.dim)


class Totals(Protocol):
    """Numbers summed over all pairs of a tile that know their derivatives."""

    def sums(self) -> Tensor:
        """The numbers, of any shape."""

    def weights(self, slopes: Tensor) -> Tensor:
        """The derivative of a function of the sums by the values, [a, n], given its slopes by the sums."""


class RowLoss:
    """What the engine asks of a loss that is a function of one anchor's row."""

    measure: str = "cosine"
    raw: bool = False  # compare the embeddings as they are, not normalised
    query_only: bool = False  # columns are constants, as in Ranked List Loss
    closed_form: bool = False  # `on_tile` brings its derivatives (Row); otherwise autograd is to find them
    surveys: bool = False  # `survey` has something to say of the columns
    sums_up: bool = False  # the loss is `of_totals` of `totals`; no rows, surveys or anchor values are asked for
    row_bytes: int | None = None  # working memory per pair in float32; None: as most have
    memory_budget: int = DEFAULT_BUDGET  # bytes for one tile; settable on any loss

    @property
    def comparison(self) -> Measure:
        """How embeddings are compared."""
        return measure(self.measure, raw=self.raw)

    @property
    def bytes_per_pair(self) -> int:
        """Working memory for each entry of a float32 tile."""
        return self.row_bytes or (28 if self.closed_form else 48)

    def recordable(self) -> Hashable:
        """All settings that decide what the loss computes; None where it cannot be recorded and replayed."""
        return None

    def on_tile(self, tile: Tile) -> Tensor | Row | Sequence[Mean]:
        """The loss of each anchor, [a], to be averaged over all anchors; or means of another kind."""
        raise NotImplementedError(f"{type(self).__name__} must define on_tile(tile)")

    def survey(self, tile: Tile) -> Tensor:
        """A number for each row of the tile, [a]; asked of all columns before ``on_tile`` where ``surveys`` is set."""
        raise NotImplementedError(f"{type(self).__name__} sets surveys and must define survey(tile)")

    def totals(self, tile: Tile) -> Tensor | Totals:
        """Numbers summed over all pairs of the tile: a tensor, or with ``closed_form`` what knows its derivatives."""
        raise NotImplementedError(f"{type(self).__name__} sets sums_up and must define totals(tile)")

    def of_totals(self, totals: Tensor) -> Tensor:
        """The loss, from the totals of all tiles together; differentiated by autograd."""
        raise NotImplementedError(f"{type(self).__name__} sets sums_up and must define of_totals(totals)")


@dataclass
class Batch:
    """A loss and all it is computed on but the numbers: labels, and where the anchors stand."""

    loss: RowLoss
    labels: Tensor  # [m]
    gallery_labels: Tensor  # [n]; the labels themselves where there is no gallery
    positions: Tensor | None = None  # [m], the anchors' places in the gallery, −1: not there
    noise: Tensor | None = None  # [m + n], uniform in [0, 1), for minings that draw
    owner: object = None  # what outlives the step and keeps its recordings; None: the loss itself


class Problem:
    """A batch with its numbers, made ready for the measure."""

    def __init__(
        self,
        batch: Batch,
        embeddings: Tensor,
        gallery: Tensor | None,
        anchor_values: Tensor | None,
        *,
        columns_move: bool = True,
    ) -> None:
        self.loss, self.positions, self.noise = batch.loss, batch.positions, batch.noise
        self.labels, self.gallery_labels = batch.labels, batch.gallery_labels
        self.height, self.width = batch.labels.shape[0], batch.gallery_labels.shape[0]
        self.embeddings, self.gallery, self.anchor_values = embeddings, gallery, anchor_values
        self.columns_move = columns_move and not batch.loss.query_only  # whether columns get a gradient
        comparison = self.loss.comparison
        columns = embeddings if gallery is None else gallery
        center = comparison.center(columns)
        self.columns = comparison.prepare(columns, center)
        self.anchors = self.columns if gallery is None else comparison.prepare(embeddings, center)

    def slices(self, height: int, width: int, share: float = 1.0) -> list[slice]:
        """``height`` rows cut so that a tile of ``width`` columns keeps to its share of the budget."""
        bytes_per_row = self.loss.bytes_per_pair * self.embeddings.element_size() // 4 * width
        rows = int(share * self.loss.memory_budget) // bytes_per_row
        if self.embeddings.device.type == "cpu":
            rows = min(rows, max(CPU_TILE_ROWS, CPU_TILE_PAIRS // width))
        rows = min(max(1, rows), height)
        return [slice(start, min(start + rows, height)) for start in range(0, height, rows)]

    def tile(self, rows: slice) -> Tile:
        """Anchors ``rows`` against all columns."""
        own = rows.start if self.gallery is None else self.positions
        if isinstance(own, Tensor):
            own = own[rows]
        values = self.loss.comparison.pairwise(self.anchors.take(rows), self.columns)
        positives, negatives = masks(self.labels[rows], self.gallery_labels, own)
        tile = Tile(values, positives, negatives, rows, self.loss.comparison, self.embeddings.shape[1])
        if self.anchor_values is not None:
            tile.anchor_values = self.anchor_values[rows]
        if self.noise is not None:
            down, across = self.noise[: self.height], self.noise[self.height :]
            tile.noise = down[rows].unsqueeze(1), across.unsqueeze(0)
        return tile

    def column_tile(self, columns: slice) -> Tile:
        """Columns ``columns``, as anchors, against all anchors."""
        if self.gallery is None:
            return self.tile(columns)
        own = None if self.positions is None else self.positions - columns.start
        values = self.loss.comparison.pairwise(self.columns.take(columns), self.anchors)
        positives, negatives = masks(self.labels, self.gallery_labels[columns], own)
        return Tile(values, positives.T, negatives.T, columns, self.loss.comparison, self.embeddings.shape[1])
