"""State shared by all requests: the index, its queues and its catalog."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearfar.search.index import Index, VectorQuery
from nearfar.search.items import Item
from nearfar.search.results import Neighbor
from nearfar.serve.batching import Batcher
from nearfar.serve.catalog import Catalog
from nearfar.serve.errors import ApiError, disk_full
from nearfar.serve.limits import Limits
from nearfar.serve.prometheus import ServerMetrics
from nearfar.serve.uploads import Pixels, UploadDecoder
from nearfar.utils.atomic import FULL_DISK

Vector = NDArray[np.float32]
NewImage = tuple[str, Pixels, str | None, Mapping[str, Any]]  # name, image, label, metadata


class ServerState:
    """An index and the worker threads that process requests in batches.

    Args:
        index: The served index.
        limits: Limits of requests.
        read_only: Whether adding and removing is refused.
    """

    def __init__(self, index: Index, limits: Limits, *, read_only: bool) -> None:
        self.index, self.limits, self.read_only = index, limits, read_only
        self.metrics = ServerMetrics()
        self.catalog = Catalog(index)
        self.uploads = UploadDecoder(limits, self.metrics)
        info = index.info()
        self.dim = int(info["dim"])
        self.vector_dim = index.in_dim  # of the vectors that the model reads
        self.takes_images = info.get("model") is not None and self.vector_dim is None
        self._write_lock = threading.Lock()
        self.embed: Batcher[Pixels | Vector, Vector] = Batcher(index.embed, **self._settings("embed"))
        self.search: Batcher[VectorQuery, list[Neighbor]] = Batcher(index.search_batch, **self._settings("search"))
        self.add: Batcher[NewImage, int] = Batcher(self._add, retry=False, **self._settings("add"))
        self._batchers: dict[str, Batcher[Any, Any]] = {"embed": self.embed, "search": self.search, "add": self.add}
        self.metrics.index_items.set_function(lambda: len(index))
        for work, batcher in self._batchers.items():
            self.metrics.waiting.labels(work).set_function(batcher.__len__)
        if info.get("model") is not None:  # load it now, so that a missing one is reported before anything is served
            index.embed([np.zeros((64, 64, 3) if self.vector_dim is None else self.vector_dim, dtype=np.uint8)])

    def start(self) -> None:
        """Start the worker threads."""
        for batcher in self._batchers.values():
            batcher.start()

    def stop(self) -> None:
        """Finish queued work, then close the index."""
        self.uploads.close()
        for batcher in self._batchers.values():
            batcher.stop()
        self.index.close()

    def item(self, id: int) -> Item:
        """Return an item, or raise a 404 error."""
        try:
            return self.index.item(id)
        except KeyError:
            raise _no_item(id) from None

    def vector(self, id: int) -> Vector:
        """Return the vector of an item, or raise a 404 error."""
        try:
            return self.index.vector(id)
        except KeyError:
            raise _no_item(id) from None

    def thumbnail(self, id: int) -> bytes:
        """Return the JPEG of an item, empty if it has none, or raise a 404 error."""
        try:
            return self.index.thumbnail(id)
        except KeyError:
            raise _no_item(id) from None

    def remove(self, id: int) -> None:
        """Remove an item, or raise a 404 error."""
        with self._write_lock, _storage_errors():
            try:
                self.index.remove([self.index.item(id).id])
            except KeyError:
                raise _no_item(id) from None
            self.catalog.invalidate()

    def check_label(self, label: str) -> None:
        """Raise a 404 error for a class that the index does not have."""
        if label not in self.catalog.snapshot().by_label:
            raise ApiError(404, f"label is {label!r}; the index has no such class", code="no_label")

    def check_writable(self) -> None:
        """Raise a 403 error if the server is read-only."""
        if self.read_only:
            raise ApiError(403, "this server is read-only", code="read_only")

    def no_model(self) -> ApiError:
        """Return the 409 error for an image sent to an index whose model takes none, or that has no model."""
        why = "has no model" if self.vector_dim is None else "its model reads vectors"
        message = f"this index was built from vectors and {why}; search by item or vector"
        return ApiError(409, message, code="no_model")

    def _add(self, images: list[NewImage]) -> list[int]:
        with self._write_lock, _storage_errors():
            ids = self.index.add_images(images)
            self.catalog.invalidate()
            return ids

    def _settings(self, work: str) -> dict[str, Any]:
        observe = self.metrics.batch_size.labels(work).observe
        return {"max_size": self.limits.batch, "max_waiting": self.limits.waiting, "on_batch": observe}


@contextmanager
def _storage_errors() -> Iterator[None]:
    """Answer with a clear error when the index cannot be written."""
    try:
        yield
    except FileNotFoundError as error:
        raise ApiError(410, f"{error.strerror or error}; nothing was changed", code="index_gone") from error
    except OSError as error:
        raise (disk_full() if error.errno in FULL_DISK else error) from error


def _no_item(id: int) -> ApiError:
    return ApiError(404, f"id is {id}; the index has no such item")
