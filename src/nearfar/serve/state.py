"""State shared by all requests: the index, its queues and its snapshot."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearfar.search.index import Index, VectorQuery
from nearfar.search.results import Neighbor
from nearfar.serve.batching import Batcher
from nearfar.serve.catalog import Snapshot
from nearfar.serve.costly import CostlyWork
from nearfar.serve.errors import ApiError
from nearfar.serve.limits import Limits
from nearfar.serve.prometheus import ServerMetrics
from nearfar.serve.uploads import Pixels, UploadDecoder

STOP_SECONDS = 2.0  # that batches have to finish when requests are no longer waited for

Vector = NDArray[np.float32]
WATCH_SECONDS = 0.5  # between two looks for changes of other processes
RETRY_SECONDS = 2.0  # after one that failed

log = logging.getLogger("nearfar.serve")
NewImage = tuple[str, Pixels, str | None, Mapping[str, Any]]  # name, image, label, metadata


class ServerState:
    """An index and the worker threads that process requests in batches."""

    index: Index
    _snapshot: Snapshot

    def __init__(self, index: Index, limits: Limits, *, read_only: bool) -> None:
        self.limits, self.read_only = limits, read_only
        self.metrics = ServerMetrics()
        self.problem = ""  # why the latest state of the folder is not served
        self.is_stuck = False  # work goes on after the server was stopped
        self.uploads = UploadDecoder(limits, self.metrics)
        self.costly = CostlyWork(seconds=limits.costly_seconds, most=limits.waiting)
        self._write_lock, self._snapshot_lock, self._stopped = threading.Lock(), threading.Lock(), threading.Event()
        self._use(index)
        self._watcher = threading.Thread(target=self._watch, name="watch", daemon=True)
        self._batchers: list[Batcher[Any, Any]] = []
        self.embed: Batcher[Pixels | Vector, Vector] = self._batcher("embed", lambda images: self.index.embed(images))
        self.search: Batcher[VectorQuery, list[Neighbor]] = self._batcher(
            "search", lambda queries: self.index.search_batch(queries)
        )
        self.add: Batcher[NewImage, int] = self._batcher("add", self._add, retry=False)
        self.remove: Batcher[int, None] = self._batcher("remove", self._remove, max_size=1)
        self.metrics.index_items.set_function(lambda: len(self.index))

    def start(self) -> None:
        """Start the worker threads."""
        self._watcher.start()
        for batcher in self._batchers:
            batcher.start()

    def stop(self) -> None:
        """Finish queued work, unless that takes too long, and close the index."""
        self._stopped.set()
        self.give_up()
        ended = [batcher.stop(STOP_SECONDS / 5) for batcher in self._batchers]
        self._watcher.join(STOP_SECONDS / 5)
        self.is_stuck = self._watcher.is_alive() or not all(ended)
        self.index.close()

    def give_up(self) -> None:
        """End costly work and decoding; who waits for it is told that the server stops."""
        self.uploads.close()
        self.costly.close()

    async def nearest(self, client: str, query: VectorQuery) -> list[Neighbor]:
        """Search in a batch with others, or in the turn of a client if the search is costly."""
        if query.where is None and query.has_similarities:
            return await self.search(query, client)
        index, vector = self.index, query.vector.tobytes()
        key = index.version, vector, query.k, repr(query.where), query.expand, query.rerank, query.exclude
        return await self.costly(client, key, lambda: index.search_batch([query])[0])

    def snapshot(self) -> Snapshot:
        """Return the current snapshot of the index, a new one after a change."""
        with self._snapshot_lock:
            index, version = self.index, self.index.version
            if (self._snapshot.index, self._snapshot.version) != (index, version):
                self._snapshot = Snapshot(index, index.items, version)
            return self._snapshot

    def check_label(self, label: str) -> None:
        """Raise a 404 error for a class that the index does not have."""
        if label not in self.snapshot().by_label:
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
        with self._write_lock:
            return self.index.add_images(images)

    def _use(self, index: Index) -> None:
        """Serve an index from now on; its model is loaded first, so that a missing one is reported before."""
        info = index.info()
        has_model = info.get("model") is not None
        if has_model:
            index.embed([np.zeros((64, 64, 3) if index.in_dim is None else index.in_dim, dtype=np.uint8)])
        self.dim, self.vector_dim = int(info["dim"]), index.in_dim  # of the vectors that the model reads
        self.takes_images = has_model and index.in_dim is None
        self._snapshot = Snapshot(index, index.items, index.version)
        self.index = index

    def _watch(self) -> None:
        """Follow the changes of other processes; requests are answered from the old state meanwhile."""
        while not self._stopped.wait(RETRY_SECONDS if self.problem else WATCH_SECONDS):
            try:
                index = self.index.refreshed()
                if index is not self.index:
                    self._use(index)
                self.problem = ""
            except Exception as error:
                if not self.problem:
                    log.warning("the index cannot be read again (%s: %s)", type(error).__name__, error)
                self.problem = "the index was removed, replaced or damaged; see the log of the server"

    def _remove(self, ids: list[int]) -> list[None]:
        with self._write_lock:
            self.index.remove(ids)
            return [None]

    def _batcher(self, name: str, work: Any, *, max_size: int | None = None, retry: bool = True) -> Batcher[Any, Any]:
        batcher: Batcher[Any, Any] = Batcher(
            work,
            max_size=max_size or self.limits.batch,
            max_waiting=self.limits.waiting,
            retry=retry,
            on_batch=self.metrics.batch_size.labels(name).observe,
        )
        self.metrics.waiting.labels(name).set_function(batcher.__len__)
        self._batchers.append(batcher)
        return batcher
