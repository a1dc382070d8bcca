"""Convolutions with a batch norm that does not change: as one convolution, and on a GPU as one kernel with ReLU6.

A frozen batch norm, or any in an evaluation, multiplies each channel by a number and adds another. The first is
multiplied into the weights, the second is the bias.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from functools import wraps
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from nearfar.networks.backbones.base import FixedBatchNorm2d

Maps = Callable[[Any, Tensor], dict[str, Tensor]]
NORMS = (nn.BatchNorm2d, FixedBatchNorm2d)
# Scales and shifts of the batch norms of a backbone during its pass.
_OF_PASS: ContextVar[Mapping[nn.Module, tuple[Tensor, Tensor]]] = ContextVar("_OF_PASS", default=MappingProxyType({}))


class SameConv(nn.Conv2d):
    """A convolution with the padding of TensorFlow: the output side is ⌈side / stride⌉; odd padding is at the end."""

    def __init__(self, in_channels: int, out_channels: int, kernel: int, stride: int = 1, groups: int = 1) -> None:
        super().__init__(in_channels, out_channels, kernel, stride, groups=groups, bias=False)
        if stride == 1:
            self.padding = (kernel // 2, kernel // 2)

    def zeros(self, x: Tensor) -> tuple[int, ...]:
        """Return how many zeros are around the image: left, right, top, bottom."""
        kernel, stride = self.kernel_size[0], self.stride[0]
        down, right = (max((math.ceil(side / stride) - 1) * stride + kernel - side, 0) for side in x.shape[2:])
        return right // 2, right - right // 2, down // 2, down - down // 2

    def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        out: Tensor = super()._conv_forward(F.pad(x, self.zeros(x)) if self.stride[0] > 1 else x, weight, bias)
        return out


def conv_norm(x: Tensor, conv: nn.Module, norm: nn.Module) -> Tensor:
    """Convolve and normalize."""
    if isinstance(conv, nn.Conv2d) and isinstance(norm, nn.BatchNorm2d) and folds(conv, norm):
        return conv_scaled(x, conv, *scale_and_shift(norm))
    normed: Tensor = norm(conv(x))
    return normed


def conv_scaled(x: Tensor, conv: nn.Conv2d, scale: Tensor, shift: Tensor | None = None) -> Tensor:
    """Convolve, multiply each channel by a number and add another."""
    if conv.bias is not None:
        shift = scale * conv.bias if shift is None else torch.addcmul(shift, scale, conv.bias)
    if shift is not None:
        shift = shift.to(conv.weight.dtype)
    weight = (conv.weight * scale.view(-1, 1, 1, 1)).to(conv.weight.dtype)
    out: Tensor = conv._conv_forward(x, weight, shift)
    return out


def relu6(x: Tensor) -> Tensor:
    """Limit values to [0, 6], in place. Unlike ``F.relu6``, it keeps only its result for the backward pass."""
    if not (torch.is_grad_enabled() and x.requires_grad) or _is_recorded() or _is_transformed(x):
        return F.relu6(x, inplace=True)
    out: Tensor = _ReLU6.apply(x)  # type: ignore[no-untyped-call]
    return out


def conv_norm_relu6(x: Tensor, conv: nn.Module, norm: nn.Module) -> Tensor:
    """Convolve, normalize and limit to [0, 6]."""
    if isinstance(conv, nn.Conv2d) and isinstance(norm, nn.BatchNorm2d) and has_kernel(x, conv, norm):
        return depthwise(x, torch.zeros(x.shape[1], device=x.device), conv, norm)
    return relu6(conv_norm(x, conv, norm))


def depthwise(x: Tensor, before: Tensor, conv: nn.Conv2d, norm: nn.BatchNorm2d) -> Tensor:
    """Return ``relu6(norm(conv(relu6(x + before))))`` by one kernel; only if :func:`has_kernel`."""
    scale, shift = scale_and_shift(norm)
    weight = conv.weight * scale.view(-1, 1, 1, 1)
    out: Tensor = _Depthwise.apply(x, weight, before, shift, conv.stride[0], _zeros(conv, x))  # type: ignore[no-untyped-call]
    return out


def has_kernel(x: Tensor, conv: nn.Conv2d, norm: nn.BatchNorm2d) -> bool:
    """Whether :func:`depthwise` can be used: channels-last maps on a GPU with Triton and a fixed batch norm."""
    if conv.groups == 1 or not (x.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"):
        return False
    from nearfar.networks.backbones.triton_depthwise import KERNELS
    from nearfar.utils import kernels

    return (
        x.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and x.is_contiguous(memory_format=torch.channels_last)
        and conv.groups == conv.in_channels == conv.out_channels
        and conv.kernel_size[0] == conv.kernel_size[1]
        and conv.kernel_size[0] in KERNELS
        and conv.stride[0] == conv.stride[1]
        and conv.dilation == (1, 1)
        and conv.bias is None
        and not _is_transformed(x)
        and kernels.usable(x.device)
        and folds(conv, norm)
    )


def folds(conv: nn.Module, norm: nn.Module) -> bool:
    """Whether a convolution and the batch norm after it can be computed as one convolution.

    What the batch norm does must not change during the pass nor be recorded, and there must be nothing else to do when
    the layers are called: no hooks, which also recompute pruned or normalized weights, and no other layers in their
    place, such as adapters.
    """
    return is_plain(conv, nn.Conv2d, SameConv) and is_plain(norm, *NORMS) and not _is_recorded() and _is_fixed(norm)


def is_plain(layer: nn.Module, *kinds: type[nn.Module]) -> bool:
    """Whether calling a layer is nothing but the forward pass of one of some classes, without hooks."""
    hooks = (layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks)
    return type(layer) in kinds and "forward" not in vars(layer) and not any(hooks)


def scale_and_shift(norm: nn.BatchNorm2d) -> tuple[Tensor, Tensor]:
    """Return what a batch norm that is fixed multiplies each channel by and adds to it.

    This is computed in each pass: PyTorch does not tell whether a tensor was changed by way of ``data``.
    """
    known = _OF_PASS.get().get(norm)
    return _scales_and_shifts([norm])[0] if known is None else known


def folded_pass(maps: Maps) -> Maps:
    """Decorate ``maps`` of a backbone: scales and shifts of all its batch norms are computed at once in each pass."""

    @wraps(maps)
    def computed(self: Any, x: Tensor) -> dict[str, Tensor]:
        if _is_recorded():
            return maps(self, x)
        norms = [layer for layer in self.modules() if type(layer) in NORMS and _is_fixed(layer)]
        kinds = {(norm.weight.dtype, norm.weight.device, norm.eps) for norm in norms}
        together = zip(norms, _scales_and_shifts(norms), strict=True) if len(kinds) == 1 else ()
        token = _OF_PASS.set(dict(together))
        try:
            return maps(self, x)
        finally:
            _OF_PASS.reset(token)

    return computed


def _scales_and_shifts(norms: list[nn.BatchNorm2d]) -> list[tuple[Tensor, Tensor]]:
    """What each of some batch norms of one type, device and ε multiplies channels by and adds to them."""
    together = zip(*((norm.running_mean, norm.running_var, norm.weight, norm.bias) for norm in norms), strict=True)
    mean, variance, weight, bias = (torch.cat(tensors) for tensors in together)
    if weight.dtype in (torch.bfloat16, torch.float16):  # a batch norm computes in float32
        mean, variance, weight, bias = mean.float(), variance.float(), weight.float(), bias.float()
    scale = weight / torch.sqrt(variance + norms[0].eps)
    shift = torch.addcmul(bias, mean, scale, value=-1)
    sizes = [norm.num_features for norm in norms]
    return list(zip(torch.split(scale, sizes), torch.split(shift, sizes), strict=True))


def _is_fixed(norm: nn.Module) -> bool:
    """Whether a batch norm does not learn in this pass."""
    tensors = (norm.running_mean, norm.running_var, norm.weight, norm.bias)
    if norm.training or any(type(tensor) not in (Tensor, nn.Parameter) for tensor in tensors):
        return False  # in training, without parameters, or tensors that only stand for others
    grad = torch.is_grad_enabled()
    return not any(tensor.is_inference() or (grad and tensor.requires_grad) for tensor in tensors)  # type: ignore[operator]


def _zeros(conv: nn.Conv2d, x: Tensor) -> tuple[int, ...]:
    """Zeros around the image: left, right, top, bottom."""
    if isinstance(conv, SameConv):
        return conv.zeros(x)
    assert not isinstance(conv.padding, str)
    down, right = conv.padding
    return right, right, down, down


def _is_recorded() -> bool:
    """Whether the pass is compiled, exported or traced, where batch norms shall stay what they are."""
    return torch.compiler.is_compiling() or bool(torch._C._get_tracing_state())


def _is_transformed(x: Tensor) -> bool:
    """Whether a function of ``torch.func`` is applied, which knows PyTorch's operations alone."""
    return type(x) not in (Tensor, nn.Parameter) or bool(torch._C._functorch.is_functorch_wrapped_tensor(x))


class _ReLU6(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        ctx.save_for_backward(x.clamp_(0.0, 6.0))
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return _through_relu6(gradient, *ctx.saved_tensors)


class _Depthwise(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, before: Tensor, after: Tensor, stride: int, padding: tuple[int, ...]
    ) -> Tensor:
        from nearfar.networks.backbones import triton_depthwise

        left, right, top, bottom = padding
        side = weight.shape[-1]
        rows = (x.shape[2] + top + bottom - side) // stride + 1
        columns = (x.shape[3] + left + right - side) // stride + 1
        taps = weight.float().squeeze(1).permute(1, 2, 0).contiguous()
        x, before = x.contiguous(memory_format=torch.channels_last), before.float()
        y = triton_depthwise.forward(x, taps, before, after.float(), stride, top, left, rows, columns)
        ctx.save_for_backward(x, taps, before, y)
        ctx.geometry = stride, top, left
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        from nearfar.networks.backbones import triton_depthwise

        x, taps, before, y = ctx.saved_tensors
        gradient = _through_relu6(gradient.contiguous(memory_format=torch.channels_last), y)
        by_x = by_weight = None
        if ctx.needs_input_grad[0]:
            by_x = triton_depthwise.backward_input(gradient, taps, x, before, *ctx.geometry)
        if ctx.needs_input_grad[1]:
            out = triton_depthwise.backward_weight(gradient, x, before, len(taps), *ctx.geometry)
            by_weight = out.permute(2, 0, 1).unsqueeze(1)
        return by_x, by_weight, None, None, None, None


def _through_relu6(gradient: Tensor, y: Tensor) -> Tensor:
    out: Tensor = torch.ops.aten.hardtanh_backward(gradient, y, 0.0, 6.0)
    return out
