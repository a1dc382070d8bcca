"""Numbers as exact as they are meant to be."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any

import torch
from torch import Tensor


def unit_rows(points: Tensor) -> Tensor:
    """Rows of float64 with length one; zeros stay zeros, and no length is too great or too small."""
    # Smaller numbers than this one are zero to a processor that was told so.
    points = points / points.abs().amax(dim=1, keepdim=True).clamp_(min=torch.finfo(torch.float64).tiny)
    norms: Tensor = torch.linalg.vector_norm(points, dim=1, keepdim=True)
    return points.div_(norms.masked_fill_(norms == 0, 1.0))


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Matrix products in the precision of their numbers, whatever autocast and TF32 say."""
    _products.enter()
    try:
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        _products.leave()


class _OneWord:
    """The precision of older versions of PyTorch, by the name that newer ones have for each library's."""

    @property
    def fp32_precision(self) -> str:
        return torch.get_float32_matmul_precision()

    @fp32_precision.setter
    def fp32_precision(self, word: str) -> None:
        torch.set_float32_matmul_precision("highest" if word in ("ieee", "none") else word)


class _Products:
    """How exact products of float32 are, in all threads alike: the first one in sets it, the last one restores it."""

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
                    library.fp32_precision = "none"  # whatever torch.backends.fp32_precision says
                    if library.fp32_precision != precision:
                        library.fp32_precision = precision


def _libraries() -> list[Any]:
    both = (torch.backends.cuda.matmul, getattr(torch.backends.mkldnn, "matmul", None))
    return [library for library in both if hasattr(library, "fp32_precision")] or [_OneWord()]


_products = _Products()
