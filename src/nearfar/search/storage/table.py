"""Items and their vectors in memory: rows are only ever added at the end, so that readers need not wait for writers."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from nearfar.search.items import Item, Items, missing
from nearfar.utils.inputs import as_vectors, check_finite
from nearfar.utils.precision import unit_rows

Vectors = NDArray[np.float32]
Ids = NDArray[np.int64]

SMALLEST = 1e-30  # squared length of vectors that are looked at more closely


class Growing:
    """Rows of an array that grows at its end; what was handed out stays as it is.

    >>> rows = Growing(np.zeros((0, 2), dtype=np.float32))
    >>> before = rows.array
    >>> rows.append(np.ones((3, 2), dtype=np.float32))
    >>> before.shape, rows.array.shape
    ((0, 2), (3, 2))
    """

    def __init__(self, array: NDArray[Any]) -> None:
        self._room = array
        self.array = array  # [n, …]; a view of the room

    def append(self, rows: NDArray[Any]) -> None:
        count = len(self.array)
        if count + len(rows) > len(self._room):
            room = np.empty((max(64, 2 * (count + len(rows))), *self.array.shape[1:]), dtype=self.array.dtype)
            room[:count] = self.array
            self._room = room
        self._room[count : count + len(rows)] = rows
        self.array = self._room[: count + len(rows)]


class Table:
    """What an index knows.

    Args:
        vectors: [n, d], perhaps a memory map; kept as they are.
        items: One for each of them, by rising id.
    """

    def __init__(self, vectors: Vectors, items: Sequence[Item]) -> None:
        if len(vectors) != len(items):
            raise ValueError(f"there are {len(vectors)} vectors and {len(items)} items; needed is one for each")
        self.base = vectors
        self.tail = Growing(np.empty((0, vectors.shape[1]), dtype=np.float32))
        self.version = 0  # goes up with every change
        self._ever = Growing(np.array([item.id for item in items], dtype=np.int64))  # by row, also of what is gone
        self._items: list[Item | None] = list(items)  # by row; None where it was removed
        self._rows = {item.id: row for row, item in enumerate(items)}
        self._lock = threading.RLock()
        self._shown: tuple[int, Items, Ids] | None = None

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, id: object) -> bool:
        return id in self._rows

    @property
    def dim(self) -> int:
        return int(self.base.shape[1])

    def add(self, items: Sequence[Item], vectors: Vectors) -> None:
        """More of them; ids must be higher than all before."""
        with self._lock:
            self.tail.append(vectors)
            self._ever.append(np.array([item.id for item in items], dtype=np.int64))
            for item in items:
                self._rows[item.id] = len(self._items)
                self._items.append(item)
            self.version += 1

    def remove(self, ids: Iterable[int]) -> None:
        with self._lock:
            for id in ids:
                self._items[self.row(id)] = None
                del self._rows[id]
            self.version += 1

    def change(self, item: Item) -> None:
        """Another name, label or metadata for an item."""
        with self._lock:
            self._items[self.row(item.id)] = item
            self.version += 1

    def item(self, id: int) -> Item:
        with self._lock:
            item = self._items[self.row(id)]
        assert item is not None
        return item

    def items(self) -> Items:
        return self._now()[0]

    def ids(self) -> Ids:
        """Of all items, rising."""
        return self._now()[1]

    def _now(self) -> tuple[Items, Ids]:
        with self._lock:
            if self._shown is None or self._shown[0] != self.version:
                items = Items([item for item in self._items if item is not None])
                self._shown = self.version, items, np.array([item.id for item in items], dtype=np.int64)
            return self._shown[1], self._shown[2]

    def vector(self, id: int) -> Vectors:
        with self._lock:
            row, tail = self.row(id), self.tail.array
        return np.array(self.base[row] if row < len(self.base) else tail[row - len(self.base)])

    def vectors(self, ids: Ids | None = None) -> Vectors:
        """Of some items, or of all of them in the order of their ids."""
        with self._lock:
            wanted = self.ids() if ids is None else ids
            if ids is None and len(self._rows) == len(self.base) == len(self._items):
                return self.base
            rows = np.fromiter((self.row(id) for id in wanted.tolist()), dtype=np.int64, count=len(wanted))
            tail = self.tail.array
        found = np.empty((len(rows), self.dim), dtype=np.float32)
        old = rows < len(self.base)
        found[old] = self.base[rows[old]]
        found[~old] = tail[rows[~old] - len(self.base)]
        return found

    def everything(self) -> tuple[Ids, Vectors]:
        """Ids and vectors of all items at one moment."""
        with self._lock:
            return self.ids(), self.vectors()

    def since(self) -> tuple[Ids, Ids, Vectors, Ids]:
        """The ids of the base, those of what came after it with its vectors, and those of all that is gone."""
        with self._lock:
            ids, count = self._ever.array, len(self.base)
            gone = np.setdiff1d(ids, self.ids(), assume_unique=True)
            return ids[:count], ids[count:], self.tail.array, gone

    def known(self, ids: Iterable[int]) -> tuple[Ids, Vectors]:
        """Those of some ids that are here, as others may have been removed a moment ago, and their vectors."""
        with self._lock:
            found = np.array([id for id in ids if id in self._rows], dtype=np.int64)
            return found, self.vectors(found)

    def row(self, id: int) -> int:
        """Where an item lies; below ``len(base)`` where it was there from the beginning."""
        if id not in self._rows:
            raise missing(id, len(self._rows))
        return self._rows[id]


def checked_vectors(name: str, vectors: Any, dim: int | None, measure: str) -> Vectors:
    """Vectors [n, d] as they are compared: float32, and of length one for cosines.

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
        return points  # one query, as a model gives it: no time to lose
    # NumPy alone: a query should not wake the threads of PyTorch, which would take the processor from FAISS.
    squares: Any = np.einsum("nd,nd->n", points, points)
    strange = not np.isfinite(squares).all()
    if strange:
        check_finite(name, as_vectors(name, vectors))  # long vectors have no fault
    if measure != "cosine":
        return points
    if strange or (squares < SMALLEST).any():
        return unit_rows(torch.from_numpy(points).double()).float().numpy()
    if (np.abs(squares - 1) < 1e-6).all():
        return points
    found: Vectors = points / np.sqrt(squares)[:, None]
    return found
