"""What every way of finding neighbours can do."""

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
NO_ID = -1  # instead of an id where there are fewer than k


class Backend(Protocol):
    """Vectors by id.

    Vectors are of length one where cosines are compared, and ids rise from one to the next. ``search`` may be called by
    many threads, also while one other thread adds or removes.
    """

    @property
    def name(self) -> str:
        """As it can be asked for again: "exact", "faiss:hnsw", …"""

    def add(self, ids: Ids, vectors: Vectors) -> None:
        """More vectors; their ids are higher than all before."""

    def remove(self, ids: Ids) -> None:
        """Vectors that are no longer to be found; unknown ids are passed over."""

    def search(self, queries: Vectors, k: int, allowed: Ids | None = None) -> tuple[Scores, Ids]:
        """The k nearest of each query, [q, k] each: scores, the greatest first, and ids.

        Only ids of ``allowed``, which rise, where that is given. Where there are fewer than k, ids are −1 and scores
        −inf at the end of a row.
        """

    def save(self, folder: Path, ids: Ids, vectors: Vectors) -> dict[str, Any]:
        """Write what is needed to open it again for just these, and return what is worth telling of it."""

    def renew(self, folder: Path, ids: Ids, vectors: Vectors, facts: Mapping[str, Any]) -> Backend:
        """The same for what ``save`` wrote to a folder; this one can still be searched."""

    def settle(self, ids: Ids, vectors: Vectors) -> None:
        """See that what is kept outside the index folder fits it: just these, after an index was opened."""

    def close(self) -> None:
        """Let go of files and connections."""

    def discard(self) -> None:
        """Remove what is kept outside the index folder: another backend has taken over."""


def best(scores: Scores, ids: Ids, k: int) -> tuple[Scores, Ids]:
    """The k greatest of each row; of equal ones the lower id. Rows that are too short are filled up.

    >>> best(np.array([[0.5, 0.9]], dtype=np.float32), np.array([[7, 3]]), 3)[1].tolist()
    [[3, 7, -1]]
    """
    order = np.lexsort((ids, -scores), axis=1)[:, :k]
    scores, ids = np.take_along_axis(scores, order, 1), np.take_along_axis(ids, order, 1)
    short = k - scores.shape[1]
    if short > 0:
        scores = np.pad(scores, ((0, 0), (0, short)), constant_values=-np.inf)
        ids = np.pad(ids, ((0, 0), (0, short)), constant_values=NO_ID)
    return scores, ids


def rows_of(ids: Ids, wanted: Ids) -> Ids:
    """Where ids lie in a rising list; those that are not in it are left out.

    >>> rows_of(np.array([2, 5, 9]), np.array([5, 6, 9])).tolist()
    [1, 2]
    """
    if not len(ids):
        return np.empty(0, dtype=np.int64)
    rows = np.searchsorted(ids, wanted).clip(max=len(ids) - 1)
    found: Ids = rows[ids[rows] == wanted].astype(np.int64)
    return found
