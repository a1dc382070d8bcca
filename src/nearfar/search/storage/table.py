"""Items and vectors of an index in memory."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from nearfar.search.backends.base import GrowingArray, Ids, Vectors
from nearfar.search.items import Item, Items, missing
from nearfar.utils.inputs import as_vectors, check_finite
from nearfar.utils.precision import unit_rows

SMALLEST = 1e-30  # squared length below which vectors are normalized in float64


class Table:
    """Items by row. Rows are only appended, so that readers never wait for a writer.

    Args:
        ids: Ids [n] of the rows as of the last compaction, in ascending order; some may have been removed since.
        vectors: Their vectors [n, d], usually a memory map.
        items: All items, ordered by id.
        added: Vectors of the items that were added since, by id.
    """

    def __init__(
        self, ids: Ids, vectors: Vectors, items: Sequence[Item], added: Mapping[int, Vectors] | None = None
    ) -> None:
        self.base_ids, self.base = ids, vectors
        self.version = 0  # increases with every change
        self._lock = threading.RLock()
        self._tail = GrowingArray(np.empty((0, vectors.shape[1]), dtype=np.float32))
        self._ids = GrowingArray(ids)  # by row, including removed items
        by_id = {item.id: item for item in items}
        self._items: list[Item | None] = [by_id.pop(id, None) for id in ids.tolist()]  # by row; None if removed
        self._rows = {item.id: row for row, item in enumerate(self._items) if item is not None}
        self._current: tuple[int, Items, Ids] | None = None
        if by_id:
            self.add(list(by_id.values()), np.stack([(added or {})[id] for id in by_id]))

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, id: object) -> bool:
        return id in self._rows

    @property
    def dim(self) -> int:
        """Dimensions of the vectors."""
        return int(self.base.shape[1])

    def add(self, items: Sequence[Item], vectors: Vectors) -> None:
        """Append items.

        Args:
            items: The items; their ids must be higher than all before.
            vectors: Their vectors [n, d].
        """
        with self._lock:
            self._tail.append(vectors)
            self._ids.append(np.array([item.id for item in items], dtype=np.int64))
            for item in items:
                self._rows[item.id] = len(self._items)
                self._items.append(item)
            self.version += 1

    def remove(self, ids: Iterable[int]) -> None:
        """Remove items.

        Args:
            ids: Their ids.
        """
        with self._lock:
            for id in ids:
                self._items[self._row(id)] = None
                del self._rows[id]
            self.version += 1

    def change(self, items: Iterable[Item]) -> None:
        """Replace items by others with the same ids.

        Args:
            items: The items as they are now.
        """
        with self._lock:
            for item in items:
                self._items[self._row(item.id)] = item
            self.version += 1

    def item(self, id: int) -> Item:
        """Return one item.

        Args:
            id: Its id.
        """
        with self._lock:
            item = self._items[self._row(id)]
        assert item is not None
        return item

    def existing(self, ids: Iterable[int]) -> dict[int, Item]:
        """Return those of some items that exist, by id.

        Args:
            ids: Ids; items may have been removed in the meantime.
        """
        with self._lock:
            found = [self._items[self._rows[id]] for id in ids if id in self._rows]
        return {item.id: item for item in found if item is not None}

    def items(self) -> Items:
        """Return all items, ordered by id."""
        return self._now()[0]

    def ids(self) -> Ids:
        """Return the ids of all items, in ascending order."""
        return self._now()[1]

    def vector(self, id: int) -> Vectors:
        """Return the vector [d] of an item.

        Args:
            id: Its id.
        """
        with self._lock:
            row, tail = self._row(id), self._tail.array
        return np.array(self.base[row] if row < len(self.base) else tail[row - len(self.base)])

    def vectors(self, ids: Ids | None = None) -> Vectors:
        """Return the vectors of some items, or of all in the order of their ids.

        Args:
            ids: Ids of the items; None for all.
        """
        with self._lock:
            wanted = self.ids() if ids is None else ids
            if ids is None and len(self._rows) == len(self.base) == len(self._items):
                return self.base
            rows = np.fromiter((self._row(id) for id in wanted.tolist()), dtype=np.int64, count=len(wanted))
            tail = self._tail.array
        found = np.empty((len(rows), self.dim), dtype=np.float32)
        old = rows < len(self.base)
        found[old] = self.base[rows[old]]
        found[~old] = tail[rows[~old] - len(self.base)]
        return found

    def everything(self) -> tuple[Ids, Vectors]:
        """Return ids and vectors of all items, of the same moment."""
        with self._lock:
            return self.ids(), self.vectors()

    def changes(self) -> tuple[Ids, Vectors, Ids]:
        """Return what changed since the last compaction: ids and vectors that were added, and ids that were removed."""
        with self._lock:
            ids = self._ids.array
            removed = np.setdiff1d(ids, self.ids(), assume_unique=True)
            return ids[len(self.base) :], self._tail.array, removed

    def known(self, ids: Iterable[int]) -> tuple[Ids, Vectors]:
        """Return those of some ids that exist, and their vectors.

        Args:
            ids: Ids; items may have been removed in the meantime.
        """
        with self._lock:
            found = np.array([id for id in ids if id in self._rows], dtype=np.int64)
            return found, self.vectors(found)

    def _now(self) -> tuple[Items, Ids]:
        with self._lock:
            if self._current is None or self._current[0] != self.version:
                items = Items([item for item in self._items if item is not None])
                self._current = self.version, items, np.array([item.id for item in items], dtype=np.int64)
            return self._current[1], self._current[2]

    def _row(self, id: int) -> int:
        if id not in self._rows:
            raise missing(id, len(self._rows))
        return self._rows[id]


def checked_vectors(name: str, vectors: Any, dim: int | None, measure: str) -> Vectors:
    """Return vectors as they are compared: float32, and of length one for cosines.

    Args:
        name: Name of the argument, for error messages.
        vectors: The vectors [n, d].
        dim: Dimensions that they must have; None for any.
        measure: "cosine" or "euclidean".

    Example:
        >>> checked_vectors("vectors", np.array([[3.0, 4.0]]), 2, "cosine").tolist()
        [[0.6000000238418579, 0.800000011920929]]
    """
    points: Vectors
    if isinstance(vectors, np.ndarray) and vectors.dtype == np.float32 and vectors.ndim == 2 and vectors.size:
        points = np.ascontiguousarray(vectors)
    else:
        points = as_vectors(name, vectors).float().cpu().numpy()
    if dim is not None and points.shape[1] != dim:
        raise ValueError(f"{name} has {points.shape[1]} dimensions; those of this index have {dim}")
    if len(points) == 1 and abs(float(points[0] @ points[0]) - 1) < 1e-6:
        return points  # the fast path of a single query
    # NumPy alone: a query should not wake the threads of PyTorch, which would compete with those of FAISS.
    squares: Any = np.einsum("nd,nd->n", points, points)
    unusual = not np.isfinite(squares).all()
    if unusual:
        check_finite(name, as_vectors(name, vectors))  # very long vectors are allowed
    if measure != "cosine":
        return points
    if unusual or (squares < SMALLEST).any():
        return unit_rows(torch.from_numpy(points).double()).float().numpy()
    if (np.abs(squares - 1) < 1e-6).all():
        return points
    found: Vectors = points / np.sqrt(squares)[:, None]
    return found
