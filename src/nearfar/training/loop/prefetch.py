"""Prefetching on a GPU: the next batch is prepared while the network works on the current one."""

from __future__ import annotations

from collections.abc import Generator
from functools import lru_cache
from typing import Any

import torch

from nearfar.data.loader import Batch, Batches


def prefetch(batches: Batches, device: torch.device) -> Batches:
    """Yield the same batches, each rendered on a separate CUDA stream during the step before it."""
    stream = _stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))  # pixels may still be on their way to the device
    try:
        found = _next(batches, stream)
        while found is not None:
            batch, done = found
            current = torch.cuda.current_stream(device)
            current.wait_event(done)
            for tensor in (batch.images, batch.labels, batch.indices):
                tensor.record_stream(current)  # so that its memory is not reused before the step is done
            found = _next(batches, stream)
            yield batch
    finally:
        batches.close()


@lru_cache
def _stream(device: torch.device) -> Any:
    """One stream for all epochs: cuBLAS keeps a workspace for each stream it was ever used on."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _next(batches: Generator[Batch, None, None], stream: Any) -> tuple[Batch, Any] | None:
    with torch.cuda.stream(stream):
        batch = next(batches, None)
        return None if batch is None else (batch, stream.record_event())
