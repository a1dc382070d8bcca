"""Batching of concurrent requests.

A network needs hardly longer for eight images than for one. While one batch is processed, the next requests gather
in a queue. Nothing is delayed to fill a batch: a single request starts at once.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

from nearfar.utils.validation import whole

Item = TypeVar("Item")
Result = TypeVar("Result")


class ServerBusy(RuntimeError):
    """Raised when a queue is full or the server is stopping."""


class Batcher(Generic[Item, Result]):
    """A worker thread that processes queued items in batches."""

    def __init__(
        self,
        work: Callable[[list[Item]], Iterable[Result]],
        *,
        max_size: int = 32,
        max_waiting: int = 256,  # beyond it, only a client whose turn it is may add an item
        retry: bool = True,  # the items of a failed batch one by one; not for work that must not be done twice
        on_batch: Callable[[int], None] = lambda size: None,
    ) -> None:
        self._work, self._on_batch, self._retry = work, on_batch, retry
        self._max_size, self._max_waiting = whole("max_size", max_size), whole("max_waiting", max_waiting)
        self._queue: list[tuple[int, int, Item, Future[Result]]] = []  # a heap, by turn and number
        self._turn, self._turns, self._number = 0, dict[str, int](), itertools.count()  # the last turn of each client
        self._changed = threading.Condition()
        self._open = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the worker thread."""
        with self._changed:
            self._open = True
        self._thread = threading.Thread(target=self._run, name="batcher", daemon=True)
        self._thread.start()

    def stop(self, seconds: float | None = None) -> bool:
        """Accept no more items, finish the queued ones, and return whether the worker thread ended within a time."""
        with self._changed:
            self._open = False
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(seconds)
        return self._thread is None or not self._thread.is_alive()

    def __len__(self) -> int:
        """Return the number of waiting items."""
        return len(self._queue)

    def submit(self, item: Item, client: str = "") -> Future[Result]:
        """Queue an item."""
        future: Future[Result] = Future()
        with self._changed:
            if not self._open:
                raise ServerBusy("the server is stopping")
            turn = max(self._turn, self._turns.get(client, -1) + 1)
            if len(self._queue) >= self._max_waiting and turn > self._turn:
                raise ServerBusy(f"{self._max_waiting} requests are waiting already; try again later")
            self._turns[client] = turn
            heapq.heappush(self._queue, (turn, next(self._number), item, future))
            self._changed.notify()
        return future

    async def __call__(self, item: Item, client: str = "") -> Result:
        """Queue an item of a client and wait for its result."""
        return await asyncio.wrap_future(self.submit(item, client))

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._queue and self._open:
                    self._changed.wait()
                if not self._queue:
                    return
                taken = [heapq.heappop(self._queue) for _ in range(min(self._max_size, len(self._queue)))]
                self._turn = taken[-1][0]
                if not self._queue:
                    self._turns.clear()
            # Items whose client disconnected in the meantime are skipped.
            self._process([(item, future) for *_, item, future in taken if future.set_running_or_notify_cancel()])

    def _process(self, batch: list[tuple[Item, Future[Any]]]) -> None:
        if not batch:
            return
        self._on_batch(len(batch))
        try:
            results = self._work([item for item, _ in batch])
        except BaseException as error:
            if self._retry and len(batch) > 1:
                for each in batch:
                    self._process([each])
            else:
                for _, future in batch:
                    future.set_exception(error)
            return
        for (_, future), result in zip(batch, results, strict=True):
            future.set_result(result)
