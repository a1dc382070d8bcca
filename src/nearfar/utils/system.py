"""The machine: folders of caches and settings, locks, processors, threads, memory kept for reuse, and a Ray cluster."""

from __future__ import annotations

import ctypes
import importlib
import os
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from filelock import FileLock, Timeout

MMAP_THRESHOLD, TRIM_THRESHOLD = -3, -1  # of mallopt
T = TypeVar("T")
U = TypeVar("U")


def expanded(place: str | Path) -> Path:
    """Expand ~ and $VARIABLES in a path."""
    return Path(os.path.expandvars(place)).expanduser()


def cache_folder() -> Path:
    """Return the default folder of decoded images and weights: $NEARFAR_CACHE, or ~/.cache/nearfar."""
    return expanded(os.environ.get("NEARFAR_CACHE") or "~/.cache/nearfar")


def processors() -> int:
    """Return the number of processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


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


def reuse_memory() -> bool:
    """Let this process keep the memory of freed tensors for the next ones.

    By default glibc returns every block of more than 32 MiB to the kernel when it is freed, and the kernel clears its
    pages again for the next tensor: a third of the CPU time of training a convolutional network. nearfar's commands
    and worker processes call this, except the server. A program or a notebook may call it, before it creates tensors.

    The environment variable ``NEARFAR_REUSE_MEMORY=0`` turns it off. Settings of glibc's own ``MALLOC_…_`` variables
    stay as they are.
    """
    given = any(name in os.environ for name in ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"))
    if given or os.environ.get("NEARFAR_REUSE_MEMORY") == "0":
        return False
    try:
        change = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # another C library, or Windows
        return False
    return bool(change(MMAP_THRESHOLD, 1 << 30)) and bool(change(TRIM_THRESHOLD, (1 << 31) - 1))


@contextmanager
def exclusive(file: Path, busy: Exception) -> Iterator[None]:
    """Hold a lock file, which may be released in another thread; raise ``busy`` at once if another process has it."""
    try:
        lock = FileLock(file, thread_local=False).acquire(blocking=False)
    except Timeout:
        raise busy from None
    with lock:
        yield


def require(user: str, module: str, install: str, package: str | None = None) -> Any:
    """Import an optional package; the error without it says who needs it and how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        install = f"'{install}'" if "[" in install else install
        raise ImportError(f"{user} needs {package or module}; install it with: pip install {install}") from error


def connect_ray(address: str | None = None) -> tuple[Any, bool]:
    """Connect to a Ray cluster; also return whether this process was not connected before."""
    ray = require("engine 'ray'", "ray", "nearfar[ray]", "the package ray")
    connects = not ray.is_initialized()
    if connects:
        ray.init(address=address, include_dashboard=None if address else False, log_to_driver=False)
    return ray, connects
