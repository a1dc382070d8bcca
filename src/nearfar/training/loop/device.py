"""Which kernels a training runs on, and how much memory they took."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def chosen(*, deterministic: bool) -> Iterator[None]:
    """The kernels of a training: those taken to be quick, or the same ones every time. Afterwards all is as it was.

    >>> with chosen(deterministic=True):
    ...     torch.are_deterministic_algorithms_enabled()
    True
    >>> torch.are_deterministic_algorithms_enabled()
    False
    """
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    with untried():
        if deterministic:
            torch.use_deterministic_algorithms(True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])


@contextmanager
def untried() -> Iterator[None]:
    """The kernels that cuDNN takes to be quick, not tried out.

    Trying them out doubles the seconds that the first batch of a shape takes and makes no step quicker
    (docs/benchmarks/training.md).

    >>> with untried():
    ...     torch.backends.cudnn.benchmark
    False
    """
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


def forget_peak_memory(device: torch.device) -> None:
    """Begin to count anew; a process without a GPU cannot."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory(device: torch.device) -> float:
    """The most memory in use at once, in MiB: of tensors on a GPU, and otherwise of this whole process.

    >>> peak_memory(torch.device("cpu")) > 1
    True
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    try:
        import resource
    except ImportError:  # Windows
        return 0.0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)
