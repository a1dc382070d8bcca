"""Pair-based losses, computed and differentiated one tile of anchors at a time.

A pair-based loss is a function of each anchor's row of similarities. Its derivative by those similarities is the
matrix of pair weights W (theorem 3.1 of the Unified View), and two matrix products turn W into the gradient by the
embeddings. So only one tile of rows has to exist at a time: the forward pass computes the tile, its loss, its part of
W and the gradient from it, and drops the tile. The backward pass only scales the gradient.

From top to bottom: what a loss has to define (``RowLoss``), how a batch is cut into tiles (``TiledBatch``), where the
pair weights of the tiles are accumulated, how the tiles are evaluated, and the two entry points ``row_loss`` and
``pair_weights``.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from operator import add
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from nearfar.engine import programs
from nearfar.engine.autograd import (
    Gradients,
    LossComputation,
    Needed,
    Tensors,
    differentiable,
    no_compile,
)
from nearfar.engine.batch import LossBatch
from nearfar.engine.measures import Measure, PreparedVectors, create, propagate_nan, times
from nearfar.engine.programs import AllTriplets, KernelProgram
from nearfar.engine.rows import Row, exclude_own, masked, masks, ordinals

if TYPE_CHECKING:
    from nearfar.engine.histograms import SoftHistograms
    from nearfar.supervision import Supervision

DEFAULT_BUDGET = 256 * 1024 * 1024
# On a CPU smaller tiles stay in its cache; with fewer rows than this, matrix products get slow.
CPU_TILE_PAIRS = 1 << 20
CPU_TILE_ROWS = 128
SELECT_FROM = 1 << 19  # in smaller batches, the product of all weights takes less time than selecting pairs
SELECTION_BYTES = 16  # working memory per pair while columns are selected: values, similarities, masks, masked values
SPARSE = 32  # given pairs are compared one by one if they are fewer than 1 / SPARSE of all pairs


@dataclass(frozen=True)
class Mean:
    """A part of the batch loss with its own denominator: Σ total / Σ count over all anchors.

    Args:
        total: Numerator of each anchor, [a].
        count: Denominator of each anchor, [a]; it is not differentiated.
    """

    total: Tensor | Row
    count: Tensor


@dataclass
class Tile:
    """Some anchors against all columns, or each against its own list of columns.

    Args:
        values: Similarities or distances, [a, n], differentiable.
        positives: Mask of the positive pairs, [a, n].
        negatives: Mask of the negative pairs, [a, n].
        rows: Which anchors of the batch these are.
        measure: How embeddings are compared.
        dim: Dimension of the embeddings.
        noise: Uniform random numbers in [0, 1) for rows, [a, 1], and columns, [1, n].
        anchor_values: The loss's own number for each of these anchors, [a].
        column_values: The number that ``RowLoss.column_values`` returned for each column, [n]; None: rows and columns
            are the same, so a loss with a closed form computes these numbers, and their derivatives, from its rows.
        labels: Labels of the rows, [a], and of the columns, [n].
        ordinals: How many earlier rows, [a, 1], and columns, [1, n], are of the same class.
        triplets: Given triplets: columns of positives and negatives, and which are valid, [a, k] each.
        columns: The columns of each anchor's list, [a, n]; None: all columns of the batch.
        grades: How relevant the columns are to the anchors, from 0 to 1, [a, n].
    """

    values: Tensor
    positives: Tensor
    negatives: Tensor
    rows: slice
    measure: Measure
    dim: int
    noise: tuple[Tensor, Tensor] | None = None
    anchor_values: Tensor | None = None
    column_values: Tensor | None = None
    labels: tuple[Tensor, Tensor] | None = None
    ordinals: tuple[Tensor, Tensor] | None = None
    triplets: tuple[Tensor, Tensor, Tensor] | None = None
    columns: Tensor | None = None
    grades: Tensor | None = None

    @property
    def similarity(self) -> Tensor:
        """The values without a gradient, negated for distances, so that larger means more similar."""
        values = self.values.detach()
        return -values if self.measure.is_distance else values

    def uniform(self) -> Tensor:
        """Return a random number in [0, 1) for every pair, [a, n].

        The number is frac(r_i + c_j), from one number per row and one per column: independent along each row, where
        minings draw, and the same whatever the size of the tiles.
        """
        assert self.noise is not None, "a mining that draws random numbers must set draws = True"
        of_rows, of_columns = self.noise
        return (of_rows + of_columns).frac_()

    def transposed(self) -> Tile:
        """Return the tile with columns as anchors; this tile must hold all anchors."""
        parts = self.values.T, self.positives.T, self.negatives.T
        return Tile(*parts, slice(None), self.measure, self.dim)


class RowLoss:
    """What the engine needs to know about a loss that is a function of one anchor's row."""

    measure: str = "cosine"
    normalize: bool = True  # scale embeddings to length one before they are compared
    query_only: bool = False  # columns are constants, as in Ranked List Loss
    closed_form: bool = False  # `on_tile` returns its derivatives (Row); otherwise autograd computes them
    needs_column_values: bool = False  # `column_values` is called for all columns before `on_tile`
    needs_grades: bool = False  # tiles say how relevant columns are to rows
    needs_ordinals: bool = False  # tiles say how many earlier rows and columns are of the same class
    from_sums: bool = False  # the loss is `loss_of_sums` of `batch_sums`; `on_tile` is not used
    selects_columns: bool = False  # the loss depends on nothing but the columns that `select_columns` returns
    row_bytes: int | None = None  # working memory per pair in float32; None: the usual amount
    memory_budget: int = DEFAULT_BUDGET  # bytes for one tile; can be set on any loss

    @property
    def bytes_per_pair(self) -> int:
        """Working memory for each entry of a float32 tile."""
        return self.row_bytes or (28 if self.closed_form else 48)

    def graph_key(self) -> Hashable:
        """Return all settings that decide what the loss computes; None if it must not be recorded as a CUDA graph."""
        return None

    def kernel_program(self) -> KernelProgram | None:
        """Return how the Triton kernels compute the loss; None if they cannot."""
        return None

    def on_tile(self, tile: Tile) -> Tensor | Row | Sequence[Mean]:
        """Return the loss of each anchor, [a], to be averaged over all anchors; or means with other denominators."""
        raise NotImplementedError(f"{type(self).__name__} must define on_tile(tile)")

    def select_columns(self, tile: Tile) -> Tensor:
        """Return the few columns that the loss of each anchor depends on, [a, k]; they may repeat."""
        raise NotImplementedError(f"{type(self).__name__} sets selects_columns and must define select_columns(tile)")

    def column_values(self, tile: Tile) -> Tensor | Row:
        """Return a number for each row of a tile whose rows are columns of the batch, [a]."""
        raise NotImplementedError(f"{type(self).__name__} sets needs_column_values and must define column_values(tile)")

    def batch_sums(self, tile: Tile) -> Tensor | SoftHistograms:
        """Return numbers summed over all pairs of the tile: a tensor, or an object with ``sums`` and ``weights``."""
        raise NotImplementedError(f"{type(self).__name__} sets from_sums and must define batch_sums(tile)")

    def loss_of_sums(self, sums: Tensor) -> Tensor:
        """Return the loss, given the sums of all tiles together; differentiated by autograd."""
        raise NotImplementedError(f"{type(self).__name__} sets from_sums and must define loss_of_sums(sums)")


class PairList:
    """Given pairs, [p], ordered by row and column."""

    def __init__(self, height: int, row: Tensor, column: Tensor, same: Tensor) -> None:
        self.row, self.column, self.same = row, column, same
        self.sizes = torch.bincount(row, minlength=height)
        self.ends = self.sizes.cumsum(0)
        self.starts = self.ends - self.sizes
        self.longest = max(1, int(self.sizes.max()))

    def of_rows(self, rows: slice) -> tuple[slice, Tensor]:
        """Return which pairs belong to some rows, and the mask of their places in a table of lists, [a, k]."""
        sizes = self.sizes[rows]
        filled = torch.arange(max(1, int(sizes.max())), device=sizes.device) < sizes.unsqueeze(1)
        last = int(self.ends[rows.stop - 1])
        return slice(last - int(sizes.sum()), last), filled


class TiledBatch:
    """A batch prepared for the measure of a loss, from which tiles are cut."""

    def __init__(self, loss: RowLoss, batch: LossBatch, *, columns_need_grad: bool = True, lists: bool = False) -> None:
        embeddings, self.gallery, self.relations = batch.embeddings, batch.gallery, batch.relations
        self.loss, self.embeddings, self.positions = loss, embeddings, batch.positions
        self.anchor_values, self.noise = batch.anchor_values, batch.noise
        columns = embeddings if self.gallery is None else self.gallery
        self.labels = self.column_labels = self.relations if isinstance(self.relations, Tensor) else None
        if self.gallery is not None:
            self.column_labels = batch.gallery_labels
        self.height, self.width = embeddings.shape[0], columns.shape[0]
        self.columns_need_grad = columns_need_grad and not loss.query_only
        self.pairs: PairList | None = None
        lists = lists and embeddings.device.type == "cpu" and not (loss.needs_column_values or loss.needs_grades)
        if lists and not isinstance(self.relations, Tensor):
            pairs = self.relations.pairs()
            if pairs is not None and SPARSE * len(pairs[0]) <= self.height * self.width:
                self.pairs = PairList(self.height, *pairs)
        self.measure = comparison = create(loss.measure, normalize=loss.normalize)
        self.center = columns.mean(dim=0) if comparison.has_own_part else None
        self.prepared: PreparedVectors | None = None
        self._chunks: dict[int, PreparedVectors] = {}  # of columns, by their start, with points as they were given
        self.anchors = comparison.prepare(embeddings, self.center, as_rows=True)
        if self.gallery is None and comparison.is_symmetric:
            self.prepared = self.anchors

    @property
    def columns(self) -> PreparedVectors:
        """The columns, prepared when they are first used: a large gallery may never be needed as a whole."""
        if self.prepared is None:
            columns = self.embeddings if self.gallery is None else self.gallery
            self.prepared = self.measure.prepare(columns, self.center)
        return self.prepared

    def column_chunk(self, columns: slice) -> PreparedVectors:
        """Return some columns; if they are not prepared yet, only these are, and their lengths are kept."""
        if self.prepared is not None or self.gallery is None:
            return self.columns.take(columns)
        given, known = self.gallery[columns], self._chunks.get(columns.start)
        if known is not None and known.inverse_norms is not None:
            return known._replace(points=given * known.inverse_norms)
        chunk = self.measure.prepare(given, self.center)
        self._chunks[columns.start] = chunk._replace(points=given)
        return chunk

    def gather_columns(self, index: Tensor) -> PreparedVectors:
        """Return the columns of some numbers, [p]; if the columns are not prepared yet, only these are."""
        if self.prepared is None and self.gallery is not None:
            return self.measure.prepare(self.gallery[index], self.center)
        return self.columns.gather(index)

    def slices(self, height: int, width: int, share: float = 1.0) -> list[slice]:
        """Split ``height`` rows such that a tile of ``width`` columns fits into its share of the memory budget."""
        bytes_per_pair = self.loss.bytes_per_pair * self.embeddings.element_size() // 4
        most_pairs = CPU_TILE_PAIRS
        if self.pairs is not None:
            dim, width = self.embeddings.shape[1], self.pairs.longest  # both vectors of each pair are gathered
            bytes_per_pair += 2 * dim * self.embeddings.element_size()
            most_pairs //= dim
        rows = int(share * self.loss.memory_budget) // (bytes_per_pair * width)
        if self.embeddings.device.type == "cpu":
            rows = min(rows, max(CPU_TILE_ROWS, most_pairs // width))
        rows = min(max(1, rows), height)
        return [slice(start, min(start + rows, height)) for start in range(0, height, rows)]

    def tile(self, rows: slice) -> Tile:
        """Return the tile of some anchors against all columns, or against their lists of columns."""
        if self.pairs is not None:
            tile = self._lists(rows, self.pairs)
        else:
            anchors = self.anchors if rows == slice(0, self.height) else self.anchors.take(rows)
            values = self.measure.pairwise(anchors, self.prepared or self.columns)
            positives, negatives = self._masks(rows, slice(0, self.width))
            tile = Tile(values, positives, negatives, rows, self.measure, self.embeddings.shape[1])
            given = None if isinstance(self.relations, Tensor) else self.relations.triplets(rows)
            if given is not None:
                positive, negative, valid = given
                valid = valid & positives.gather(1, positive) & negatives.gather(1, negative)
                tile.triplets = positive, negative, valid
        if self.labels is not None and self.column_labels is not None:
            tile.labels = self.labels[rows], self.column_labels
        if self.anchor_values is not None:
            tile.anchor_values = self.anchor_values[rows]
        if self.noise is not None:
            of_rows, of_columns = self.noise[: self.height], self.noise[self.height :]
            of_columns = of_columns.unsqueeze(0) if tile.columns is None else of_columns[tile.columns]
            tile.noise = of_rows[rows].unsqueeze(1), of_columns
        if self.loss.needs_grades:
            if isinstance(self.relations, Tensor):
                tile.grades = tile.positives.double()
            else:
                tile.grades = self.relations.relevance(rows, slice(0, self.width))
        if self.loss.needs_ordinals:
            assert self.labels is not None
            assert self.column_labels is not None
            of_rows, of_columns = ordinals(self.labels), ordinals(self.column_labels)
            tile.ordinals = of_rows[rows].unsqueeze(1), of_columns.unsqueeze(0)
        return tile

    def _lists(self, rows: slice, pairs: PairList) -> Tile:
        places, filled = pairs.of_rows(rows)

        def table(values: Tensor) -> Tensor:
            return values.new_zeros(filled.shape).masked_scatter_(filled, values)

        row, column = pairs.row[places], pairs.column[places]
        values = table(self.measure.listed(self.anchors.gather(row), self.columns.gather(column)))
        columns, positives = table(column), table(pairs.same[places])
        negatives = filled & ~positives
        if self.positions is not None:
            others = columns != self.positions[rows].unsqueeze(1)
            positives, negatives = positives & others, negatives & others
        tile = Tile(values, positives, negatives, rows, self.measure, self.embeddings.shape[1])
        tile.columns = columns
        return tile

    def selected_tile(self) -> Tile:
        """Return the tile of all anchors against the columns that the loss selects."""
        parts = []
        for rows in self.slices(self.height, self.width, share=self.loss.bytes_per_pair / SELECTION_BYTES):
            tile = self.tile(rows)
            columns = self.loss.select_columns(tile)
            parts.append((columns, tile.positives.gather(1, columns), tile.negatives.gather(1, columns)))
            del tile  # the next one uses its memory
        columns, positives, negatives = (torch.cat(part) for part in zip(*parts, strict=True))
        return self.few_columns(columns, positives, negatives)

    def few_columns(self, columns: Tensor, positives: Tensor, negatives: Tensor) -> Tile:
        """Return the tile of all anchors against a few columns of their own, [m, k], with masks of these."""
        # One column of each anchor at a time, so that no more vectors are gathered than there are anchors.
        lists = [self.measure.listed(self.anchors, self.gather_columns(column)) for column in columns.unbind(1)]
        every, dim = slice(0, self.height), self.embeddings.shape[1]
        tile = Tile(torch.stack(lists, dim=1), positives, negatives, every, self.measure, dim)
        tile.columns, tile.anchor_values = columns, self.anchor_values
        return tile

    def _masks(self, rows: slice, columns: slice) -> tuple[Tensor, Tensor]:
        """The positives and negatives of some rows among some columns; a row itself is neither."""
        own: Tensor | int | None = None
        if self.gallery is None:
            own = rows.start - columns.start
        elif self.positions is not None:
            own = self.positions[rows] if not columns.start else self.positions[rows] - columns.start
        if isinstance(self.relations, Tensor):
            assert self.column_labels is not None
            return masks(self.relations[rows], self.column_labels[columns], own)
        positives, negatives = self.relations.masks(rows, columns)
        return exclude_own(positives, own), exclude_own(negatives, own)

    @property
    def is_symmetric(self) -> bool:
        """Whether the tile of some columns, as rows, is that of the same anchors."""
        return self.anchors is self.prepared and self.labels is not None

    def column_tile(self, columns: slice) -> Tile:
        """Return the tile of some columns, as its rows, against all anchors."""
        if self.is_symmetric:
            return self.tile(columns)
        rows, comparison = self.columns.take(columns), self.measure
        if comparison.is_symmetric:
            values = comparison.pairwise(rows, self.anchors)
        else:
            values = comparison.pairwise(self.anchors, rows).T.contiguous()
        positives, negatives = self._masks(slice(0, self.height), columns)
        return Tile(values, positives.T, negatives.T, columns, comparison, self.embeddings.shape[1])


class Accumulator:
    """Collects W = ∂loss/∂values tile by tile; it may overwrite the weights it is given."""

    by_anchor_values: Tensor | None = None  # [m], the derivative by the anchor values

    def __init__(self, batch: TiledBatch) -> None:
        self.batch = batch

    def add(self, weights: Tensor, tile: Tile) -> None:
        """Add the weights of a tile of anchors."""
        raise NotImplementedError

    def add_columns(self, weights: Tensor, tile: Tile) -> None:
        """Add the weights of a tile whose rows are columns of the batch."""
        raise NotImplementedError

    def tensors(self) -> list[Tensor]:
        """Return what was collected of W: sums over the tiles, linear in it."""
        raise NotImplementedError

    def scale(self, factor: Tensor) -> None:
        """Multiply everything that was added."""
        for tensor in self._all_tensors():
            tensor.mul_(factor)

    def merge(self, other: Self) -> None:
        """Add everything that was added to another accumulator."""
        for tensor, added in zip(self._all_tensors(), other._all_tensors(), strict=True):
            tensor.add_(added)

    def _all_tensors(self) -> list[Tensor]:
        return [*self.tensors(), *([] if self.by_anchor_values is None else [self.by_anchor_values])]

    def gradients(self) -> tuple[Tensor, Tensor | None]:
        """Return the gradients by the prepared anchors and by the prepared columns, if these are others."""
        raise NotImplementedError


class WeightMatrix(Accumulator):
    """Keeps the whole of W, [m, n]."""

    to_dot = False  # keep the derivatives by the dot products instead

    def __init__(self, batch: TiledBatch, matrix: Tensor | None = None) -> None:
        self.batch = batch
        self.matrix = batch.embeddings.new_zeros(batch.height, batch.width) if matrix is None else matrix

    def add(self, weights: Tensor, tile: Tile) -> None:
        self.matrix[tile.rows] = tile.measure.to_dot(weights, tile.values.detach()) if self.to_dot else weights

    def add_columns(self, weights: Tensor, tile: Tile) -> None:
        if self.to_dot:
            weights = tile.measure.to_dot(weights, tile.values.detach())
        self.matrix[:, tile.rows] += weights.T

    def tensors(self) -> list[Tensor]:
        return [self.matrix]


class MatrixGradient(WeightMatrix):
    """Keeps the derivatives by all dot products and multiplies them with the embeddings at the end.

    Without a gallery, W E + Wᵀ E is then a single product.
    """

    to_dot = True

    def gradients(self) -> tuple[Tensor, Tensor | None]:
        batch, weights = self.batch, self.matrix
        measure, anchors = batch.measure, batch.anchors.points
        if batch.prepared is batch.anchors and batch.columns_need_grad:
            weights = plus_transposed(weights)
            gradient = times(weights, anchors)
            return (measure.plus_own(gradient, anchors, weights.sum(dim=1)) if measure.has_own_part else gradient), None
        columns = batch.columns.points
        by_columns = None if not batch.columns_need_grad else measure.product(weights.T, columns, anchors)
        return measure.product(weights, anchors, columns), by_columns


def plus_transposed(matrix: Tensor, block: int = 256) -> Tensor:
    """Return matrix + matrixᵀ; the argument may be overwritten.

    Reading the columns of a large matrix is slow on a CPU, so each block is copied there before it is transposed.
    """
    size = matrix.shape[0]
    if matrix.device.type != "cpu" or size <= 4 * block:
        return matrix.T.clone(memory_format=torch.contiguous_format).add_(matrix)
    for top in range(0, size, block):
        for left in range(top, size, block):
            upper = matrix[top : top + block, left : left + block]
            lower = matrix[left : left + block, top : top + block]
            both = lower.contiguous().T.clone(memory_format=torch.contiguous_format).add_(upper)
            upper.copy_(both)
            lower.copy_(both.T.contiguous())
    return matrix


class Gradient(Accumulator):
    """The gradients by the prepared anchors, [m, d], and by the prepared columns, [n, d], if these are others."""

    def __init__(self, by_anchors: Tensor, by_columns: Tensor | None) -> None:
        self.by_anchors, self.by_columns = by_anchors, by_columns

    def tensors(self) -> list[Tensor]:
        return [self.by_anchors] if self.by_columns is None else [self.by_anchors, self.by_columns]

    def gradients(self) -> tuple[Tensor, Tensor | None]:
        return self.by_anchors, self.by_columns


class StreamedGradient(Gradient):
    """Multiplies each tile of weights with the embeddings at once and keeps no pair."""

    def __init__(self, batch: TiledBatch) -> None:
        self.batch = batch
        by_anchors, by_columns = torch.zeros_like(batch.anchors.points), None
        if batch.columns is not batch.anchors and batch.columns_need_grad:
            by_columns = torch.zeros_like(batch.columns.points)
        super().__init__(by_anchors, by_columns)
        # Without a gallery, both members of a pair are embeddings of the batch.
        self.by_others = by_anchors if by_columns is None else by_columns

    def add(self, weights: Tensor, tile: Tile) -> None:
        batch, measure = self.batch, tile.measure
        weights = measure.to_dot(weights, tile.values.detach())
        columns, anchors = batch.columns.points, batch.anchors.points[tile.rows]
        self.by_anchors[tile.rows] += measure.product(weights, anchors, columns)
        if batch.columns_need_grad:
            self.by_others += measure.product(weights.T, columns, anchors)

    def add_columns(self, weights: Tensor, tile: Tile) -> None:
        measure = tile.measure
        weights = measure.to_dot(weights, tile.values.detach())
        anchors, columns = self.batch.anchors.points, self.batch.columns.points[tile.rows]
        if self.batch.columns_need_grad:
            self.by_others[tile.rows] += measure.product(weights, columns, anchors)
        self.by_anchors += measure.product(weights.T, anchors, columns)


class ListGradient(Accumulator):
    """Keeps the derivatives by the dot products of lists of pairs and multiplies them with the embeddings at the end.

    The lists are the given pairs of the batch, or a few columns of each anchor: see ``TiledBatch.few_columns``.
    """

    def __init__(self, batch: TiledBatch) -> None:
        super().__init__(batch)
        count = 0
        if batch.pairs is not None:
            count, self.columns, self.starts = len(batch.pairs.row), batch.pairs.column, batch.pairs.starts
        self.weights = batch.embeddings.new_zeros(count)

    def add(self, weights: Tensor, tile: Tile) -> None:
        weights = tile.measure.to_dot(weights, tile.values.detach())
        if self.batch.pairs is not None:
            places, filled = self.batch.pairs.of_rows(tile.rows)
            self.weights[places] = weights[filled]
            return
        assert tile.columns is not None
        self.weights, self.columns = weights.flatten(), tile.columns.flatten()
        self.starts = torch.arange(0, weights.numel(), weights.shape[1], device=weights.device)

    def tensors(self) -> list[Tensor]:
        return [self.weights]

    def gradients(self) -> tuple[Tensor, Tensor | None]:
        batch, pairs, weights, columns = self.batch, self.batch.pairs, self.weights, self.columns
        anchors = batch.anchors.points
        if pairs is None and not batch.columns_need_grad:  # no columns but these have to be prepared
            size = (len(anchors), -1)
            by_anchors = torch.zeros_like(anchors)
            for weight, column in zip(weights.view(size).unbind(1), columns.view(size).unbind(1), strict=True):
                by_anchors.addcmul_(batch.gather_columns(column).points, weight.unsqueeze(1))
            return batch.measure.plus_own(by_anchors, anchors, weights.view(size).sum(dim=1)), None
        points = batch.columns.points
        by_anchors = self._sums(weights, columns, self.starts, anchors, points)
        if not batch.columns_need_grad:
            return by_anchors, None
        # Sums of segments, since index_add_ adds in any order on a GPU.
        columns, order = columns.sort(stable=True)
        rows = order // (len(order) // len(anchors)) if pairs is None else pairs.row[order]
        starts = torch.searchsorted(columns, torch.arange(batch.width, device=columns.device))
        by_columns = self._sums(weights[order], rows, starts, points, anchors)
        return (by_anchors.add_(by_columns), None) if batch.columns is batch.anchors else (by_anchors, by_columns)

    def _sums(self, weights: Tensor, places: Tensor, starts: Tensor, rows: Tensor, others: Tensor) -> Tensor:
        """The gradient by the rows, whose pairs begin at ``starts`` and have these other members."""
        gradient = embedding_bag(places, others, starts, mode="sum", per_sample_weights=weights)
        if self.batch.measure.has_own_part:
            every = torch.arange(len(weights), device=weights.device)
            sums = embedding_bag(every, weights.unsqueeze(1), starts, mode="sum").squeeze(1)
            gradient = self.batch.measure.plus_own(gradient, rows, sums)
        return gradient


Leaves = tuple[Tensor | None, Tensor | None, Tensor | None]
Result = tuple[Tensor, Accumulator | None]  # the loss, and the weights of its pairs if they were asked for


def evaluate(
    batch: TiledBatch, slices: Sequence[slice], accumulator: type[Accumulator] | None, only: Tile | None = None
) -> Result:
    """Compute the loss of a batch and, given a kind of accumulator, the weights of its pairs.

    ``only`` is a tile of all anchors and the few columns that matter. Autograd has to be on for weights without a
    closed form.
    """
    if only is None and batch.loss.from_sums:
        return _evaluate_sums(batch, slices, accumulator)
    if only is None and len(slices) > 1:
        return _evaluate_tiles(batch, slices, accumulator)
    # All rows at once: denominators and column values are known, so W needs no scaling afterwards.
    tile = batch.tile(slices[0]) if only is None else only
    leaves = (tile.values, tile.anchor_values, None) if batch.loss.closed_form else _leaves(tile)
    of_columns: Tensor | Row | None = None
    # Gradients are the same whether a pair of a symmetric tile is counted at (i, j) or at (j, i), pair weights are not.
    if batch.loss.needs_column_values:
        from_rows = batch.is_symmetric and batch.columns_need_grad and accumulator is not WeightMatrix
        if not (from_rows and batch.loss.closed_form):
            of_columns = batch.loss.column_values(tile.transposed())
            tile.column_values = _value(of_columns)
    per_anchor = batch.loss.on_tile(tile)
    if isinstance(per_anchor, (Tensor, Row)):
        loss = per_anchor * (1.0 / batch.height)
    else:
        loss = reduce(add, [mean.total * _at_least_one(mean.count.sum()).reciprocal_() for mean in per_anchor])
    value, (weights, by_anchor_values, by_column_values) = _derive(loss, leaves, needed=accumulator is not None)
    if accumulator is None:
        return value, None
    if weights is not None and isinstance(of_columns, Row) and by_column_values is not None:
        weights += (of_columns * by_column_values).weights().T
    kept: Accumulator
    if issubclass(accumulator, WeightMatrix) and weights is not None:
        if accumulator.to_dot:
            weights = tile.measure.to_dot(weights, tile.values.detach())
        kept = accumulator(batch, weights)
    else:
        kept = accumulator(batch)
        if weights is not None:
            kept.add(weights, tile)
    kept.by_anchor_values = by_anchor_values
    return value, kept


class _RunningMean:
    """A mean whose numerator and denominator are being summed over tiles."""

    def __init__(self, batch: TiledBatch, accumulator: type[Accumulator] | None) -> None:
        zeros = batch.embeddings.new_zeros
        self.total, self.count = zeros(()), zeros(())
        self.by_column_values = zeros(batch.width if batch.loss.needs_column_values else 0)
        self.weights = None if accumulator is None else accumulator(batch)
        if self.weights is not None and batch.anchor_values is not None:
            self.weights.by_anchor_values = zeros(batch.height)

    def add(self, mean: Mean, tile: Tile, leaves: Leaves, *, last: bool) -> None:
        value, derivatives = _derive(mean.total, leaves, needed=self.weights is not None, keep_graph=not last)
        self.total += value
        self.count += mean.count.sum()
        weights, by_anchor_values, by_column_values = derivatives
        if weights is not None and self.weights is not None:
            self.weights.add(weights, tile)
        if by_anchor_values is not None and self.weights is not None and self.weights.by_anchor_values is not None:
            self.weights.by_anchor_values[tile.rows] = by_anchor_values
        if by_column_values is not None:
            self.by_column_values += by_column_values


def _evaluate_tiles(batch: TiledBatch, slices: Sequence[slice], accumulator: type[Accumulator] | None) -> Result:
    """Tile after tile: column values first, then the rows, then the gradient through the column values."""
    column_values = None
    columns = batch.slices(batch.width, batch.height) if batch.loss.needs_column_values else []
    if batch.loss.needs_column_values:
        with torch.no_grad():
            values = [_value(batch.loss.column_values(batch.column_tile(part))) for part in columns]
            column_values = torch.cat(values)
    running: list[_RunningMean] = []
    for rows in slices:
        tile = batch.tile(rows)
        tile.column_values = column_values
        leaves = _leaves(tile)
        per_anchor = batch.loss.on_tile(tile)
        if isinstance(per_anchor, (Tensor, Row)):
            per_anchor = [Mean(per_anchor, tile.values.new_ones(tile.values.shape[0]))]
        running = running or [_RunningMean(batch, accumulator) for _ in per_anchor]
        for number, (running_mean, mean) in enumerate(zip(running, per_anchor, strict=True), start=1):
            running_mean.add(mean, tile, leaves, last=number == len(per_anchor))
    if accumulator is not None:
        for part in columns:
            _differentiate_column_values(batch, batch.column_tile(part), running)
    values, kept = [], running[0].weights
    for summed in running:
        factor = _at_least_one(summed.count).reciprocal_()
        values.append(summed.total * factor)
        if kept is not None and summed.weights is not None:
            summed.weights.scale(factor)
            if summed is not running[0]:
                kept.merge(summed.weights)
    return reduce(add, values), kept


def _differentiate_column_values(batch: TiledBatch, tile: Tile, running: Sequence[_RunningMean]) -> None:
    leaves = _leaves(tile)
    for mean in running:
        total = batch.loss.column_values(tile) * mean.by_column_values[tile.rows]
        _, (weights, _, _) = _derive(total, leaves, needed=True)
        if weights is not None and mean.weights is not None:
            mean.weights.add_columns(weights, tile)


@dataclass
class _AutogradSums:
    """The sums of a loss without a closed form."""

    total: Tensor
    values: Tensor

    def sums(self) -> Tensor:
        return self.total

    def weights(self, slopes: Tensor) -> Tensor:
        return torch.autograd.grad(self.total, self.values, slopes)[0]


def _sums_of(batch: TiledBatch, rows: slice) -> tuple[SoftHistograms | _AutogradSums, Tile]:
    tile = batch.tile(rows)
    _leaves(tile)
    sums = batch.loss.batch_sums(tile)
    return (_AutogradSums(sums, tile.values) if isinstance(sums, Tensor) else sums), tile


def _evaluate_sums(batch: TiledBatch, slices: Sequence[slice], accumulator: type[Accumulator] | None) -> Result:
    """Add the sums of all tiles, then compute each tile again for its weights; a single tile is kept instead."""
    only = _sums_of(batch, slices[0]) if len(slices) == 1 else None
    if only is not None:
        total = only[0].sums()
    else:
        with torch.no_grad():
            total = torch.stack([_sums_of(batch, rows)[0].sums() for rows in slices]).sum(dim=0)
    with torch.set_grad_enabled(accumulator is not None):
        total = total.detach().requires_grad_(accumulator is not None)
        value = batch.loss.loss_of_sums(total)
    if accumulator is None:
        return value, None
    kept, (slopes,) = accumulator(batch), torch.autograd.grad(value, total)
    for rows in slices:
        sums, tile = _sums_of(batch, rows) if only is None else only
        kept.add(sums.weights(slopes), tile)
    return value.detach(), kept


def _value(number: Tensor | Row) -> Tensor:
    return number.value if isinstance(number, Row) else number


def _at_least_one(count: Tensor) -> Tensor:
    """The count; 1 if nothing was counted, where the total is 0."""
    return masked(count, count > 0, 1.0)


def _leaves(tile: Tile) -> Leaves:
    """What the loss of a tile is differentiated by: values, anchor values, column values."""
    if torch.is_grad_enabled():
        tile.values.requires_grad_()
        if tile.anchor_values is not None:
            tile.anchor_values = tile.anchor_values.detach().requires_grad_()
        if tile.column_values is not None:
            tile.column_values = tile.column_values.detach().requires_grad_()
    return tile.values, tile.anchor_values, tile.column_values


def _derive(total: Tensor | Row, leaves: Leaves, *, needed: bool, keep_graph: bool = False) -> tuple[Tensor, Leaves]:
    """The sum over the anchors and its derivatives by the leaves; None if it does not depend on a leaf."""
    if isinstance(total, Row):
        if not needed:
            return total.value.sum(), (None, None, None)
        return total.value.sum(), (total.weights(), total.by_anchor_values, total.by_column_values)
    value = total.sum()
    if not (needed and value.requires_grad):
        return value.detach(), (None, None, None)
    present = [leaf for leaf in leaves if leaf is not None]
    derivatives = iter(torch.autograd.grad(value, present, retain_graph=keep_graph, allow_unused=True))
    by_values, by_anchor_values, by_column_values = (None if leaf is None else next(derivatives) for leaf in leaves)
    return value.detach(), (by_values, by_anchor_values, by_column_values)


def _kernel_program(loss: RowLoss, pairs: int) -> KernelProgram | None:
    """How the kernels compute a loss; None if they cannot, or are not to be used for so few pairs."""
    setting = programs.Setting
    return None if setting.precision is None or pairs < setting.smallest else loss.kernel_program()


def _compute(
    loss: RowLoss, relations: Supervision | None, inputs: Tensors, constants: Tensors, needed: Needed
) -> tuple[Tensor, Gradients]:
    """The loss and the needed gradients by embeddings, gallery and anchor values."""
    (embeddings, gallery, anchor_values), (labels, gallery_labels, positions, noise) = inputs, constants
    related = labels if relations is None else relations
    assert embeddings is not None
    assert related is not None
    given = LossBatch(embeddings, related, gallery, gallery_labels, positions, anchor_values, noise)
    batch = TiledBatch(loss, given, columns_need_grad=needed[1] or gallery is None, lists=True)
    height, width = batch.height, batch.width
    slices = batch.slices(height, width)
    program = None
    if height * width >= programs.Setting.smallest:  # asked here as well, to save a call in a small batch
        program = _kernel_program(loss, height * width)
        program = program if program is not None and programs.applies(batch) else None
    few: Tile | None = None
    result: Result | None = None
    if program is not None:
        from nearfar.engine import triton_kernels

        try:
            few, result = triton_kernels.compute(program, batch, differentiate=any(needed))
        except programs.KernelError as error:
            programs.fall_back(error)
    if result is None:
        if few is None and height * width >= SELECT_FROM and batch.pairs is None and loss.selects_columns:
            few = batch.selected_tile()
        kind: type[Accumulator] | None = MatrixGradient
        if not any(needed):
            kind = None
        elif few is not None or batch.pairs is not None:
            kind = ListGradient
        elif len(slices) > 1 and 4 * height * width * embeddings.element_size() <= loss.memory_budget:
            # W and its transpose take half of the budget, the tiles the other half.
            slices = batch.slices(height, width, share=0.5)
        elif len(slices) > 1:
            kind = StreamedGradient
        with torch.set_grad_enabled(kind is not None and not loss.closed_form):
            result = evaluate(batch, slices, kind, few)
    value, weights = result
    value = propagate_nan(value, batch.anchors, batch.prepared or batch.anchors)
    for chunk in batch._chunks.values():
        value = propagate_nan(value, chunk, chunk)
    if weights is None:
        return value, [None, None, None]
    by_anchors, by_columns = weights.gradients()
    to_embeddings = batch.measure.to_embeddings
    by_embeddings = to_embeddings(by_anchors, batch.anchors) if needed[0] else None
    by_gallery = to_embeddings(by_columns, batch.columns) if needed[1] and by_columns is not None else None
    if batch.gallery is None and by_columns is not None and by_embeddings is not None:
        by_embeddings += to_embeddings(by_columns, batch.columns)
    return value, [by_embeddings, by_gallery, weights.by_anchor_values if needed[2] else None]


def row_loss(loss: RowLoss, batch: LossBatch) -> Tensor:
    """Compute the loss of a batch, differentiable once by embeddings, gallery and anchor values."""
    labels = batch.relations if isinstance(batch.relations, Tensor) else None
    relations = None if isinstance(batch.relations, Tensor) else batch.relations
    owner = None if labels is None else loss  # a recording reads tensors only
    pairs = len(batch.embeddings) * len(batch.embeddings if batch.gallery is None else batch.gallery)

    def graph_key() -> Hashable:
        settings = loss.graph_key()
        program = _kernel_program(loss, pairs)
        # The host waits for the number of positives of these.
        if settings is None or program == "semi_hard" or isinstance(program, AllTriplets):
            return None
        return settings, programs.Setting.precision, programs.Setting.smallest

    constants = labels, batch.gallery_labels, batch.positions, batch.noise
    computation = LossComputation(partial(_compute, loss, relations), constants, owner, graph_key, pairs)
    return differentiable(computation, (batch.embeddings, batch.gallery, batch.anchor_values))


@no_compile
@torch.no_grad()
def pair_weights(loss: RowLoss, batch: LossBatch) -> Tensor:
    """Compute W = ∂loss/∂values of every pair, [m, n]."""
    tiled = TiledBatch(loss, batch)
    with torch.set_grad_enabled(not loss.closed_form):
        _, weights = evaluate(tiled, tiled.slices(tiled.height, tiled.width), WeightMatrix)
    assert isinstance(weights, WeightMatrix)
    return weights.matrix
