"""Batches that are made while the network works on the one before."""

from __future__ import annotations

from collections.abc import Generator
from functools import lru_cache
from typing import Any

import torch

from nearfar.data.loader import Batch, Batches


def ahead(batches: Batches, device: torch.device) -> Batches:
    """The same batches; on a GPU the next one is rendered on a stream of its own, beside the step.

    >>> made = (Batch(torch.zeros(1), torch.tensor([n]), torch.tensor([n])) for n in range(3))
    >>> [int(batch.labels) for batch in ahead(made, torch.device("cpu"))]
    [0, 1, 2]
    """
    if device.type != "cuda":
        yield from batches
        return
    stream = _stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))  # pixels may still be on their way to the device
    try:
        found = _made(batches, stream)
        while found is not None:
            batch, done = found
            current = torch.cuda.current_stream(device)
            current.wait_event(done)
            for tensor in (batch.images, batch.labels, batch.indices):
                tensor.record_stream(current)  # its memory is not to be used again before the step is done with it
            found = _made(batches, stream)
            yield batch
    finally:
        batches.close()


@lru_cache
def _stream(device: torch.device) -> Any:
    """One for all epochs: matrix products keep memory for each stream they were ever on."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _made(batches: Generator[Batch, None, None], stream: Any) -> tuple[Batch, Any] | None:
    with torch.cuda.stream(stream):
        batch = next(batches, None)
        return None if batch is None else (batch, stream.record_event())
