"""CUDA graphs: on a GPU a small batch costs more to launch than to compute, so it is launched once.

The third time a loss meets a batch of the same shape with the same settings, its kernels are recorded, and
from then on a step copies the batch in and replays them. Nothing else changes: the results are the same
numbers, two results may be alive at once, and random minings go on drawing.
"""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

Tensors = Sequence[Tensor | None]
Gradients = list[Tensor | None]
Needed = tuple[bool, ...]
Compute = Callable[[Tensors, Tensors, Needed], tuple[Tensor, Gradients]]

CALLS_BEFORE_CAPTURE = 2
MOST_PAIRS = 1 << 26  # more than this keep a GPU busy without being recorded
MOST_SHAPES = 16  # a loss that meets more shapes than this forgets the ones it knows


@dataclass(frozen=True)
class Step:
    """What a loss computes: (inputs, constants, which gradients are needed) → the loss and those gradients."""

    compute: Compute
    constants: Tensors = ()  # tensors that are not differentiated: labels, positions, noise
    owner: object = None  # keeps the recordings of the step; None: it is never recorded
    settings: Callable[[], Hashable] = lambda: None  # all that decides what is computed; None: it may not be recorded
    pairs: int = 0  # how many similarities there are
    lasting: tuple[int, ...] = ()  # inputs that stay where they are from step to step if they are parameters


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

    def scaled(self, factor: Tensor) -> Gradients:
        """The gradients times a number; in place where nobody else will see them."""
        gradients = self.take()
        if factor.device.type == "cpu" and not self._borrowed and self._gradients is None and factor.item() == 1.0:
            return gradients  # the usual case, and looking costs nothing there
        there = [gradient for gradient in gradients if gradient is not None]
        if self._borrowed or self._gradients is not None:
            products = iter(torch._foreach_mul(there, factor))
            return [None if gradient is None else next(products) for gradient in gradients]
        torch._foreach_mul_(there, factor)
        return gradients


def _may_run_again() -> bool:
    """Whether the running backward pass keeps its graph (and so may come back for the gradients)."""
    ask = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return ask is None or bool(ask())


@dataclass
class Recording:
    """The kernels of one shape, and the buffers they read and write."""

    graph: torch.cuda.CUDAGraph
    tensors: list[Tensor | None]
    lasting: tuple[int, ...]
    loss: Tensor
    gradients: Gradients
    number: int  # how many of the same memory were recorded before
    last: weakref.ref[Held] | None = None

    def keep(self) -> None:
        """Move the gradients of the last replay away, if anybody still needs them."""
        held = None if self.last is None else self.last()
        if held is not None:
            held.keep()

    def replay(self, tensors: Tensors) -> tuple[Tensor, Held]:
        for number, (recorded, given) in enumerate(zip(self.tensors, tensors, strict=True)):
            if recorded is not None and given is not None and number not in self.lasting:
                recorded.copy_(given)
        self.graph.replay()
        held = Held(self.gradients, borrowed=True)
        self.last = weakref.ref(held)
        return self.loss.clone(), held


_recordings: weakref.WeakKeyDictionary[object, dict[tuple[Hashable, ...], Recording | int]] = (
    weakref.WeakKeyDictionary()
)


def run(step: Step, inputs: Tensors, needed: Needed) -> tuple[Tensor, Held]:
    """A step, or the replay of it."""
    first = inputs[0]
    settings = None
    if step.owner is not None and first is not None and _gains(first) and needed[0] and step.pairs <= MOST_PAIRS:
        settings = step.settings()
    if step.owner is None or first is None or settings is None or torch.cuda.is_current_stream_capturing():
        return _compute(step, inputs, needed)
    tensors = [*inputs, *step.constants]
    stream = torch.cuda.current_stream(first.device)
    # A parameter is read where it stands, so a recording is for that place alone. A copy of it in another precision
    # stands somewhere else in every step: it is copied in, as the batch is.
    lasting = {
        number: tensor.data_ptr()
        for number, tensor in enumerate(inputs)
        if number in step.lasting and isinstance(tensor, Parameter)
    }
    shapes = tuple(None if tensor is None else (tensor.shape, tensor.dtype) for tensor in tensors)
    key = (stream, needed, settings, tuple(lasting.values()), shapes)
    known = _recordings.setdefault(step.owner, {})
    found = known.get(key, 0)
    recordings = [other for other in known.values() if isinstance(other, Recording)]
    if isinstance(found, Recording):
        for other in recordings:
            # What was recorded later may have its results where this one works.
            if other.number >= found.number:
                other.keep()
        return found.replay(tensors)
    if found == CALLS_BEFORE_CAPTURE:
        # Recordings of one loss on one stream never run at once, so they can work in the same memory.
        pool = recordings[0].graph.pool() if recordings and all(other[0] == stream for other in known) else None
        recording = _record(step, tensors, tuple(lasting), len(inputs), needed, stream, pool, len(recordings))
        if recording is not None:
            known[key] = recording
            return recording.replay(tensors)
    if found >= 0:
        if len(known) >= MOST_SHAPES and key not in known:
            known.clear()
        known[key] = found + 1 if found < CALLS_BEFORE_CAPTURE else -1
    return _compute(step, inputs, needed)


def _gains(tensor: Tensor) -> bool:
    """Whether a step of such a tensor is worth recording."""
    return tensor.is_cuda


def _compute(step: Step, inputs: Tensors, needed: Needed) -> tuple[Tensor, Held]:
    loss, gradients = step.compute(inputs, step.constants, needed)
    return loss, Held(gradients, borrowed=False)


def _record(
    step: Step,
    tensors: Tensors,
    lasting: tuple[int, ...],
    inputs: int,
    needed: Needed,
    current: torch.cuda.Stream,
    pool: Any,
    number: int,
) -> Recording | None:
    """Record a step on copies of its tensors; None (and a warning) where that is not possible."""
    copies = [
        None if tensor is None else tensor.detach() if number in lasting else tensor.detach().clone()
        for number, tensor in enumerate(tensors)
    ]
    arguments = copies[:inputs], copies[inputs:], needed
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream(current.device)  # type: ignore[no-untyped-call]
    stream.wait_stream(current)
    collecting = gc.isenabled()
    gc.disable()  # freeing an older recording would break this one
    try:
        with torch.cuda.stream(stream):
            step.compute(*arguments)  # libraries set themselves up outside
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                value, gradients = step.compute(*arguments)
            finally:
                graph.capture_end()
    except RuntimeError as error:
        warnings.warn(f"{type(step.owner).__name__} runs without a CUDA graph: {error}", stacklevel=2)
        return None
    finally:
        if collecting:
            gc.enable()
        current.wait_stream(stream)
    return Recording(graph, copies, lasting, value, gradients, number)
