"""Numbers as exact as they are meant to be."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


def unit_rows(points: Tensor) -> Tensor:
    """Rows of float64 with length one; zeros stay zeros, and no length is too great or too small."""
    points = points / points.abs().amax(dim=1, keepdim=True).clamp_(min=5e-324)
    norms: Tensor = torch.linalg.vector_norm(points, dim=1, keepdim=True)
    return points.div_(norms.masked_fill_(norms == 0, 1.0))


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Matrix products in the precision of their numbers, whatever autocast and TF32 say."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        torch.set_float32_matmul_precision(before)
