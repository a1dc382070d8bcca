"""Exact search: all similarities, one tile at a time."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nearfar.search.backends.base import NO_ID, Backend, GrowingArray, Ids, Scores, Vectors, best, rows_of
from nearfar.utils.tensors import as_vectors, full_precision
from nearfar.utils.validation import one_of

ROWS, COLUMNS = 256, 32_768  # of a tile
FEW = 8  # if at most one in so many rows is allowed, they are copied and searched alone


@dataclass(frozen=True)
class _Part:
    """A block of vectors, and which of them still exist."""

    vectors: Tensor  # [n, d]
    squares: Tensor  # [n], squared lengths; empty for cosines
    ids: Ids  # [n]
    alive: NDArray[np.bool_] | None = None  # [n]; None where all are

    def rows(self, allowed: Ids | None) -> Ids | None:
        """The rows to search; None for all."""
        if allowed is None:
            return None if self.alive is None else np.flatnonzero(self.alive)
        rows = rows_of(self.ids, allowed)
        return rows if self.alive is None else rows[self.alive[rows]]


class _Rows:
    """A tensor that grows at its end. Views that were handed out stay valid."""

    def __init__(self, rows: Tensor) -> None:
        self._room = rows
        self.tensor = rows  # [n, …]; a view of the room

    def append(self, rows: Tensor) -> None:
        count = len(self.tensor) + len(rows)
        if count > len(self._room):
            room = self._room.new_empty((max(64, 2 * count), *rows.shape[1:]))
            room[: len(self.tensor)] = self.tensor
            self._room = room
        self._room[len(self.tensor) : count] = rows
        self.tensor = self._room[:count]


class Exact(Backend):
    """Computes all similarities with PyTorch.

    Args:
        vectors: Vectors [n, d] of float32. A memory map is not copied on a CPU.
        ids: Their ids [n], in ascending order.
        measure: "cosine", for vectors of length one, or "euclidean".
        device: Where to compute; a GPU gets a copy.

    Example:
        >>> found = Exact(np.eye(3, dtype=np.float32), np.array([2, 4, 6]))
        >>> scores, ids = found.search(np.array([[0.0, 0.6, 0.8]], dtype=np.float32), 2)
        >>> ids.tolist(), scores.round(1).tolist()
        ([[6, 4]], [[0.800000011920929, 0.6000000238418579]])
    """

    name: str = "exact"

    def __init__(
        self, vectors: Vectors, ids: Ids, *, measure: str = "cosine", device: str | torch.device = "cpu"
    ) -> None:
        self.measure = one_of("measure", measure, ("cosine", "euclidean"))
        self.device = torch.device(device)
        self.dim = int(vectors.shape[1])
        self._lock = threading.Lock()
        base, tail = self._part(vectors, ids), self._part(vectors[:0], ids[:0])
        self._tail, self._tail_squares, self._tail_ids = (
            _Rows(tail.vectors),
            _Rows(tail.squares),
            GrowingArray(tail.ids),
        )
        self._parts = base, tail

    def add(self, ids: Ids, vectors: Vectors) -> None:
        with self._lock:
            base, tail = self._parts
            new = self._part(vectors, ids)
            self._tail.append(new.vectors)
            self._tail_squares.append(new.squares)
            self._tail_ids.append(new.ids)
            alive = None if tail.alive is None else np.concatenate([tail.alive, np.ones(len(ids), dtype=bool)])
            self._parts = base, _Part(self._tail.tensor, self._tail_squares.tensor, self._tail_ids.array, alive)

    def remove(self, ids: Ids) -> None:
        with self._lock:
            base, tail = self._parts
            self._parts = _without(base, ids), _without(tail, ids)

    def search(self, queries: Vectors, k: int, allowed: Ids | None = None) -> tuple[Scores, Ids]:
        asked = torch.from_numpy(np.ascontiguousarray(queries, dtype=np.float32)).to(self.device)
        found = [self._search(asked, k, part, allowed) for part in self._parts]
        scores, ids = best(
            np.concatenate([one[0] for one in found], 1), np.concatenate([one[1] for one in found], 1), k
        )
        ids[np.isneginf(scores)] = NO_ID
        return scores, ids

    def fill_up(self, found: tuple[Scores, Ids], queries: Vectors, allowed: Ids | None) -> None:
        """Search again for queries of which another way of searching found too few: it did not look everywhere."""
        scores, ids = found
        short = ids[:, -1] == NO_ID
        if short.any():
            scores[short], ids[short] = self.search(queries[short], ids.shape[1], allowed)

    def save(self, folder: Path, ids: Ids, vectors: Vectors) -> dict[str, Any]:
        """Write nothing: the vectors are all that is needed."""
        return {}

    def renew(self, folder: Path, ids: Ids, vectors: Vectors, facts: Mapping[str, Any]) -> Exact:
        return Exact(vectors, ids, measure=self.measure, device=self.device)

    def settle(self, ids: Ids, vectors: Vectors) -> None:
        """Nothing to do: all data is in the index folder."""

    def close(self) -> None:
        """Nothing to close."""

    def discard(self) -> None:
        """Nothing to do: all data is in the index folder."""

    def _part(self, vectors: Vectors, ids: Ids) -> _Part:
        tensor = as_vectors("vectors", vectors) if len(vectors) else torch.empty(0, self.dim, device=self.device)
        tensor = tensor.to(self.device)
        squares = torch.empty(0, device=self.device)
        if self.measure == "euclidean":
            squares = (
                torch.cat([block.square().sum(dim=1) for block in torch.split(tensor, COLUMNS)])
                if len(tensor)
                else squares
            )
        return _Part(tensor, squares, np.asarray(ids, dtype=np.int64))

    @torch.no_grad()
    def _search(self, queries: Tensor, k: int, part: _Part, allowed: Ids | None) -> tuple[Scores, Ids]:
        rows = part.rows(allowed)
        if rows is not None and len(rows) * FEW < len(part.ids):
            picked = torch.from_numpy(rows).to(self.device)
            squares = part.squares[picked] if len(part.squares) else part.squares
            part, rows = _Part(part.vectors[picked], squares, part.ids[rows]), None
        out: Tensor | None = None
        if rows is not None:
            out = torch.ones(len(part.ids), dtype=torch.bool, device=self.device)
            out[torch.from_numpy(rows).to(self.device)] = False
        with full_precision(self.device):
            tiles = [self._tile(some, part, out, k) for some in torch.split(queries, ROWS)]
        scores, places = (torch.cat(each).cpu().numpy() for each in zip(*tiles, strict=True))
        return scores, part.ids[places] if len(part.ids) else places

    def _tile(self, queries: Tensor, part: _Part, out: Tensor | None, k: int) -> tuple[Tensor, Tensor]:
        """The best of a few queries, tile by tile of columns."""
        scores = queries.new_empty(len(queries), 0)
        places = torch.empty(len(queries), 0, dtype=torch.int64, device=self.device)
        for start in range(0, len(part.ids), COLUMNS):
            stop = min(start + COLUMNS, len(part.ids))
            values = self._similarity(queries, part, start, stop)
            if out is not None:
                values.masked_fill_(out[start:stop], -torch.inf)
            top = values.topk(min(k, stop - start), dim=1)
            scores, places = torch.cat([scores, top.values], 1), torch.cat([places, top.indices + start], 1)
            if scores.shape[1] > k:
                scores, order = scores.topk(k, dim=1)
                places = places.gather(1, order)
        if self.measure == "euclidean" and places.shape[1]:
            # From the difference itself: |q|² − 2qv + |v|² of near vectors loses its digits.
            near = part.vectors[places].double() - queries.double().unsqueeze(1)
            scores = torch.where(scores.isneginf(), scores, -near.square().sum(dim=2).sqrt().float())
        return scores, places

    def _similarity(self, queries: Tensor, part: _Part, start: int, stop: int) -> Tensor:
        columns = part.vectors[start:stop].T
        if self.measure == "cosine":
            return queries @ columns
        return torch.addmm(part.squares[start:stop].neg(), queries, columns, alpha=2.0)


def _without(part: _Part, ids: Ids) -> _Part:
    rows = rows_of(part.ids, ids)
    if not len(rows):
        return part
    alive = np.ones(len(part.ids), dtype=bool) if part.alive is None else part.alive.copy()
    alive[rows] = False
    return replace(part, alive=alive)
