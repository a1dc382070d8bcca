"""Locks among processes, and the number of usable processors."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout


def processors() -> int:
    """Return the number of processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@contextmanager
def exclusive(file: Path, busy: Exception) -> Iterator[None]:
    """Hold a lock file, which may be released in another thread; raise ``busy`` at once if another process has it."""
    try:
        lock = FileLock(file, thread_local=False).acquire(blocking=False)
    except Timeout:
        raise busy from None
    with lock:
        yield
