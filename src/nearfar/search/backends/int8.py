"""Exact search over int8 codes: a quarter of the memory traffic, and the same neighbors.

A vector is stored relative to the mean of all as a scale times whole numbers of −127 to 127, with the length of what
that leaves out. So are queries. The product of two codes is exact in int32, and by the inequality of Cauchy and Schwarz
it bounds the product of the vectors. A vector is compared in float64 with a query if its bound reaches the k-th best
score so far; no other can be among the k nearest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from nearfar.search.backends.base import NO_ID, BackendContext, Ids, Scores, Vectors
from nearfar.search.backends.exact import (
    LARGEST,
    LONGEST,
    SAME,
    TINY,
    Coordinates,
    Exact,
    VectorPart,
    distance_scores,
    frame_for,
    merged,
    sum_and_lengths,
)
from nearfar.utils.atomic import read_tensors, whole_file, write_tensors
from nearfar.utils.tensors import as_vectors, blocks, check_finite

ROWS, TILE = 64, 2**21  # queries and products of a tile
BYTES = 2**21  # of float32 vectors that are encoded or compared at once
GROUP = 16  # columns whose highest bound is looked at first
LEVELS = 127
MOST_DIMENSIONS = 2**31 // LEVELS**2  # whose products int32 can add up
EXACT_DIMENSIONS = 2**24 // LEVELS**2  # whose products float32 can add up without rounding
SMALLEST = 1e-18  # scale; vectors that are searched together have lengths of about 1e-10 to 1e10
SLACK = 2.0**-20  # more than float32 rounds
SLACK64 = 1e-12  # more than float64 rounds
ANY = 1e25  # a bound that every limit lets through
SAMPLE = 64  # rows that are encoded again to see whether a file belongs to the vectors
CODES, BOUNDS = "int8-codes.npy", "int8-bounds.safetensors"


@dataclass(frozen=True, kw_only=True)
class _Coded(VectorPart):
    """A block of vectors with their codes."""

    codes: Tensor  # [n, d] of int8
    scales: Tensor  # [n]
    residuals: Tensor  # [n], at least the lengths of what the codes leave out
    lengths: Tensor  # [n], at least the lengths of the vectors in the frame
    origin: Ids | None = None  # [n], rows of ``vectors``; None for all of them in their order

    def only(self, rows: Ids) -> Self:
        """Some of the rows; the vectors, which may be on disk, are not copied."""
        picked = torch.from_numpy(rows)
        some: dict[str, Any] = {name: each[picked] for name, each in self.tensors().items() if name != "vectors"}
        return replace(self, ids=self.ids[rows], alive=None, origin=rows, **some)

    def take(self, places: Tensor) -> Tensor:
        """The vectors of some rows."""
        return self.vectors[places if self.origin is None else torch.from_numpy(self.origin)[places]]


@dataclass(frozen=True)
class _Queries:
    """Queries with their codes, and what turns scores into limits of products.

    With products as ``_upper`` bounds them, a score s is reached where product · unit ≥ base + factor · value(s).
    """

    codes: Tensor  # [q, d] of int8
    weights: tuple[Tensor, ...]  # [q, 1] each: of residuals, lengths and, for distances, squared lengths
    unit: Tensor  # [q] of float64
    base: Tensor  # [q] of float64
    factor: float
    by_distance: bool

    def limits(self, scores: Scores) -> Tensor:
        """What the bound of a vector must reach if its score may be one of some scores [q], or higher."""
        value = torch.from_numpy(scores.astype(np.float64))
        if self.by_distance:
            value = -value.square().masked_fill_(value <= -LARGEST, torch.inf)
        limits = (self.base + self.factor * (value - SAME * value.abs())) / self.unit
        limits -= SLACK * limits.abs() + TINY
        return limits.nan_to_num_(nan=-LARGEST).clamp_(-LARGEST, ANY).float()


class Int8(Exact):
    """Exact search that reads int8 codes of all vectors, and only those vectors that may be among the nearest.

    It finds what ``Exact`` finds. Cosines are computed in float64 as well, so they do not depend on the batch. It
    computes on the CPU.
    """

    name: str = "exact:int8"
    _rows = ROWS

    def __init__(self, vectors: Vectors, ids: Ids, *, measure: str = "cosine", source: str = "vectors") -> None:
        self._source = source
        if vectors.shape[1] > MOST_DIMENSIONS:
            raise ValueError(
                f"vectors have {vectors.shape[1]} dimensions; exact:int8 takes up to {MOST_DIMENSIONS}, use exact"
            )
        super().__init__(vectors, ids, measure=measure)

    @classmethod
    def make(cls, vectors: Vectors, ids: Ids, context: BackendContext) -> Int8:
        return cls(vectors, ids, measure=context.measure)

    @classmethod
    def open(cls, vectors: Vectors, ids: Ids, context: BackendContext, folder: Path, facts: Mapping[str, Any]) -> Int8:
        """Open codes that were saved. The vectors are not read, except for a few."""
        backend = cls(vectors[:0], ids[:0], measure=context.measure, source=str(folder / "vectors.npy"))
        if not len(ids):
            return backend
        bounds, about = read_tensors(folder / BOUNDS)
        coded: dict[str, Any] = dict(bounds)
        frame = Coordinates(coded.pop("center"), float(about["factor"]))
        # Writable in memory only: PyTorch warns of arrays that are not.
        coded["codes"] = torch.from_numpy(np.load(folder / CODES, mmap_mode="c", allow_pickle=False))
        tensor = as_vectors("vectors", vectors)
        rows = np.unique(np.linspace(0, len(ids) - 1, SAMPLE).astype(np.int64))
        for name, again in _encoded(frame, tensor[rows]).items():
            known = coded[name]
            fitting = known.dtype == again.dtype and known.shape == (len(ids), *again.shape[1:])
            if not fitting or not torch.allclose(known[rows].double(), again.double(), rtol=SLACK, atol=0.0):
                raise ValueError(f"{CODES} and {BOUNDS} do not match the vectors")
        backend._frame, backend._parts = frame, (_Coded(tensor, ids, frame, **coded), backend._parts[1])
        return backend

    def save(self, folder: Path, ids: Ids, vectors: Vectors) -> dict[str, Any]:
        """Write the codes; they are made anew where vectors were added or removed."""
        base, tail = self._parts
        if base.alive is not None or len(tail.ids) or len(base.ids) != len(ids):
            base = Int8(vectors, ids, measure=self.measure, source=self._source)._parts[0]
        if isinstance(base, _Coded) and base.frame is not None:
            with whole_file(folder / CODES) as draft, open(draft, "wb") as file:
                np.save(file, base.codes.numpy())
            bounds = {name: getattr(base, name) for name in ("scales", "residuals", "lengths")}
            write_tensors(folder / BOUNDS, {**bounds, "center": base.frame.center}, {"factor": base.frame.factor})
        return {}

    def _part(self, vectors: Vectors, ids: Ids) -> VectorPart:
        if not len(vectors):
            return super()._part(vectors, ids)
        tensor = as_vectors("vectors", vectors)
        check_finite(self._source, tensor)
        if self._frame is None:  # these are the first vectors
            total, lengths = sum_and_lengths(tensor)
            scaled = frame_for(total, lengths) if self.measure == "euclidean" else None
            self._frame = Coordinates(total / len(lengths), 1.0 if scaled is None else scaled.factor)
        empty = _encoded(self._frame, tensor[:0])
        coded: dict[str, Any] = {name: each.new_empty((len(tensor), *each.shape[1:])) for name, each in empty.items()}
        for rows in blocks(tensor, BYTES):
            for name, each in _encoded(self._frame, tensor[rows]).items():
                coded[name][rows] = each
        return _Coded(tensor, np.asarray(ids, dtype=np.int64), self._frame, **coded)

    def _nearest(self, queries: Tensor, part: VectorPart, out: Tensor | None, k: int) -> tuple[Scores, Ids]:
        """Scores and rows of the nearest of a few queries, tile by tile of columns."""
        assert isinstance(part, _Coded)
        assert part.frame is not None
        asked = _asked(part.frame, queries, self.measure)
        count, k = len(queries), min(k, len(part.ids))
        scores, places = np.full((count, k), -np.inf, dtype=np.float32), np.full((count, k), NO_ID)
        width = TILE // (count * GROUP) * GROUP
        for start in range(0, len(part.ids), width):
            upper = _upper(asked, part, out, slice(start, start + width))
            groups = upper.view(count, GROUP, -1).amax(dim=1)
            limits = asked.limits(scores[:, -1])
            if np.isneginf(scores[:, -1]).any():  # no limit yet: the k-th best of those that look best is one
                columns = _members(groups.topk(min(k, groups.shape[1])).indices, groups.shape[1]).flatten(1)
                bounds, order = upper.gather(1, columns).topk(min(k, columns.shape[1]))
                rows, slots = (bounds > -torch.inf).nonzero(as_tuple=True)
                looks_best = rows, columns.gather(1, order)[rows, slots] + start
                first, _ = self._scored(queries, part, *looks_best)
                enough = first.shape[1] == k
                limits = torch.maximum(limits, asked.limits(first.min(axis=1))) if enough else limits
            rows, columns = _reaching(upper, groups, limits)
            scores, places = merged([(scores, places), self._scored(queries, part, rows, columns + start)], k)
        return scores, places

    def _scored(self, queries: Tensor, part: _Coded, rows: Tensor, places: Tensor) -> tuple[Scores, Ids]:
        """Scores of pairs of a query and a vector, from float64, and their places; both [q, m], filled up with −inf."""
        scored = [np.empty(0, dtype=np.float32)]
        pairs = max(1, BYTES // (4 * self.dim))  # at once
        for row, place in zip(torch.split(rows, pairs), torch.split(places, pairs), strict=True):
            points, asked = part.take(place), queries[row].double()
            if self.measure == "cosine":
                values = asked.mul_(points).sum(dim=1).numpy()
                scored.append(values.astype(np.float32))
            else:
                values = asked.sub_(points).square_().sum(dim=1).numpy()
                scored.append(distance_scores(values))
            if not np.isfinite(values).all():  # the file changed after it was encoded
                check_finite(self._source, part.vectors)
        slots = torch.arange(len(rows), device=rows.device) - torch.searchsorted(rows, rows)
        shape = len(queries), int(slots.max()) + 1 if len(rows) else 0
        scores, filled = np.full(shape, -np.inf, dtype=np.float32), np.full(shape, NO_ID)
        index = rows.numpy(), slots.numpy()
        scores[index], filled[index] = np.concatenate(scored), places.numpy()
        return scores, filled


def _encoded(frame: Coordinates, vectors: Tensor) -> dict[str, Tensor]:
    """The fields of ``_Coded`` for a few vectors [n, d]."""
    points = frame.exact(vectors)
    lengths = torch.linalg.vector_norm(points, dim=1)
    scales = (points.abs().amax(dim=1) / LEVELS).float().clamp_(min=SMALLEST)
    codes, residuals = _codes(points, scales.double())
    # Vectors that were added to much shorter ones are compared with every query.
    beyond = lengths > LONGEST
    return {
        "codes": codes,
        "scales": scales.masked_fill_(beyond, 1.0),
        "residuals": (residuals * (1 + SLACK) + TINY).masked_fill_(beyond, ANY).float(),
        "lengths": (lengths * (1 + SLACK)).masked_fill_(beyond, 0.0).float(),
    }


def _codes(points: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Codes [n, d] of points in float64, and the lengths [n] of what they leave out."""
    values = (points / scales.unsqueeze(1)).round_().clamp_(-LEVELS, LEVELS)
    return values.to(torch.int8), torch.linalg.vector_norm(points - values.mul_(scales.unsqueeze(1)), dim=1)


def _asked(frame: Coordinates, queries: Tensor, measure: str) -> _Queries:
    """Queries [q, d] with their codes."""
    by_distance = measure == "euclidean"
    points = frame.exact(queries) if by_distance else queries.double()
    scales = (points.abs().amax(dim=1) / LEVELS).clamp_(min=SMALLEST)
    codes, residuals = _codes(points, scales)
    lengths = torch.linalg.vector_norm(codes.double(), dim=1).clamp_(min=1.0)
    unit = 2 * scales if by_distance else scales
    weights = [lengths * (1 + SLACK), residuals / scales * (1 + SLACK) + lengths * SLACK]
    if by_distance:
        weights.append((4 * SLACK - 1) / unit)
        base = points.square().sum(dim=1) * (1 - SLACK64)
    else:
        error = SLACK64 * torch.linalg.vector_norm(points, dim=1) * torch.linalg.vector_norm(frame.center)
        base = -(points @ frame.center) - error
    columns = tuple(each.float().unsqueeze(1) for each in weights)
    return _Queries(codes, columns, unit, base, frame.factor**2, by_distance)


def _upper(asked: _Queries, part: _Coded, out: Tensor | None, tile: slice) -> Tensor:
    """Upper bounds of products with a tile of columns, in units of the queries; −inf for rows that are left out.

    The product is that of a query and a vector, less half of the squared length of the vector for distances. The
    columns are filled up to a multiple of GROUP.
    """
    lengths = part.lengths[tile]
    upper = _products(asked.codes, part.codes[tile]).float().mul_(part.scales[tile])
    terms = part.residuals[tile], lengths, lengths.square()
    for weight, term in zip(asked.weights, terms, strict=False):  # faster than a product of matrices
        upper.addcmul_(weight, term)
    if out is not None:
        upper.masked_fill_(out[tile], -torch.inf)
    missing = -len(lengths) % GROUP
    return torch.nn.functional.pad(upper, (0, missing), value=-torch.inf) if missing else upper


def _members(groups: Tensor, count: int) -> Tensor:
    """The columns [..., GROUP] of some of ``count`` groups."""
    return groups.unsqueeze(-1) + torch.arange(0, GROUP * count, count, device=groups.device)


def _reaching(upper: Tensor, groups: Tensor, limits: Tensor) -> tuple[Tensor, Tensor]:
    """Rows and columns of bounds [q, n] that reach the limits [q], row by row."""
    rows, hits = (groups >= limits.unsqueeze(1)).nonzero(as_tuple=True)
    columns = _members(hits, groups.shape[1])
    there, members = (upper[rows.unsqueeze(1), columns] >= limits[rows].unsqueeze(1)).nonzero(as_tuple=True)
    return rows[there], columns[there, members]


def _products(queries: Tensor, codes: Tensor) -> Tensor:
    """Products [q, n] of codes, exact in int32."""
    if _multiplies_int8(queries.shape[1]):
        return torch._int_mm(queries, codes.T)
    columns = []
    for rows in blocks(codes, BYTES):
        pairs = zip(*(torch.split(each, EXACT_DIMENSIONS, 1) for each in (queries, codes[rows])), strict=True)
        columns.append(torch.stack([one.float() @ other.float().T for one, other in pairs]).int().sum(0).int())
    return torch.cat(columns, 1)


@cache
def _multiplies_int8(dim: int) -> bool:
    """Whether PyTorch multiplies int8 matrices of a dimension correctly.

    The function is not public, products of one dimension are wrong in PyTorch 2.13, and processors without VNNI may
    saturate.
    """
    rng = torch.Generator("cpu").manual_seed(0)
    try:
        for count in (1, 4, 64):
            one, other = (
                torch.randint(-LEVELS, LEVELS + 1, (n, dim), dtype=torch.int8, generator=rng, device="cpu")
                for n in (count, 33)
            )
            one[0], other[0] = LEVELS, LEVELS
            if not torch.equal(torch._int_mm(one, other.T), one.int() @ other.int().T):
                return False
    except (AttributeError, RuntimeError):
        return False
    return True
