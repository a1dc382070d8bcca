"""Work that threads do ahead of its use."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
U = TypeVar("U")


def prefetch(
    function: Callable[[T], U], work: Iterable[T], *, workers: int = 2, ahead: int = 128, name: str = "prefetch"
) -> Generator[U, None, None]:
    """Apply a function in threads, to at most so many items ahead, and yield the results in order.

    The threads end with the generator, however it ends.
    """
    pool = ThreadPoolExecutor(workers, thread_name_prefix=name)
    waiting: deque[Future[U]] = deque()
    try:
        for item in work:
            waiting.append(pool.submit(function, item))
            if len(waiting) > ahead:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
