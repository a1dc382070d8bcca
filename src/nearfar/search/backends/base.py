"""The interface of backends, and what they share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from nearfar.utils.progress import Progress

Vectors = NDArray[np.float32]
Ids = NDArray[np.int64]
Scores = NDArray[np.float32]
Rows = TypeVar("Rows", NDArray[Any], torch.Tensor)

MEASURES = ("cosine", "euclidean")
NO_ID = -1  # placeholder where there are fewer than k neighbors


@dataclass(frozen=True)
class BackendContext:
    """Settings of the index that a backend needs."""

    name: str  # of the backend, as ``choose`` returns it
    measure: str
    index: Path  # the folder
    device: torch.device | str = "cpu"  # for exact search
    progress: Progress | None = None
    read_only: bool = False  # write nothing outside the folder
    identity: str = ""  # of the folder; data outside of it carries this
    address: str = ""  # of a server
    known: Backend | None = None  # one that is open; its connection can be used


class Backend(ABC):
    """Searches vectors by id.

    Vectors have length one where cosines are compared. Ids are in ascending order. ``search`` may run in many threads,
    also while one other thread adds or removes.
    """

    name: str  # to request it by: "exact", "faiss:hnsw", …

    @classmethod
    @abstractmethod
    def make(cls, vectors: Vectors, ids: Ids, context: BackendContext) -> Backend:
        """Build a backend of vectors [n, d]."""

    @classmethod
    def open(
        cls, vectors: Vectors, ids: Ids, context: BackendContext, folder: Path, facts: Mapping[str, Any]
    ) -> Backend:
        """Open what ``save`` wrote to a data folder, with the facts that it returned."""
        return cls.make(vectors, ids, context)

    @abstractmethod
    def add(self, ids: Ids, vectors: Vectors) -> None:
        """Add vectors [n, d] whose ids [n] are higher than all before."""

    @abstractmethod
    def remove(self, ids: Ids) -> None:
        """Remove vectors; unknown ids are ignored."""

    @abstractmethod
    def search(self, queries: Vectors, k: int, allowed: Ids | None = None) -> tuple[Scores, Ids]:
        """Find the k nearest vectors of each query [q, d], only among allowed ids, which are in ascending order.

        Scores, highest first, and ids are [q, k]. Where there are fewer than k, the last ids are −1 and their scores
        −inf.
        """

    def save(self, folder: Path, ids: Ids, vectors: Vectors) -> dict[str, Any]:
        """Write the files that ``open`` needs to a new data folder; return facts for it and for users."""
        return {}

    def replay(self, ids: Ids, vectors: Vectors, removed: Ids) -> None:
        """Add and remove what changed since ``save``, after this was opened."""
        if len(ids):
            self.add(ids, vectors)
        if len(removed):
            self.remove(removed)

    def damage(self) -> str:
        """Return how data outside the data folder differs from the vectors; empty if it does not."""
        return ""

    def close(self) -> None:  # noqa: B027 (most have nothing to do)
        """Close files and connections."""

    def discard(self) -> None:  # noqa: B027
        """Remove data outside the index folder, because another backend replaces this one."""


class GrowingRows(Generic[Rows]):
    """Rows that grow at their end. Views that were handed out stay valid."""

    def __init__(self, rows: Rows, empty: Callable[[tuple[int, ...]], Rows]) -> None:
        self._room: Rows = rows
        self._empty: Callable[[tuple[int, ...]], Rows] = empty
        self.rows: Rows = rows  # [n, …]; a view of the room

    def append(self, rows: Rows) -> None:
        """Append rows."""
        count = len(self.rows) + len(rows)
        if count > len(self._room):
            room = self._empty((max(64, 2 * count), *self.rows.shape[1:]))
            room[: len(self.rows)] = self.rows
            self._room = room
        self._room[len(self.rows) : count] = rows
        self.rows = self._room[:count]


def rows_of(ids: Ids, wanted: Ids) -> Ids:
    """Return the positions of ids in an ascending list; ids that are not in it are left out."""
    if not len(ids):
        return np.empty(0, dtype=np.int64)
    rows = np.searchsorted(ids, wanted).clip(max=len(ids) - 1)
    present: Ids = rows[ids[rows] == wanted].astype(np.int64)
    return present
