"""Which kernels a training runs on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def chosen(*, deterministic: bool) -> Iterator[None]:
    """The quickest kernels, or the same ones every time; afterwards all is as it was.

    >>> with chosen(deterministic=True):
    ...     torch.are_deterministic_algorithms_enabled()
    True
    >>> torch.are_deterministic_algorithms_enabled()
    False
    """
    before = torch.backends.cudnn.benchmark, torch.are_deterministic_algorithms_enabled()
    torch.backends.cudnn.benchmark = not deterministic
    if deterministic:
        torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before[0]
        torch.use_deterministic_algorithms(before[1])
