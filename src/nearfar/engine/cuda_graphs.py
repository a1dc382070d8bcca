"""CUDA graphs of losses: on a GPU a small batch takes longer to launch than to compute, so its kernels are recorded.

The third time a loss gets a batch of the same shape with the same settings, its kernels are recorded as a CUDA graph.
Later steps copy the batch into the buffers of the graph and replay it. The results are the same numbers, two results
may be alive at once, and random minings still draw new numbers in every step.
"""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter

from nearfar.engine.autograd import MOST_RECORDED, Gradients, LossComputation, Needed, StoredGradients, Tensors

CALLS_BEFORE_CAPTURE = 2
MOST_SHAPES = 16  # a loss that gets more shapes than this discards its recordings
T = TypeVar("T")
FAILED = -1  # in the place of a recording: it was not possible


@dataclass
class Recording:
    """The kernels for one shape, and the buffers they read and write."""

    graph: torch.cuda.CUDAGraph
    tensors: list[Tensor | None]  # buffers of the inputs and constants
    static: tuple[int, ...]  # the tensors that the graph reads in place, without a copy
    loss: Tensor  # buffer of the loss
    gradients: Gradients  # buffers of the gradients
    number: int  # how many recordings that share its memory pool were made before it
    last: weakref.ref[StoredGradients] | None = None  # the gradients of the last replay, if they are still alive

    def release_buffers(self) -> None:
        """Copy the gradients of the last replay to memory of their own, if they are still needed."""
        stored = None if self.last is None else self.last()
        if stored is not None:
            stored.detach_from_buffers()

    def replay(self, tensors: Tensors) -> tuple[Tensor, StoredGradients]:
        """Compute the loss and gradients of other tensors of the same shapes."""
        for number, (recorded, given) in enumerate(zip(self.tensors, tensors, strict=True)):
            if recorded is not None and given is not None and number not in self.static:
                recorded.copy_(given)
        self.graph.replay()
        stored = StoredGradients(self.gradients, borrowed=True)
        self.last = weakref.ref(stored)
        return self.loss.clone(), stored


# For each loss: its recordings, or how often it got a batch of that kind.
_recordings: weakref.WeakKeyDictionary[object, dict[tuple[Hashable, ...], Recording | int]] = (
    weakref.WeakKeyDictionary()
)


def replay(computation: LossComputation, inputs: Tensors, needed: Needed) -> tuple[Tensor, StoredGradients] | None:
    """Replay a computation, recording it first if it is due; None if it has to be computed without a graph."""
    first = inputs[0]
    if computation.owner is None or first is None or not needed[0] or computation.pairs > MOST_RECORDED:
        return None
    settings = computation.graph_key()
    if settings is None or torch.cuda.is_current_stream_capturing():
        return None
    tensors = [*inputs, *computation.constants]
    stream = torch.cuda.current_stream(first.device)
    # A parameter is read in place, so a recording is valid for its address only. A copy of it in another precision has
    # a new address in every step: it is copied into a buffer, as the batch is.
    static = {
        number: tensor.data_ptr()
        for number, tensor in enumerate(inputs)
        if number in computation.static and isinstance(tensor, Parameter)
    }
    shapes = tuple(None if tensor is None else (tensor.shape, tensor.dtype) for tensor in tensors)
    key = (stream, needed, settings, tuple(static.values()), shapes)
    known = _recordings.setdefault(computation.owner, {})
    entry = known.get(key, 0)
    recordings = [other for other in known.values() if isinstance(other, Recording)]
    if isinstance(entry, Recording):
        for other in recordings:
            # A later recording may keep its results in memory that this one writes to.
            if other.number >= entry.number:
                other.release_buffers()
        return entry.replay(tensors)
    if entry == CALLS_BEFORE_CAPTURE:
        # Recordings of one loss on one stream never run at the same time, so they can share their memory.
        pool = recordings[0].graph.pool() if recordings and all(other[0] == stream for other in known) else None
        recording = _record(computation, tensors, tuple(static), len(inputs), needed, stream, pool, len(recordings))
        if recording is not None:
            known[key] = recording
            return recording.replay(tensors)
    if entry != FAILED:
        if len(known) >= MOST_SHAPES and key not in known:
            known.clear()
        known[key] = entry + 1 if entry < CALLS_BEFORE_CAPTURE else FAILED
    return None


def attempt(action: str, record: Callable[[], T], current: torch.cuda.Stream) -> T | None:
    """Record on a stream of its own what was computed on the current one; None, with a warning, if that fails."""
    stream = torch.cuda.Stream(current.device)  # type: ignore[no-untyped-call]
    stream.wait_stream(current)
    collecting = gc.isenabled()
    gc.disable()  # freeing an older recording would break this one
    try:
        with torch.cuda.stream(stream):
            return record()
    except RuntimeError as error:
        # The generator is still in the state of a recording, in which it cannot draw.
        generator = torch.cuda.default_generators[current.device.index]
        generator.graphsafe_set_state(generator.clone_state())
        warnings.warn(f"{action} without a CUDA graph: {error}", stacklevel=3)
        return None
    finally:
        if collecting:
            gc.enable()
        current.wait_stream(stream)


def _record(
    computation: LossComputation,
    tensors: Tensors,
    static: tuple[int, ...],
    inputs: int,
    needed: Needed,
    current: torch.cuda.Stream,
    pool: Any,
    number: int,
) -> Recording | None:
    """Record a computation on copies of its tensors; None, with a warning, if that is not possible."""
    copies = [
        None if tensor is None else tensor.detach() if number in static else tensor.detach().clone()
        for number, tensor in enumerate(tensors)
    ]
    arguments = copies[:inputs], copies[inputs:], needed
    graph = torch.cuda.CUDAGraph()

    def record() -> Recording:
        computation.compute(*arguments)  # libraries initialize themselves outside of the recording
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            value, gradients = computation.compute(*arguments)
        finally:
            graph.capture_end()
        return Recording(graph, copies, static, value, gradients, number)

    return attempt(f"{type(computation.owner).__name__} runs", record, current)
