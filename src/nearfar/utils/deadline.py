"""A time limit for work in a thread, which the work itself checks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from typing import TypeVar

EVERY = 1024  # values between two looks at the clock

Value = TypeVar("Value")


class Overdue(BaseException):
    """Raised in work that nobody waits for any more. As a cancellation, it passes every ``except Exception``."""


class Deadline:
    """The end of a time limit.

    Args:
        seconds: The time from now.

    Example:
        >>> Deadline(5.0).run(lambda: sum(checked(range(4))))
        6
    """

    def __init__(self, seconds: float) -> None:
        self.end = time.monotonic() + seconds

    def run(self, work: Callable[[], Value]) -> Value:
        """Do work whose checks raise ``Overdue`` from the deadline on."""
        outer = _current.set(self)
        try:
            check()
            return work()
        finally:
            _current.reset(outer)


_current: ContextVar[Deadline | None] = ContextVar("deadline", default=None)


def check() -> None:
    """Raise ``Overdue`` in work whose deadline has passed."""
    deadline = _current.get()
    if deadline is not None and time.monotonic() >= deadline.end:
        raise Overdue


def checked(values: Iterable[Value]) -> Iterator[Value]:
    """Yield values, and check the deadline from time to time."""
    for count, value in enumerate(values):
        if count % EVERY == 0:
            check()
        yield value
