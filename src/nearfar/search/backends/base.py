"""The interface of backends, and what they share."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Vectors = NDArray[np.float32]
Ids = NDArray[np.int64]
Scores = NDArray[np.float32]

MEASURES = ("cosine", "euclidean")
NO_ID = -1  # placeholder where there are fewer than k neighbors


class Backend(Protocol):
    """Searches vectors by id.

    Vectors have length one where cosines are compared. Ids are in ascending order. ``search`` may run in many threads,
    also while one other thread adds or removes.
    """

    @property
    def name(self) -> str:
        """The name to request it by: "exact", "faiss:hnsw", …"""

    def add(self, ids: Ids, vectors: Vectors) -> None:
        """Add vectors.

        Args:
            ids: Their ids [n], higher than all before.
            vectors: The vectors [n, d].
        """

    def remove(self, ids: Ids) -> None:
        """Remove vectors.

        Args:
            ids: Their ids; unknown ones are ignored.
        """

    def search(self, queries: Vectors, k: int, allowed: Ids | None = None) -> tuple[Scores, Ids]:
        """Find the k nearest vectors of each query.

        Args:
            queries: The queries [q, d].
            k: Number of neighbors.
            allowed: Only these ids, in ascending order; None for all.

        Returns:
            Scores, highest first, and ids, [q, k] each. Where there are fewer than k, the last ids are −1 and their
            scores −inf.
        """

    def save(self, folder: Path, ids: Ids, vectors: Vectors) -> dict[str, Any]:
        """Write the files that are needed to open the backend again.

        Args:
            folder: A new data folder.
            ids: Ids [n] of all vectors.
            vectors: The vectors [n, d].

        Returns:
            Facts about the backend, for ``renew`` and for users.
        """

    def renew(self, folder: Path, ids: Ids, vectors: Vectors, facts: Mapping[str, Any]) -> Backend:
        """Open what ``save`` wrote. This backend can still be searched.

        Args:
            folder: The data folder.
            ids: Ids [n] of all vectors.
            vectors: The vectors [n, d].
            facts: What ``save`` returned.
        """

    def settle(self, ids: Ids, vectors: Vectors) -> None:
        """Make sure that data outside the index folder matches the index, after it was opened.

        Args:
            ids: Ids [n] of all vectors.
            vectors: The vectors [n, d].
        """

    def damage(self, ids: Ids, vectors: Vectors) -> str:
        """Return how data outside the data folder differs from all ids and vectors; empty if it does not."""
        return ""

    def close(self) -> None:
        """Close files and connections."""

    def discard(self) -> None:
        """Remove data outside the index folder, because another backend replaces this one."""


class GrowingArray:
    """An array that grows at its end. Views that were handed out stay valid."""

    def __init__(self, array: NDArray[Any]) -> None:
        self._capacity = array
        self.array = array  # a view of the used rows

    def append(self, rows: NDArray[Any]) -> None:
        """Append rows."""
        count = len(self.array)
        if count + len(rows) > len(self._capacity):
            larger = np.empty((max(64, 2 * (count + len(rows))), *self.array.shape[1:]), dtype=self.array.dtype)
            larger[:count] = self.array
            self._capacity = larger
        self._capacity[count : count + len(rows)] = rows
        self.array = self._capacity[: count + len(rows)]


def rows_of(ids: Ids, wanted: Ids) -> Ids:
    """Return the positions of ids in an ascending list; ids that are not in it are left out."""
    if not len(ids):
        return np.empty(0, dtype=np.int64)
    rows = np.searchsorted(ids, wanted).clip(max=len(ids) - 1)
    found: Ids = rows[ids[rows] == wanted].astype(np.int64)
    return found
