"""Requests that come at the same time share one call.

A network takes hardly longer for eight pictures than for one. While a batch is at work the next requests gather, so
nobody waits for company: a lonely request starts at once.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

from nearfar.utils.validation import whole

Item = TypeVar("Item")
Result = TypeVar("Result")


class Busy(RuntimeError):
    """Too many are waiting, or the server is about to stop."""


class Batcher(Generic[Item, Result]):
    """A worker thread that does one kind of work for many at a time.

    Args:
        work: Takes items, at most ``most``, and returns as many results.
        most: The size of a batch.
        waiting: Items that may stand in line; beyond that ``Busy`` is raised.
        alone: Do the items of a batch that failed one by one, so that only the guilty one fails. Not for what must
            not be done twice.
        seen: Told the size of each batch.

    >>> double = Batcher(lambda numbers: [2 * number for number in numbers])
    >>> double.start()
    >>> double.submit(4).result()
    8
    >>> double.stop()
    """

    def __init__(
        self,
        work: Callable[[list[Item]], Sequence[Result]],
        *,
        most: int = 32,
        waiting: int = 256,
        alone: bool = True,
        seen: Callable[[int], None] = lambda size: None,
    ) -> None:
        self._work, self._seen, self._alone = work, seen, alone
        self._most, self._waiting = whole("most", most), whole("waiting", waiting)
        self._line: deque[tuple[Item, Future[Result]]] = deque()
        self._changed = threading.Condition()
        self._open = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        with self._changed:
            self._open = True
        self._thread = threading.Thread(target=self._run, name="batcher", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Take nothing more, finish what was taken, and wait for it."""
        with self._changed:
            self._open = False
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def __len__(self) -> int:
        """How many stand in line."""
        return len(self._line)

    def submit(self, item: Item) -> Future[Result]:
        future: Future[Result] = Future()
        with self._changed:
            if not self._open:
                raise Busy("the server is stopping")
            if len(self._line) >= self._waiting:
                raise Busy(f"{self._waiting} requests are waiting already; come back in a moment")
            self._line.append((item, future))
            self._changed.notify()
        return future

    async def __call__(self, item: Item) -> Result:
        return await asyncio.wrap_future(self.submit(item))

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._line and self._open:
                    self._changed.wait()
                if not self._line:
                    return
                batch = [self._line.popleft() for _ in range(min(self._most, len(self._line)))]
            # Whoever went away while waiting is not worked for.
            self._do([(item, future) for item, future in batch if future.set_running_or_notify_cancel()])

    def _do(self, batch: list[tuple[Item, Future[Any]]]) -> None:
        if not batch:
            return
        self._seen(len(batch))
        try:
            results = self._work([item for item, _ in batch])
        except BaseException as error:
            if self._alone and len(batch) > 1:
                for one in batch:
                    self._do([one])
            else:
                for _, future in batch:
                    future.set_exception(error)
            return
        for (_, future), result in zip(batch, results, strict=True):
            future.set_result(result)
