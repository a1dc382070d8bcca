"""MobileNetV2, with the state-dict keys of torchvision."""

from __future__ import annotations

from torch import Tensor, nn

from nearfar.networks.backbones.base import Backbone, by_level
from nearfar.networks.backbones.folded import conv_norm_relu6, folded_pass, is_plain
from nearfar.networks.registry import register

# Stages: expansion, channels, blocks, stride of the first block.
STAGES = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))
LOW, MID = 7, 14  # the first blocks of stride 16 and 32
WIDE = 2  # layers of such a block up to its widest map


class _Conv(nn.Sequential):
    def __init__(self, in_channels: int, out_channels: int, kernel: int = 1, stride: int = 1, groups: int = 1) -> None:
        super().__init__(
            nn.Conv2d(in_channels, out_channels, kernel, stride, padding=kernel // 2, groups=groups, bias=False),
            nn.BatchNorm2d(out_channels),
            nn.ReLU6(inplace=True),
        )

    def forward(self, x: Tensor) -> Tensor:
        if len(self) == 3 and is_plain(self[2], nn.ReLU6):
            return conv_norm_relu6(x, self[0], self[1])
        for layer in self:  # some were added or replaced
            x = layer(x)
        return x


class _Inverted(nn.Module):
    def __init__(self, in_channels: int, out_channels: int, stride: int, expansion: int) -> None:
        super().__init__()
        width = in_channels * expansion
        self.residual = stride == 1 and in_channels == out_channels
        self.conv = nn.Sequential(
            *([_Conv(in_channels, width)] if expansion > 1 else []),
            _Conv(width, width, 3, stride, groups=width),
            nn.Conv2d(width, out_channels, 1, bias=False),
            nn.BatchNorm2d(out_channels),
        )

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.conv(x)
        return x + y if self.residual else y


@register
class MobileNetV2(Backbone):
    """MobileNetV2; levels inside the first blocks of stride 16 and 32, and after the last convolution.

    Reference:
        Sandler et al., "MobileNetV2: Inverted Residuals and Linear Bottlenecks", CVPR 2018.
    """

    key = "mobilenet_v2"
    channels = by_level(192, 576, 1280)
    ignored_keys = ("classifier.",)

    def __init__(self) -> None:
        super().__init__()
        in_channels = 32
        self.features = nn.Sequential(_Conv(3, in_channels, 3, 2))
        for expansion, out_channels, count, stride in STAGES:
            for index in range(count):
                self.features.append(_Inverted(in_channels, out_channels, stride if index == 0 else 1, expansion))
                in_channels = out_channels
        self.features.append(_Conv(in_channels, 1280))
        for layer in self.modules():
            if isinstance(layer, nn.Conv2d):
                nn.init.kaiming_normal_(layer.weight, mode="fan_out")

    @folded_pass
    def maps(self, x: Tensor) -> dict[str, Tensor]:
        first, second = self.features[LOW], self.features[MID]
        assert isinstance(first, _Inverted)
        assert isinstance(second, _Inverted)
        low: Tensor = first.conv[:WIDE](self.features[:LOW](x))
        mid: Tensor = second.conv[:WIDE](self.features[LOW + 1 : MID](first.conv[WIDE:](low)))
        return {"low": low, "mid": mid, "high": self.features[MID + 1 :](second.conv[WIDE:](mid))}
