"""Being asked to stop: Ctrl-C and SIGTERM wait for the step under way and what has to be saved."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

ASKING = (signal.SIGINT, signal.SIGTERM)


class Stopped(SystemExit):
    """A run was asked to stop and has saved itself; a process that lets it pass exits with 128 + the signal.

    >>> Stopped(signal.SIGTERM, "saved").code
    143
    """

    def __init__(self, number: int, message: str) -> None:
        super().__init__(128 + number)
        self.signal, self.message = number, message

    def __str__(self) -> str:
        return self.message


class Asked:
    """Whether, and by which signal, this process was asked to stop."""

    def __init__(self) -> None:
        self.number: int | None = None

    def __bool__(self) -> bool:
        return self.number is not None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Called by the signal; whoever asks twice does not want to wait."""
        if self.number is not None:
            raise KeyboardInterrupt
        self.number = number


@contextmanager
def listening() -> Iterator[Asked]:
    """Take note of signals instead of ending at once. Other threads than the main one hear none."""
    asked = Asked()
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return
    before = {number: signal.signal(number, asked) for number in ASKING}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
