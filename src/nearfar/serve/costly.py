"""Costly work in threads of its own, so that nothing else waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from nearfar.serve.batching import ServerBusy
from nearfar.utils.deadline import Deadline, Overdue

STOPPING = "the server is stopping"

Result = TypeVar("Result")


class CostlyWork:
    """Threads that do one piece of work of each client at a time.

    Work is not done again whose key is that of work which waits in the same turn, or is being done for anybody.
    Beyond ``most`` pieces, only the first of a client is accepted.
    """

    def __init__(self, *, seconds: float, threads: int = 2, most: int = 256) -> None:
        self._seconds, self._most = seconds, most
        self._threads, self._open = ThreadPoolExecutor(threads, thread_name_prefix="costly"), True
        self._tasks: dict[tuple[str, Hashable], tuple[asyncio.Task[Any], Deadline]] = {}  # by client and key
        self._last: dict[str, asyncio.Task[Any]] = {}  # of each client
        self._begun: dict[Hashable, asyncio.Future[Any]] = {}  # what the threads have or will take next

    def __contains__(self, client: str) -> bool:
        """Return whether work of a client waits or is being done."""
        return client in self._last

    async def __call__(self, client: str, key: Hashable, work: Callable[[], Result]) -> Result:
        """Do work in its turn and return the result."""
        if key not in self._begun and (client, key) not in self._tasks:
            if len(self._tasks) >= self._most and client in self._last:
                raise ServerBusy("too much is waiting already; try again later")
            deadline = Deadline(self._seconds)
            task = asyncio.create_task(self._after(self._last.get(client), key, partial(deadline.run, work)))
            self._tasks[client, key], self._last[client] = (task, deadline), task
            task.add_done_callback(lambda _: self._forget(client, key, task))
        shared = self._begun[key] if key in self._begun else self._tasks[client, key][0]
        try:
            result: Result = await asyncio.wait_for(asyncio.shield(shared), self._seconds)
            return result
        except (TimeoutError, Overdue):
            late = f"this took more than {self._seconds:g} seconds; try again later"
            raise ServerBusy(late if self._open else STOPPING) from None

    def close(self) -> None:
        """End all work, that which is being done at its next check of the deadline."""
        self._open = False
        for _, deadline in self._tasks.values():
            deadline.end = 0.0
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _after(self, previous: asyncio.Task[Any] | None, key: Hashable, work: Callable[[], Result]) -> Result:
        if previous is not None:
            await asyncio.wait([previous])
        if not self._open:
            raise ServerBusy(STOPPING)
        if key not in self._begun:
            self._begun[key] = asyncio.get_running_loop().run_in_executor(self._threads, work)
            self._begun[key].add_done_callback(lambda _: self._begun.pop(key))
        result: Result = await asyncio.shield(self._begun[key])
        return result

    def _forget(self, client: str, key: Hashable, task: asyncio.Task[Any]) -> None:
        del self._tasks[client, key]
        if self._last[client] is task:
            del self._last[client]
        if not task.cancelled():
            task.exception()  # is known to those who waited
