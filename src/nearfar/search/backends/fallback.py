"""Exact search in the place of a backend that failed."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nearfar.search.backends.base import Backend, Ids, Scores, Vectors
from nearfar.search.backends.exact import Exact
from nearfar.search.storage.table import Table

log = logging.getLogger("nearfar.search")


class Behind:
    """A backend that did not carry out what the journal says: it is not asked until it has caught up.

    Args:
        failed: The backend; nobody knows what it carried out.
        table: What it should know.
        measure: "cosine" or "euclidean".
        error: Why it failed.
    """

    def __init__(self, failed: Backend, table: Table, *, measure: str, error: BaseException) -> None:
        self.failed, self.error = failed, error
        self._table, self._measure = table, measure
        self._lock = threading.Lock()
        self._made: tuple[int, Exact] | None = None  # for a version of the table
        log.warning("%s failed (%r); searches are exact until it has caught up", failed.name, error)

    @property
    def name(self) -> str:
        return self.failed.name

    def caught_up(self, folder: Path, facts: Mapping[str, Any]) -> Backend:
        """The backend as it was saved in a folder, with all that has changed since; this one while it fails."""
        try:
            found = self.failed.renew(folder, self._table.since()[0], self._table.base, facts)
            _follow(found, self._table)
        except Exception as error:
            self.error = error
            return self
        return found

    def add(self, ids: Ids, vectors: Vectors) -> None:
        """The table knows."""

    def remove(self, ids: Ids) -> None:
        """The table knows."""

    def search(self, queries: Vectors, k: int, allowed: Ids | None = None) -> tuple[Scores, Ids]:
        return self._exact().search(queries, k, allowed)

    def save(self, folder: Path, ids: Ids, vectors: Vectors) -> dict[str, Any]:
        raise RuntimeError(
            f"{self.name} has not caught up since it failed ({type(self.error).__name__}: {self.error}); nothing is "
            "lost: save again when it is well, or with another backend"
        ) from self.error

    def renew(self, folder: Path, ids: Ids, vectors: Vectors, facts: Mapping[str, Any]) -> Backend:
        return self.failed.renew(folder, ids, vectors, facts)

    def settle(self, ids: Ids, vectors: Vectors) -> None:
        """``caught_up`` does."""

    def close(self) -> None:
        self.failed.close()

    def discard(self) -> None:
        self.failed.discard()

    def _exact(self) -> Exact:
        """Made when it is needed, on the processor: what failed may be the memory of a GPU."""
        with self._lock:
            version = self._table.version
            if self._made is None or self._made[0] != version:
                found = Exact(self._table.base, self._table.since()[0], measure=self._measure)
                _follow(found, self._table)
                self._made = version, found
            return self._made[1]


def let_go(backend: Backend) -> None:
    """Remove what a backend keeps and nobody needs any more; where that fails, it only takes up room."""
    try:
        backend.discard()
        backend.close()
    except Exception as error:
        log.warning("what %s kept could not be removed (%r)", backend.name, error)


def _follow(backend: Backend, table: Table) -> None:
    """Tell a backend that knows how a table began what has come and gone since."""
    _, ids, vectors, gone = table.since()
    if len(ids):
        backend.add(ids, vectors)
    if len(gone):
        backend.remove(gone)
