"""Stop requests: Ctrl-C and SIGTERM wait until the current step is done and a checkpoint is saved."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stopped(SystemExit):
    """Raised after a run was stopped by a signal and saved; the process exits with 128 + the signal.

    Args:
        number: The signal.
        message: What to tell the user.

    Example:
        >>> Stopped(signal.SIGTERM, "saved").code
        143
    """

    def __init__(self, number: int, message: str) -> None:
        super().__init__(128 + number)
        self.signal, self.message = number, message

    def __str__(self) -> str:
        return self.message


class StopRequest:
    """A signal handler that records the first signal; it is true once a signal has arrived."""

    def __init__(self) -> None:
        self.number: int | None = None

    def __bool__(self) -> bool:
        return self.number is not None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Record a signal; a second one raises ``KeyboardInterrupt`` at once."""
        if self.number is not None:
            raise KeyboardInterrupt
        self.number = number


@contextmanager
def catch_signals() -> Iterator[StopRequest]:
    """Record SIGINT and SIGTERM instead of stopping at once. In threads other than the main one, nothing is recorded.

    Yields:
        The request, which is true once a signal has arrived.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    before = {number: signal.signal(number, request) for number in SIGNALS}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
