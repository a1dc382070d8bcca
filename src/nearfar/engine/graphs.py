"""CUDA graphs: on a GPU a small batch costs more to launch than to compute, so it is launched once.

The third time a loss meets a batch of the same shape with the same settings, its kernels are recorded, and
from then on a step copies the batch in and replays them. Nothing else changes: the results are the same
numbers, two results may be alive at once, and random minings go on drawing.
"""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nearfar.engine.problem import Batch, RowLoss

Gradients = list[Tensor | None]
Compute = Callable[[Batch, Tensor, Tensor | None, Tensor | None, tuple[bool, ...]], tuple[Tensor, Gradients]]

CALLS_BEFORE_CAPTURE = 2
MOST_PAIRS = 1 << 26  # more than this keep a GPU busy without being recorded
MOST_SHAPES = 16  # a loss that meets more shapes than this forgets the ones it knows


class Held:
    """The gradients of one result; those of a replay stay in its buffers until the next one needs them."""

    def __init__(self, gradients: Gradients, *, borrowed: bool) -> None:
        self._gradients: Gradients | None = gradients
        self._borrowed = borrowed

    def keep(self) -> None:
        """Move out of borrowed buffers."""
        if self._borrowed and self._gradients is not None:
            self._gradients = [None if gradient is None else gradient.clone() for gradient in self._gradients]
            self._borrowed = False

    def take(self) -> Gradients:
        """The gradients, for a backward pass; dropped if it is the last."""
        gradients = self._gradients
        if gradients is None:
            raise RuntimeError(
                "this loss was differentiated before and its gradient is gone; "
                "use backward(retain_graph=True) the first time"
            )
        if not _may_run_again():
            self._gradients = None
        return gradients


def _may_run_again() -> bool:
    """Whether the running backward pass keeps its graph (and so may come back for the gradients)."""
    ask = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return ask is None or bool(ask())


@dataclass
class Recording:
    """The kernels of one shape, and the buffers they read and write."""

    graph: torch.cuda.CUDAGraph
    inputs: list[Tensor]
    loss: Tensor
    gradients: Gradients
    last: weakref.ref[Held] | None = None

    def replay(self, inputs: list[Tensor]) -> tuple[Tensor, Held]:
        previous = None if self.last is None else self.last()
        if previous is not None:
            previous.keep()
        for recorded, given in zip(self.inputs, inputs, strict=True):
            recorded.copy_(given)
        self.graph.replay()
        held = Held(self.gradients, borrowed=True)
        self.last = weakref.ref(held)
        return self.loss.clone(), held


_recordings: weakref.WeakKeyDictionary[RowLoss, dict[tuple[Hashable, ...], Recording | int]] = (
    weakref.WeakKeyDictionary()
)


def run(
    compute: Compute,
    batch: Batch,
    embeddings: Tensor,
    gallery: Tensor | None,
    anchor_values: Tensor | None,
    needed: tuple[bool, ...],
) -> tuple[Tensor, Held]:
    """``compute``, or the replay of it."""
    small = batch.labels.shape[0] * batch.gallery_labels.shape[0] <= MOST_PAIRS
    settings = batch.loss.recordable() if embeddings.is_cuda and needed[0] and small else None
    if settings is None or torch.cuda.is_current_stream_capturing():
        loss, gradients = compute(batch, embeddings, gallery, anchor_values, needed)
        return loss, Held(gradients, borrowed=False)
    gallery_labels = None if gallery is None else batch.gallery_labels
    optional = (gallery, anchor_values, batch.positions, gallery_labels, batch.noise)
    inputs = [embeddings, batch.labels, *(part for part in optional if part is not None)]
    present = tuple(part is not None for part in optional)
    stream = torch.cuda.current_stream(embeddings.device)
    key = (stream, needed, present, settings, *((part.shape, part.dtype) for part in inputs))
    known = _recordings.setdefault(batch.loss, {})
    found = known.get(key, 0)
    if isinstance(found, Recording):
        return found.replay(inputs)
    if found == CALLS_BEFORE_CAPTURE:
        # Recordings of one loss on one stream never run at once, so they can work in the same memory.
        alike = (other.graph.pool() for other in known.values() if isinstance(other, Recording))
        pool = next(alike, None) if all(other[0] == stream for other in known) else None
        recording = _record(compute, batch.loss, inputs, present, needed, stream, pool)
        if recording is not None:
            known[key] = recording
            return recording.replay(inputs)
    if found >= 0:
        if len(known) >= MOST_SHAPES and key not in known:
            known.clear()
        known[key] = found + 1 if found < CALLS_BEFORE_CAPTURE else -1
    loss, gradients = compute(batch, embeddings, gallery, anchor_values, needed)
    return loss, Held(gradients, borrowed=False)


def _record(
    compute: Compute,
    loss: RowLoss,
    inputs: list[Tensor],
    present: tuple[bool, ...],
    needed: tuple[bool, ...],
    current: torch.cuda.Stream,
    pool: Any,
) -> Recording | None:
    """Record ``compute`` on copies of the inputs; None (and a warning) where that is not possible."""
    copies = [part.clone() for part in inputs]
    rest = iter(copies[2:])
    gallery, anchor_values, positions, gallery_labels, noise = (next(rest) if there else None for there in present)
    labels = copies[1]
    batch = Batch(loss, labels, labels if gallery_labels is None else gallery_labels, positions, noise)
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream(copies[0].device)  # type: ignore[no-untyped-call]
    stream.wait_stream(current)
    collecting = gc.isenabled()
    gc.disable()  # freeing an older recording would break this one
    try:
        with torch.cuda.stream(stream):
            compute(batch, copies[0], gallery, anchor_values, needed)  # libraries set themselves up outside
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                value, gradients = compute(batch, copies[0], gallery, anchor_values, needed)
            finally:
                graph.capture_end()
    except RuntimeError as error:
        warnings.warn(f"{type(loss).__name__} runs without a CUDA graph: {error}", stacklevel=2)
        return None
    finally:
        if collecting:
            gc.enable()
        current.wait_stream(stream)
    return Recording(graph, copies, value, gradients)
