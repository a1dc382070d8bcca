"""The autograd function of every loss whose gradient is found together with its value."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from nearfar.engine import cuda_graphs

# Left as it is by torch.compile. The compiler is half of PyTorch's own import time; the public decorator brings it at
# once, this one (which PyTorch's optimisers use) when it is needed.
uncompiled: Callable[[Callable[..., Tensor]], Callable[..., Tensor]] = getattr(
    torch, "_disable_dynamo", torch.compiler.disable
)


class _GradientInForward(torch.autograd.Function):
    """The forward pass computes the gradients, the backward pass only scales them."""

    @staticmethod
    def forward(ctx: Any, step: cuda_graphs.Step, *inputs: Tensor | None) -> Tensor:
        loss, ctx.held = cuda_graphs.run(step, inputs, ctx.needs_input_grad[1:])
        ctx.save_for_backward(*inputs)
        return loss

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor) -> tuple[Tensor | None, ...]:
        if not torch.is_grad_enabled():
            return (None, *ctx.held.scaled(incoming[0]))
        # create_graph=True: the gradient itself may be differentiated
        inputs = ctx.saved_tensors
        once = (None if g is None else _Once.apply(g, *incoming, *inputs) for g in ctx.held.take())  # type: ignore[no-untyped-call]
        return (None, *once)


class _Once(torch.autograd.Function):
    """gradient × incoming, refusing to be differentiated again."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, incoming: Tensor, *inputs: Tensor | None) -> Tensor:
        return gradient * incoming

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor) -> tuple[None, ...]:
        raise NotImplementedError(
            "this loss has no second derivative: its gradient is computed in the forward pass and the "
            "similarities are not kept"
        )


@uncompiled
def differentiable(step: cuda_graphs.Step, inputs: Sequence[Tensor | None]) -> Tensor:
    """The value of a step, differentiable once by its inputs."""
    if not torch.is_grad_enabled():
        # An autograd function would be told that gradients are needed wherever an input asks for them.
        return step.compute(inputs, step.constants, (False,) * len(inputs))[0]
    value: Tensor = _GradientInForward.apply(step, *inputs)  # type: ignore[no-untyped-call]
    return value


def by_autograd(loss: Callable[..., Tensor]) -> cuda_graphs.Compute:
    """The step of a loss of (*inputs, *constants) that has no closed form.

    Autograd differentiates it within the forward pass: there autocast is off, and the whole can be recorded.
    """

    def compute(
        inputs: cuda_graphs.Tensors, constants: cuda_graphs.Tensors, needed: cuda_graphs.Needed
    ) -> tuple[Tensor, cuda_graphs.Gradients]:
        with torch.set_grad_enabled(any(needed)):
            leaves = [
                None if tensor is None else tensor.detach().requires_grad_(wanted)
                for tensor, wanted in zip(inputs, needed, strict=True)
            ]
            value = loss(*leaves, *constants)
        wanted = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
        found = iter(torch.autograd.grad(value, wanted, allow_unused=True) if wanted else ())
        return value.detach(), [next(found) if asked else None for asked in needed]

    return compute
