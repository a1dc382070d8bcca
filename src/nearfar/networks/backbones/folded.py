"""Convolutions with a batch norm that does not change: as one convolution, and on a GPU as one kernel with ReLU6.

A frozen batch norm, or any in an evaluation, multiplies each channel by a number and adds another. The first is
multiplied into the weights, the second is the bias.
"""

from __future__ import annotations

import math
import os
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


class SameConv(nn.Conv2d):
    """A convolution with the padding of TensorFlow: the output side is ⌈side / stride⌉; odd padding is at the end.

    Args:
        in_channels: Channels of the input.
        out_channels: Channels of the output.
        kernel: Side of the kernel.
        stride: The stride.
        groups: Groups of channels.
    """

    def __init__(self, in_channels: int, out_channels: int, kernel: int, stride: int = 1, groups: int = 1) -> None:
        super().__init__(in_channels, out_channels, kernel, stride, groups=groups, bias=False)
        if stride == 1:
            self.padding = (kernel // 2, kernel // 2)

    def zeros(self, x: Tensor) -> tuple[int, ...]:
        """Return how many zeros are around the image: left, right, top, bottom.

        Args:
            x: The maps.
        """
        kernel, stride = self.kernel_size[0], self.stride[0]
        down, right = (max((math.ceil(side / stride) - 1) * stride + kernel - side, 0) for side in x.shape[2:])
        return right // 2, right - right // 2, down // 2, down - down // 2

    def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        found: Tensor = super()._conv_forward(F.pad(x, self.zeros(x)) if self.stride[0] > 1 else x, weight, bias)
        return found


def conv_norm(x: Tensor, conv: nn.Conv2d, norm: nn.BatchNorm2d) -> Tensor:
    """Convolve and normalize.

    Args:
        x: The maps.
        conv: The convolution.
        norm: The batch norm after it.
    """
    fixed = scale_and_shift(norm)
    if fixed is None:
        normed: Tensor = norm(conv(x))
        return normed
    return conv_scaled(x, conv, *fixed)


def conv_scaled(x: Tensor, conv: nn.Conv2d, scale: Tensor, shift: Tensor | None = None) -> Tensor:
    """Convolve, multiply each channel by a number and add another.

    Args:
        x: The maps.
        conv: The convolution.
        scale: The factors, [c].
        shift: What is added, [c].
    """
    if conv.bias is not None:
        shift = scale * conv.bias if shift is None else torch.addcmul(shift, scale, conv.bias)
    found: Tensor = conv._conv_forward(x, _scaled(conv, scale), shift)
    return found


def relu6(x: Tensor) -> Tensor:
    """Limit values to [0, 6], in place. Unlike ``F.relu6``, it keeps only its result for the backward pass.

    Args:
        x: The values; not needed any more.
    """
    if torch.compiler.is_compiling() or not (torch.is_grad_enabled() and x.requires_grad):
        return F.relu6(x, inplace=True)
    found: Tensor = _ReLU6.apply(x)  # type: ignore[no-untyped-call]
    return found


def conv_norm_relu6(x: Tensor, conv: nn.Conv2d, norm: nn.BatchNorm2d) -> Tensor:
    """Convolve, normalize and limit to [0, 6].

    Args:
        x: The maps. Those of a depthwise convolution come from a ReLU6.
        conv: A convolution without a bias.
        norm: The batch norm after it.
    """
    if conv.groups > 1 and has_kernel(x, conv, norm):
        return depthwise(x, torch.zeros(x.shape[1], device=x.device), conv, norm)
    return relu6(conv_norm(x, conv, norm))


def depthwise(x: Tensor, before: Tensor, conv: nn.Conv2d, norm: nn.BatchNorm2d) -> Tensor:
    """Return ``relu6(norm(conv(relu6(x + before))))`` by one kernel; only if :func:`has_kernel`.

    Args:
        x: The maps, [n, c, h, w].
        before: What is added to each channel, [c].
        conv: A depthwise convolution without a bias.
        norm: The batch norm after it.
    """
    fixed = scale_and_shift(norm)
    assert fixed is not None
    weight = _scaled(conv, fixed[0])
    found: Tensor = _Depthwise.apply(x, weight, before, fixed[1], conv.stride[0], _zeros(conv, x))  # type: ignore[no-untyped-call]
    return found


def has_kernel(x: Tensor, conv: nn.Conv2d, *norms: nn.BatchNorm2d) -> bool:
    """Whether :func:`depthwise` can be used: channels-last maps on a GPU with Triton, and batch norms that are fixed.

    Args:
        x: The maps.
        conv: The depthwise convolution.
        norms: The batch norms around it.
    """
    if not (x.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"):
        return False
    from nearfar.networks.backbones.triton_depthwise import KERNELS
    from nearfar.utils.kernels import usable

    return (
        x.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and conv.kernel_size[0] in KERNELS
        and x.is_contiguous(memory_format=torch.channels_last)
        and usable(x.device)
        and all(scale_and_shift(norm) is not None for norm in norms)
    )


def scale_and_shift(norm: nn.BatchNorm2d) -> tuple[Tensor, Tensor] | None:
    """Return what a batch norm multiplies each channel by and adds to it; None if that may change or must be recorded.

    Args:
        norm: The batch norm.
    """
    mean, variance, weight, bias = norm.running_mean, norm.running_var, norm.weight, norm.bias
    if norm.training or mean is None or variance is None or torch.compiler.is_compiling() or _is_traced():
        return None
    tensors = (mean, variance, weight, bias)
    if any(type(tensor) not in (Tensor, nn.Parameter) or tensor.is_inference() for tensor in tensors):
        return None  # a norm without parameters, or tensors that only stand for others
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return None
    key = tuple((tensor.data_ptr(), tensor._version, tensor.dtype, tensor.device) for tensor in tensors)
    known = vars(norm).get("_folded")
    if known is None or known[0] != key:
        with torch.inference_mode(False), torch.no_grad():
            scale = weight / torch.sqrt(variance + norm.eps)
            shift = bias - mean * scale
        known = (key, scale, shift)
        vars(norm)["_folded"] = known
    return known[1], known[2]


def _zeros(conv: nn.Conv2d, x: Tensor) -> tuple[int, ...]:
    """Zeros around the image: left, right, top, bottom."""
    if isinstance(conv, SameConv):
        return conv.zeros(x)
    assert not isinstance(conv.padding, str)
    down, right = conv.padding
    return right, right, down, down


def _is_traced() -> bool:
    return bool(torch._C._get_tracing_state())


def _scaled(conv: nn.Conv2d, scale: Tensor) -> Tensor:
    return conv.weight * scale.view(-1, 1, 1, 1)


class _ReLU6(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        ctx.save_for_backward(x.clamp_(0.0, 6.0))
        return x

    @staticmethod
    @once_differentiable
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
            found = triton_depthwise.backward_weight(gradient, x, before, len(taps), *ctx.geometry)
            by_weight = found.permute(2, 0, 1).unsqueeze(1)
        return by_x, by_weight, None, None, None, None


def _through_relu6(gradient: Tensor, y: Tensor) -> Tensor:
    found: Tensor = torch.ops.aten.hardtanh_backward(gradient, y, 0.0, 6.0)
    return found
