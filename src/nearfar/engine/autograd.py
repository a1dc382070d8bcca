"""The autograd function of the losses: the forward pass computes the gradients, the backward pass scales them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch import Tensor

MOST_RECORDED = 1 << 26  # pairs: larger batches keep a GPU busy without a CUDA graph
RECORDED = {"cuda"}  # devices whose computations may be recorded

Tensors = Sequence[Tensor | None]
Gradients = list[Tensor | None]
Needed = tuple[bool, ...]
Compute = Callable[[Tensors, Tensors, Needed], tuple[Tensor, Gradients]]


def no_compile(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Exclude a function from torch.compile.

    PyTorch's own decorators import the compiler, at once or on the first call. This takes seconds, so this one imports
    it only while a caller is being compiled.
    """
    disabled: Callable[..., Tensor] = getattr(torch, "_disable_dynamo", torch.compiler.disable)(function)

    @wraps(function)
    def call(*args: Any, **settings: Any) -> Tensor:
        return disabled(*args, **settings) if torch.compiler.is_compiling() else function(*args, **settings)

    return call


@dataclass(frozen=True)
class LossComputation:
    """The function that computes a loss with its gradients, and what is needed to record it as a CUDA graph."""

    compute: Compute  # maps inputs, constants and which gradients are needed to the loss and those gradients
    constants: Tensors = ()  # without a gradient: labels, positions, random numbers
    owner: object = None  # keeps the recordings; None: nothing is recorded
    graph_key: Callable[[], Hashable] = lambda: None  # all but tensors that decides the result; None: not recorded
    pairs: int = 0  # number of compared pairs; very large computations are not recorded
    static: tuple[int, ...] = ()  # inputs that keep their memory address from step to step if they are parameters


class StoredGradients:
    """The gradients of one loss value between its forward and backward pass.

    Borrowed ones are buffers of a CUDA graph, which the next replay overwrites.
    """

    def __init__(self, gradients: Gradients, *, borrowed: bool = False) -> None:
        self._gradients: Gradients | None = gradients
        self._borrowed = borrowed

    def detach_from_buffers(self) -> None:
        """Copy the gradients out of borrowed buffers."""
        if self._borrowed and self._gradients is not None:
            self._gradients = [None if gradient is None else gradient.clone() for gradient in self._gradients]
            self._borrowed = False

    def take(self) -> Gradients:
        """Return the gradients for a backward pass, and release them if it is the last."""
        gradients = self._gradients
        if gradients is None:
            raise RuntimeError(
                "backward was called before on this loss and its gradients were freed; "
                "use backward(retain_graph=True) the first time"
            )
        is_retained = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
        if is_retained is not None and not is_retained():
            self._gradients = None
        return gradients

    def scaled(self, factor: Tensor) -> Gradients:
        """Return the gradients times a number; in place if nothing else can use them."""
        gradients = self.take()
        if factor.device.type == "cpu" and not self._borrowed and self._gradients is None and factor.item() == 1.0:
            return gradients  # the usual case; reading the factor is free on a CPU
        present = [gradient for gradient in gradients if gradient is not None]
        if self._borrowed or self._gradients is not None:
            products = iter(torch._foreach_mul(present, factor))
            return [None if gradient is None else next(products) for gradient in gradients]
        torch._foreach_mul_(present, factor)
        return gradients


def run(computation: LossComputation, inputs: Tensors, needed: Needed) -> tuple[Tensor, StoredGradients]:
    """Compute the loss and the needed gradients; on a GPU, replay them from a CUDA graph where possible."""
    if inputs[0] is not None and inputs[0].device.type in RECORDED:
        from nearfar.engine import cuda_graphs  # not needed on a CPU

        replayed = cuda_graphs.replay(computation, inputs, needed)
        if replayed is not None:
            return replayed
    loss, gradients = computation.compute(inputs, computation.constants, needed)
    return loss, StoredGradients(gradients)


class _GradientInForward(torch.autograd.Function):
    """The forward pass computes the gradients, the backward pass only scales them."""

    @staticmethod
    def forward(ctx: Any, computation: LossComputation, *inputs: Tensor | None) -> Tensor:
        loss, ctx.stored = run(computation, inputs, ctx.needs_input_grad[1:])
        ctx.save_for_backward(*inputs)
        return loss

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor) -> tuple[Tensor | None, ...]:
        if not torch.is_grad_enabled():
            return (None, *ctx.stored.scaled(incoming[0]))
        # create_graph=True: the gradient itself may be differentiated
        inputs = ctx.saved_tensors
        products = (
            None if gradient is None else _NoSecondDerivative.apply(gradient, *incoming, *inputs)  # type: ignore[no-untyped-call]
            for gradient in ctx.stored.take()
        )
        return (None, *products)


class _NoSecondDerivative(torch.autograd.Function):
    """gradient × incoming; raises if it is differentiated again."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, incoming: Tensor, *inputs: Tensor | None) -> Tensor:
        return gradient * incoming

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor) -> tuple[None, ...]:
        raise NotImplementedError(
            "this loss has no second derivative: its gradient is computed in the forward pass and the "
            "similarities are not kept"
        )


@no_compile
def differentiable(computation: LossComputation, inputs: Tensors) -> Tensor:
    """Compute a loss, differentiable once by its inputs."""
    if not torch.is_grad_enabled():
        # An autograd function would compute a gradient for every input that requires one, even here.
        return computation.compute(inputs, computation.constants, (False,) * len(inputs))[0]
    value: Tensor = _GradientInForward.apply(computation, *inputs)  # type: ignore[no-untyped-call]
    return value


def by_autograd(loss: Callable[..., Tensor]) -> Compute:
    """Return the ``compute`` function of a loss that has no closed-form gradient.

    Autograd differentiates it within the forward pass: autocast is off there, and all of it can be recorded.
    """

    def compute(inputs: Tensors, constants: Tensors, needed: Needed) -> tuple[Tensor, Gradients]:
        with torch.set_grad_enabled(any(needed)):
            leaves = [
                None if tensor is None else tensor.detach().requires_grad_(is_needed)
                for tensor, is_needed in zip(inputs, needed, strict=True)
            ]
            value = loss(*leaves, *constants)
        differentiated = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
        computed = iter(torch.autograd.grad(value, differentiated, allow_unused=True) if differentiated else ())
        gradients = [next(computed) if is_needed else None for is_needed in needed]
        # The backward pass may scale them in place, which a gradient expanded from one number does not allow.
        return value.detach(), [None if gradient is None else gradient.contiguous() for gradient in gradients]

    return compute
