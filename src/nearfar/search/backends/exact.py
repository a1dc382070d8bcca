"""Exact search: all similarities, one tile at a time.

Cosines are ranked as float32 computes them. Distances are ranked as float64 computes them from differences, so that
answers depend neither on the offset of the vectors nor on the batch: the matrix product of a tile only finds
candidates. It is taken of vectors relative to their mean and bounds the distances of all others, so that it is known
which queries need more candidates.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nearfar.search.backends.base import (
    NO_ID,
    Backend,
    BackendContext,
    GrowingRows,
    Ids,
    Scores,
    Vectors,
    rows_of,
)
from nearfar.utils.tensors import as_vectors, check_finite, full_precision
from nearfar.utils.validation import one_of

ROWS, COLUMNS = 256, 32_768  # of a tile
MANY, SWAPPED = 16, range(96, 1025)  # fewer queries of these dimensions are faster as right factors on a CPU
FEW = 8  # if at most one in so many rows is allowed, they are copied and searched alone
SPARE = 4  # candidates beyond k of a search by distance
FAR = 16.0  # squared ratio of offset to spread from which vectors are centered
LONGEST, SHORTEST = 1e10, 1e-10  # lengths between which float32 computes squares safely
UNIT = 2.0**-24  # rounding error of float32
SAME = 1e-6  # relative difference of squared distances that may round to the same score
TINY = 1e-36  # more than what is lost where products of float32 underflow
LARGEST = float(np.finfo(np.float32).max)
BLOCK = 4096  # rows whose differences are computed at once

Squares = NDArray[np.float64]


@dataclass(frozen=True)
class Coordinates:
    """The frame in which products are computed, chosen so that squares stay in the range of float32."""

    center: Tensor  # the origin [d], in float64
    factor: float

    def exact(self, vectors: Tensor) -> Tensor:
        """Return vectors in the frame, in float64."""
        return (vectors.double() - self.center).mul_(self.factor)

    def place(self, vectors: Tensor) -> Tensor:
        """Return vectors in the frame, in float32."""
        placed = torch.empty_like(vectors)
        for start in range(0, len(vectors), COLUMNS):
            placed[start : start + COLUMNS] = self.exact(vectors[start : start + COLUMNS])
        return placed


@dataclass(frozen=True)
class VectorPart:
    """A block of vectors, and which of them still exist."""

    vectors: Tensor
    ids: Ids
    frame: Coordinates | None = None  # of the products, if it is not that of the vectors
    placed: Tensor | None = None  # the vectors [n, d] in the frame, if there is one
    squares: Tensor | None = None  # lower bounds [n] of squared lengths in the frame; None for cosines
    alive: NDArray[np.bool_] | None = None  # [n]; None if none was removed

    @property
    def columns(self) -> Tensor:
        """The vectors that products are computed of."""
        return self.vectors if self.placed is None else self.placed

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that have a row for each vector, by the names of the fields."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}

    def only(self, rows: Ids) -> Self:
        """Return some of the rows."""
        picked = torch.from_numpy(rows).to(self.vectors.device)
        tensors: dict[str, Any] = {name: tensor[picked] for name, tensor in self.tensors().items()}
        return replace(self, ids=self.ids[rows], alive=None, **tensors)

    def rows(self, allowed: Ids | None) -> Ids | None:
        """Return the rows to search; None for all."""
        if allowed is None:
            return None if self.alive is None else np.flatnonzero(self.alive)
        rows = rows_of(self.ids, allowed)
        return rows if self.alive is None else rows[self.alive[rows]]


class Exact(Backend):
    """Computes all similarities with PyTorch.

    On a CPU, a memory map is copied only if distances are compared and the vectors are far from the origin, very long
    or very short. A GPU gets a copy.
    """

    name: str = "exact"
    _rows = ROWS

    def __init__(
        self, vectors: Vectors, ids: Ids, *, measure: str = "cosine", device: str | torch.device = "cpu"
    ) -> None:
        self.measure = one_of("measure", measure, ("cosine", "euclidean"))
        self.device = torch.device(device)
        self.dim = int(vectors.shape[1])
        self._lock = threading.Lock()
        self._error = 2 * (self.dim + 16) * UNIT  # relative; bounds that of a product of two vectors in the frame
        self._frame: Coordinates | None = None  # of the first vectors, for all later ones
        self._longest = -1.0  # length of a vector; −1 without vectors, and where cosines are compared
        base = self._part(vectors, ids)
        self._tail: dict[str, GrowingRows[Tensor]] = {}  # the tensors of the vectors that were added
        self._tail_ids = GrowingRows(base.ids[:0], partial(np.empty, dtype=np.int64))
        self._parts = base, self._part(vectors[:0], ids[:0])

    @classmethod
    def make(cls, vectors: Vectors, ids: Ids, context: BackendContext) -> Exact:
        return cls(vectors, ids, measure=context.measure, device=context.device)

    def add(self, ids: Ids, vectors: Vectors) -> None:
        with self._lock:
            base, tail = self._parts
            new = self._part(vectors, ids)
            given = new.tensors()
            for name, tensor in given.items():
                self._tail.setdefault(name, GrowingRows(tensor[:0], tensor.new_empty)).append(tensor)
            self._tail_ids.append(new.ids)
            grown: dict[str, Any] = {name: growing.rows for name, growing in self._tail.items()}
            alive = None if tail.alive is None else np.concatenate([tail.alive, np.ones(len(ids), dtype=bool)])
            self._parts = base, replace(new, ids=self._tail_ids.rows, alive=alive, **grown)

    def remove(self, ids: Ids) -> None:
        with self._lock:
            base, tail = self._parts
            self._parts = _without(base, ids), _without(tail, ids)

    def search(self, queries: Vectors, k: int, allowed: Ids | None = None) -> tuple[Scores, Ids]:
        asked = torch.from_numpy(np.ascontiguousarray(queries, dtype=np.float32)).to(self.device)
        parts = [part for part in self._parts if len(part.ids)] or self._parts[:1]
        scores, ids = merged([self._search(asked, k, part, allowed) for part in parts], k)
        ids[np.isneginf(scores)] = NO_ID
        return scores, ids

    def has(self, ids: Ids) -> NDArray[np.bool_]:
        """Return which of some ids, in an array of any shape, are there and were not removed."""
        present = np.zeros(ids.shape, dtype=bool)
        for part in self._parts:
            if len(part.ids):
                rows = np.searchsorted(part.ids, ids).clip(max=len(part.ids) - 1)
                same = part.ids[rows] == ids
                present |= same if part.alive is None else same & part.alive[rows]
        return present

    def batches(self, size: int) -> Iterator[tuple[Ids, Vectors]]:
        """Yield ids [n] and vectors [n, d] of all that were not removed, in the order of the ids."""
        for part in self._parts:
            rows = np.arange(len(part.ids)) if part.alive is None else np.flatnonzero(part.alive)
            for start in range(0, len(rows), size):
                batch = rows[start : start + size]
                yield part.ids[batch], part.vectors[torch.from_numpy(batch)].numpy()

    def fill_up(self, found: tuple[Scores, Ids], queries: Vectors, allowed: Ids | None) -> None:
        """Search again for queries of which another way of searching found too few: it did not look everywhere."""
        scores, ids = found
        short = ids[:, -1] == NO_ID
        if short.any():
            scores[short], ids[short] = self.search(queries[short], ids.shape[1], allowed)

    def refine(
        self, queries: Vectors, k: int, found: tuple[Scores, Ids], error: Squares, allowed: Ids | None
    ) -> tuple[Scores, Ids]:
        """Rank more than k candidates [q, m] with squared distances from float32 as this backend ranks them.

        ``error`` bounds [q] the errors of the distances. Queries whose neighbors may not be among the candidates are
        searched again.
        """
        nearest, ids = found
        if (ids[:, -1] == NO_ID).any():  # something was not looked at, or there are few vectors
            return self.search(queries, k, allowed)
        squared = _squared(torch.from_numpy(queries).to(self.device), self._vectors(ids))
        unsure = ~(_kth(squared, k) * (1 + SAME) < nearest[:, -1] - error - TINY)
        scores, ids = best(distance_scores(squared), ids, k)
        if unsure.any():
            scores[unsure], ids[unsure] = self.search(queries[unsure], k, allowed)
        return scores, ids

    def product_error(self, queries: Vectors) -> Squares:
        """Return bounds [q] of the errors of squared distances that float32 computes as |q|² − 2qv + |v|²."""
        lengths = np.sqrt(np.einsum("qd,qd->q", queries, queries, dtype=np.float64))
        bounds: Squares = self._error * (lengths + self._longest) ** 2
        return bounds

    def _part(self, vectors: Vectors, ids: Ids) -> VectorPart:
        ids = np.asarray(ids, dtype=np.int64)
        if not len(vectors):
            return VectorPart(torch.empty(0, self.dim, device=self.device), ids)
        tensor = as_vectors("vectors", vectors).to(self.device)
        if self.measure == "cosine":
            return VectorPart(tensor, ids)
        total, lengths = sum_and_lengths(tensor)
        if not bool(lengths.isfinite().all()):
            check_finite("vectors", tensor)
        if self._longest < 0:  # these are the first vectors
            self._frame = frame_for(total, lengths)
        self._longest = max(self._longest, float(lengths.max()))
        frame = self._frame
        placed = None if frame is None else frame.place(tensor)
        squares = lengths.square() if placed is None else sum_and_lengths(placed)[1].square()
        return VectorPart(tensor, ids, frame, placed, (squares * (1 - 3 * self._error)).float())

    def _vectors(self, ids: Ids) -> Tensor:
        """The vectors [q, m, d] of ids [q, m]."""
        base, tail = self._parts
        rows = torch.from_numpy(np.searchsorted(base.ids, ids)).to(self.device)
        if not len(tail.ids):
            return base.vectors[rows]
        old = rows < len(base.ids)
        vectors = base.vectors.new_empty((*ids.shape, self.dim))
        vectors[old] = base.vectors[rows[old]]
        later = torch.from_numpy(np.searchsorted(tail.ids, ids)).to(self.device)
        vectors[~old] = tail.vectors[later[~old]]
        return vectors

    @torch.no_grad()
    def _search(self, queries: Tensor, k: int, part: VectorPart, allowed: Ids | None) -> tuple[Scores, Ids]:
        rows = part.rows(allowed)
        if rows is not None and len(rows) * FEW < len(part.ids):
            part, rows = part.only(rows), None
        if not len(part.ids):
            return np.empty((len(queries), 0), dtype=np.float32), np.empty((len(queries), 0), dtype=np.int64)
        out: Tensor | None = None
        if rows is not None:
            out = torch.ones(len(part.ids), dtype=torch.bool, device=self.device)
            out[torch.from_numpy(rows).to(self.device)] = False
        with full_precision(self.device):
            tiles = [self._nearest(tile, part, out, k) for tile in torch.split(queries, self._rows)]
        scores, places = (np.concatenate(columns) for columns in zip(*tiles, strict=True))
        return scores, part.ids[places]

    def _nearest(self, queries: Tensor, part: VectorPart, out: Tensor | None, k: int) -> tuple[Scores, Ids]:
        """Scores and rows of the nearest of a few queries, and perhaps of some more."""
        return (self._tile if part.squares is None else self._by_distance)(queries, part, out, k)

    def _tile(self, queries: Tensor, part: VectorPart, out: Tensor | None, k: int) -> tuple[Scores, Ids]:
        """The best of a few queries, tile by tile of columns."""
        scores = queries.new_empty(len(queries), 0)
        places = torch.empty(len(queries), 0, dtype=torch.int64, device=self.device)
        for start in range(0, len(part.ids), _width(queries)):
            values = _products(queries, part, out, start)
            top = values.topk(min(k, values.shape[1]), dim=1)
            scores, places = torch.cat([scores, top.values], 1), torch.cat([places, top.indices + start], 1)
            if scores.shape[1] > k:
                scores, order = scores.topk(k, dim=1)
                places = places.gather(1, order)
        return scores.cpu().numpy(), places.cpu().numpy()

    def _by_distance(self, queries: Tensor, part: VectorPart, out: Tensor | None, k: int) -> tuple[Scores, Ids]:
        """The nearest of a few queries.

        With products as ``_products`` returns them, the squared distance of a vector from a query q is at least
        |q|² (1 − 2 error) − product, in the frame.
        """
        placed, scale = queries, 1.0
        if part.frame is not None:
            placed, scale = part.frame.place(queries), part.frame.factor**2
        squares = placed.square().sum(dim=1, dtype=torch.float64)
        extreme = ~(squares < LONGEST**2)  # compared with the vectors: products could overflow
        lengths = (squares * (1 - 2 * self._error) - TINY).masked_fill_(extreme, -torch.inf).cpu().numpy()
        placed = placed.masked_fill(extreme.unsqueeze(1), 0.0) if np.isneginf(lengths).any() else placed
        products, places = self._tile(placed, part, out, k + SPARE)
        squared = _squared(queries, part.vectors[places])
        squared[np.isneginf(products)] = np.inf
        scores = distance_scores(squared)
        if places.shape[1] == len(part.ids):
            return scores, places
        farthest = _kth(squared, k) * (1 + SAME) * scale
        for row in np.flatnonzero(~(farthest < lengths - products[:, -1])):
            rows = _above(placed[row], part, out, float(lengths[row] - farthest[row]))
            blocks = [rows[start : start + BLOCK] for start in range(0, len(rows), BLOCK)]
            every = np.concatenate([_squared(queries[row, None], part.vectors[block][None])[0] for block in blocks])
            found = best(distance_scores(every[None]), rows[None], places.shape[1])
            scores[row], places[row] = found[0][0], found[1][0].clip(min=0)
        return scores, places


def sum_and_lengths(vectors: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum [d] of vectors and their lengths [n], in float64."""
    parts = torch.split(vectors, COLUMNS)
    total = torch.stack([part.sum(dim=0, dtype=torch.float64) for part in parts]).sum(dim=0)
    return total, torch.cat([torch.linalg.vector_norm(part, dim=1, dtype=torch.float64) for part in parts])


def frame_for(total: Tensor, lengths: Tensor) -> Coordinates | None:
    """Return a frame for vectors of which float32 cannot compute distances from products; None if it can."""
    mean = total / len(lengths)
    offset, mean_square = float(mean.square().sum()), float(lengths.square().mean())
    is_far = offset > FAR * (mean_square - offset)
    longest = float(lengths.max()) if not is_far else math.sqrt(max(mean_square - offset, 0.0))
    fits = longest == 0.0 or SHORTEST <= longest <= LONGEST
    if fits and not is_far:
        return None
    return Coordinates(mean if is_far else torch.zeros_like(mean), 1.0 if fits else 2.0 ** -round(math.log2(longest)))


def _width(queries: Tensor) -> int:
    """The columns of a tile: more for few queries, as the threads wait for each other at the end of each tile."""
    return COLUMNS if len(queries) >= MANY else COLUMNS * (ROWS // MANY)


def _products(queries: Tensor, part: VectorPart, out: Tensor | None, start: int) -> Tensor:
    """Cosines with a tile of columns, or 2qv − |v|² with |v|² rounded down; −inf for rows that are left out."""
    tile = slice(start, start + _width(queries))
    columns = part.columns[tile]
    negative = None if part.squares is None else part.squares[tile].neg()
    if len(queries) < MANY and columns.shape[1] in SWAPPED and not columns.is_cuda:
        asked = queries if len(queries) > 1 else torch.cat([queries, queries])  # so that it is a product of matrices
        values = (columns @ asked.T)[:, : len(queries)].T.contiguous()
        values = values if negative is None else torch.add(negative, values, alpha=2.0)
    elif negative is None:
        values = queries @ columns.T
    else:
        values = torch.addmm(negative, queries, columns.T, alpha=2.0)
    return values if out is None else values.masked_fill_(out[tile], -torch.inf)


def _above(query: Tensor, part: VectorPart, out: Tensor | None, limit: float) -> Ids:
    """The rows whose product with a query [d] reaches a limit."""
    rows = []
    for start in range(0, len(part.ids), _width(query[None])):
        values = _products(query[None], part, out, start)[0].double()
        rows.append(((values >= limit) & ~values.isneginf()).nonzero()[:, 0] + start)
    return torch.cat(rows).cpu().numpy()


def _squared(queries: Tensor, points: Tensor) -> Squares:
    """Squared distances [q, m] of queries [q, d] from points [q, m, d]."""
    squared: Squares = (points.double() - queries.double().unsqueeze(1)).square_().sum(dim=2).cpu().numpy()
    return squared


def distance_scores(squared: Squares) -> Scores:
    """Return minus the distances; −inf, which means that there is no vector, only for infinity."""
    scores: Scores = -np.minimum(np.sqrt(squared), LARGEST).astype(np.float32)
    scores[np.isinf(squared)] = -np.inf
    return scores


def _kth(squared: Squares, k: int) -> Squares:
    """The k-th lowest value of each row."""
    kth: Squares = np.partition(squared, k - 1, axis=1)[:, k - 1]
    return kth


def best(scores: Scores, ids: Ids, k: int) -> tuple[Scores, Ids]:
    """Return the k highest scores of each row; of equal ones, those with lower ids. Short rows are padded."""
    order = np.lexsort((ids, -scores), axis=1)[:, :k]
    scores, ids = np.take_along_axis(scores, order, 1), np.take_along_axis(ids, order, 1)
    short = k - scores.shape[1]
    if short > 0:
        scores = np.pad(scores, ((0, 0), (0, short)), constant_values=-np.inf)
        ids = np.pad(ids, ((0, 0), (0, short)), constant_values=NO_ID)
    return scores, ids


def merged(results: Sequence[tuple[Scores, Ids]], k: int) -> tuple[Scores, Ids]:
    """Return the k best of several results."""
    scores, ids = zip(*results, strict=True)
    return best(np.concatenate(scores, 1), np.concatenate(ids, 1), k)


def _without(part: VectorPart, ids: Ids) -> VectorPart:
    rows = rows_of(part.ids, ids)
    if not len(rows):
        return part
    alive = np.ones(len(part.ids), dtype=bool) if part.alive is None else part.alive.copy()
    alive[rows] = False
    return replace(part, alive=alive)
