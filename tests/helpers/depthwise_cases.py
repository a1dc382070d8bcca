"""Depthwise convolutions by Triton kernels, and their errors against float64 in PyTorch. As a script, in Triton's
interpreter:

TRITON_INTERPRET=1 python tests/helpers/depthwise_cases.py
"""

from __future__ import annotations

import json
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from nearfar.networks.backbones import folded
from nearfar.networks.backbones.base import freeze_batchnorms


class Shape(NamedTuple):
    """Images, channels, sides, kernel and stride of a convolution; whether its padding is that of TensorFlow."""

    images: int
    channels: int
    height: int
    width: int
    kernel: int
    stride: int
    same: bool = True


SHAPES = [
    Shape(2, 5, 9, 11, 3, 1),
    Shape(1, 33, 8, 8, 5, 1),
    Shape(2, 4, 8, 9, 3, 2),
    Shape(1, 3, 10, 7, 5, 2),
    Shape(1, 3, 9, 10, 3, 2, same=False),
    Shape(1, 2, 1, 2, 5, 2),
]


def layers(shape):
    """A convolution and a frozen batch norm with statistics of its own."""
    channels, kernel, stride = shape.channels, shape.kernel, shape.stride
    conv = folded.SameConv(channels, channels, kernel, stride, groups=channels)
    if not shape.same:
        conv = nn.Conv2d(channels, channels, kernel, stride, padding=kernel // 2, groups=channels, bias=False)
    norm = nn.BatchNorm2d(channels)
    for tensor in (norm.running_mean, norm.bias.data):
        tensor.normal_()
    for tensor in (norm.running_var, norm.weight.data):
        tensor.uniform_(0.5, 2.0)
    freeze_batchnorms(norm)
    return conv, norm


def errors(shape, dtype, device, seed=0):
    """The relative errors of the result, and of the gradients by input and weights."""
    torch.manual_seed(seed)
    conv, norm = layers(shape)
    x = torch.randn(shape.images, shape.channels, shape.height, shape.width) * 3
    x = x.to(dtype).to(memory_format=torch.channels_last)  # the values that both see
    before = torch.randn(shape.channels)

    def outcome(x, before, kernel):
        x = x.detach().requires_grad_()
        conv.weight.grad = None
        if kernel:
            assert folded.has_kernel(x, conv, norm)
            y = folded.depthwise(x, before, conv, norm)
        else:
            y = F.relu6(norm(conv(F.relu6(x + before.view(-1, 1, 1)))))
        torch.manual_seed(seed)
        y.backward(torch.randn(y.shape, dtype=torch.float64).to(y))
        assert x.grad is not None
        assert conv.weight.grad is not None
        return [found.detach().double().cpu() for found in (y, x.grad, conv.weight.grad)]

    conv, norm = conv.to(device), norm.to(device)
    found = outcome(x.to(device), before.to(device), kernel=True)
    conv, norm = conv.double(), norm.double()
    expected = outcome(x.double().to(device), before.double().to(device), kernel=False)
    return [float((a - b).norm() / b.norm().clamp(min=1.0)) for a, b in zip(found, expected, strict=True)]


def keeps_nan(device):
    """Whether NaN of an input, and of a weight, is in the result."""
    found = []
    for place in ("input", "weight"):
        conv, norm = (layer.to(device) for layer in layers(SHAPES[0]))
        x = torch.randn(2, 5, 9, 11, device=device).to(memory_format=torch.channels_last)
        with torch.no_grad():
            (x[0, 0] if place == "input" else conv.weight[0, 0])[1, 1] = torch.nan
        y = folded.conv_norm_relu6(x, conv, norm)
        found.append(bool(y[0, 0].isnan().any()) and not y[0, 1].isnan().any())
    return found


if __name__ == "__main__":
    worst = [max(errors(shape, torch.float32, "cpu")) for shape in SHAPES]
    print(json.dumps({"errors": worst, "nan": keeps_nan("cpu")}))
