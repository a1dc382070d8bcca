"""CUDA graphs of a network: launching the kernels of a small network takes longer than running them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from nearfar.engine.cuda_graphs import attempt
from nearfar.networks.embedder import Embedder

CALLS_BEFORE_RECORDING = 2


class GraphedEmbedder:
    """Computes the embeddings of each level like the network, but replays its kernels as a CUDA graph.

    The forward and backward passes of the third batch of a shape are recorded. A replay gives the same numbers, in
    buffers that the next replay overwrites; gradients are *set*, not accumulated. So it is for steps that begin without
    gradients and end before the next batch. What cannot be recorded, such as work on a CPU, is computed as usual.
    """

    def __init__(self, network: Embedder) -> None:
        self.network = network
        self._key: Hashable = None
        self._calls = 0
        self._recording: _Recording | None = None

    def __call__(self, images: Tensor) -> dict[str, Tensor]:
        """Return the embeddings of each level, [b, dim] each."""
        if not images.is_cuda or not torch.is_grad_enabled() or images.requires_grad:
            return self.network.levels_forward(images)
        key = self._state(images)
        if key != self._key:
            self._key, self._calls, self._recording = key, 0, None
        self._calls += 1
        if self._calls == CALLS_BEFORE_RECORDING + 1:
            self._recording = _record(self.network, images)
        if self._recording is None:
            return self.network.levels_forward(images)
        found = _Replay.apply(self._recording.leaf, self._recording, images)  # type: ignore[no-untyped-call]
        return dict(zip(self._recording.levels, found, strict=True))

    def _state(self, images: Tensor) -> Hashable:
        """Return everything that determines which kernels run."""
        return (
            images.shape,
            images.stride(),
            images.dtype,
            torch.cuda.current_stream(images.device),
            torch.is_autocast_enabled("cuda"),
            torch.get_autocast_dtype("cuda"),
            tuple(module.training for module in self.network.modules()),
            tuple((each.requires_grad, each.data_ptr()) for each in self.network.parameters()),
        )


@dataclass
class _Recording:
    """The recorded kernels for one input shape, and the buffers they read and write."""

    levels: tuple[str, ...]
    images: Tensor
    forward: torch.cuda.CUDAGraph
    embeddings: list[Tensor]
    backward: torch.cuda.CUDAGraph
    incoming: list[Tensor]
    parameters: list[nn.Parameter]
    gradients: Sequence[Tensor | None]
    leaf: Tensor  # stands for all parameters, so that autograd calls backward


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, leaf: Tensor, recording: _Recording, images: Tensor) -> tuple[Tensor, ...]:
        ctx.recording = recording
        recording.images.copy_(images)
        recording.forward.replay()
        return tuple(each.detach() for each in recording.embeddings)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, None, None]:
        recording: _Recording = ctx.recording
        for buffer, gradient in zip(recording.incoming, gradients, strict=True):
            if gradient is None:
                buffer.zero_()
            else:
                buffer.copy_(gradient)
        recording.backward.replay()
        for parameter, found in zip(recording.parameters, recording.gradients, strict=True):
            parameter.grad = found
        return None, None, None


def _record(network: Embedder, images: Tensor) -> _Recording | None:
    """Record a network on a copy of a batch; return None, with a warning, if that is not possible."""
    before = [buffer.clone() for buffer in network.buffers()], torch.cuda.get_rng_state(images.device)
    torch.cuda.empty_cache()  # graphs have a memory pool of their own
    current = torch.cuda.current_stream(images.device)
    recording = attempt(f"{network.backbone.key} trains", lambda: _capture(network, images.detach().clone()), current)
    with torch.no_grad():
        for buffer, was in zip(network.buffers(), before[0], strict=True):
            buffer.copy_(was)
    torch.cuda.set_rng_state(before[1], images.device)
    return recording


def _capture(network: Embedder, images: Tensor) -> _Recording | None:
    parameters = [each for each in network.parameters() if each.requires_grad]
    if not parameters:
        return None
    forward, backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    precision, kind = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    # Without a cache of rounded weights: every replay must round them again.
    with torch.autocast("cuda", dtype=kind, enabled=precision, cache_enabled=False):
        found = network.levels_forward(images)  # libraries must initialize outside the capture
        incoming = [torch.zeros_like(each) for each in found.values()]
        torch.autograd.grad(list(found.values()), parameters, incoming, allow_unused=True)
        forward.capture_begin(capture_error_mode="thread_local")
        try:
            found = network.levels_forward(images)
        finally:
            forward.capture_end()
    backward.capture_begin(pool=forward.pool(), capture_error_mode="thread_local")
    try:
        gradients = torch.autograd.grad(list(found.values()), parameters, incoming, allow_unused=True)
        # Fused optimizers need gradients with the memory layout of their parameters.
        placed = [
            gradient
            if gradient is None or gradient.stride() == each.stride()
            else torch.empty_like(each).copy_(gradient)
            for each, gradient in zip(parameters, gradients, strict=True)
        ]
    finally:
        backward.capture_end()
    return _Recording(
        levels=tuple(found),
        images=images,
        forward=forward,
        embeddings=[each.detach() for each in found.values()],
        backward=backward,
        incoming=incoming,
        parameters=parameters,
        gradients=placed,
        leaf=torch.zeros((), device=images.device, requires_grad=True),
    )
