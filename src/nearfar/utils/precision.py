"""Precision: matrix products in full float32, and unit vectors in float64."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any

import torch
from torch import Tensor


def unit_rows(points: Tensor) -> Tensor:
    """Normalize rows of float64 without overflow or underflow; zero rows stay zero."""
    # Smaller numbers may be flushed to zero.
    points = points / points.abs().amax(dim=1, keepdim=True).clamp_(min=torch.finfo(torch.float64).tiny)
    norms: Tensor = torch.linalg.vector_norm(points, dim=1, keepdim=True)
    return points.div_(norms.masked_fill_(norms == 0, 1.0))


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Compute matrix products in the precision of their inputs, regardless of autocast and TF32 settings."""
    _products.enter()
    try:
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        _products.leave()


class _OneWord:
    """The global setting of older PyTorch versions, with the attribute that newer ones have per library."""

    @property
    def fp32_precision(self) -> str:
        return torch.get_float32_matmul_precision()

    @fp32_precision.setter
    def fp32_precision(self, word: str) -> None:
        torch.set_float32_matmul_precision("highest" if word in ("ieee", "none") else word)


class _Products:
    """The float32 precision of all threads: the first one that enters sets it, the last one that leaves restores it."""

    def __init__(self) -> None:
        self._lock, self._inside = Lock(), 0
        self._before: list[tuple[Any, str]] = []

    def enter(self) -> None:
        with self._lock:
            self._inside += 1
            if self._inside == 1:
                self._before = [(library, library.fp32_precision) for library in _libraries()]
                for library, _ in self._before:
                    library.fp32_precision = "ieee"

    def leave(self) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                for library, precision in self._before:
                    library.fp32_precision = "none"  # inherit torch.backends.fp32_precision
                    if library.fp32_precision != precision:
                        library.fp32_precision = precision


def _libraries() -> list[Any]:
    both = (torch.backends.cuda.matmul, getattr(torch.backends.mkldnn, "matmul", None))
    return [library for library in both if hasattr(library, "fp32_precision")] or [_OneWord()]


_products = _Products()
