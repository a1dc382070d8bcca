"""Exact search in place of a backend that failed."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from nearfar.search.backends.base import Backend, Ids, Vectors
from nearfar.search.backends.exact import Exact

log = logging.getLogger("nearfar.search")


class ExactFallback(Exact):
    """Exact search until a backend that missed a change works again.

    It computes on the CPU, because the GPU may be what failed.
    """

    def __init__(self, failed: Backend, vectors: Vectors, ids: Ids, *, measure: str, error: BaseException) -> None:
        super().__init__(vectors, ids, measure=measure)
        self.name = failed.name
        self.failed, self.error = failed, error
        kind = type(error).__name__
        log.warning("%s failed (%s: %s); searches are exact until it works again", failed.name, kind, error)

    def save(self, folder: Path, ids: Ids, vectors: Vectors) -> dict[str, Any]:
        """Refuse, because the backend is out of date."""
        raise RuntimeError(
            f"{self.name} has not recovered since it failed ({type(self.error).__name__}: {self.error}); nothing is "
            "lost: compact again when it works, or choose another backend"
        ) from self.error

    def damage(self) -> str:
        """Say that the backend does not work."""
        return f"{self.name} does not work ({type(self.error).__name__}: {self.error})"

    def close(self) -> None:
        """Close the backend that failed."""
        self.failed.close()

    def discard(self) -> None:
        """Remove the data of the backend that failed."""
        self.failed.discard()


def discard(backend: Backend) -> None:
    """Remove the data of a backend and close it; an error is only logged, since it costs nothing but space."""
    try:
        backend.discard()
        backend.close()
    except Exception as error:
        log.warning("data of %s could not be removed (%r)", backend.name, error)
