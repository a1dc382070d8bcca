"""ResNet, with the state-dict keys of torchvision."""

from __future__ import annotations

from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from nearfar.networks.backbones.base import Backbone, by_level
from nearfar.networks.backbones.folded import conv_norm, folded_pass
from nearfar.networks.registry import register


class _Shortcut(nn.Sequential):
    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__(nn.Conv2d(in_channels, out_channels, 1, stride, bias=False), nn.BatchNorm2d(out_channels))

    def forward(self, x: Tensor) -> Tensor:
        conv, norm = self
        return conv_norm(x, conv, norm)


def _shortcut(in_channels: int, out_channels: int, stride: int) -> _Shortcut | None:
    return None if stride == 1 and in_channels == out_channels else _Shortcut(in_channels, out_channels, stride)


class _Basic(nn.Module):
    expansion = 1

    def __init__(self, in_channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, width, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = _shortcut(in_channels, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(conv_norm(x, self.conv1, self.bn1), inplace=True)
        y = conv_norm(y, self.conv2, self.bn2)
        return F.relu(y + (x if self.downsample is None else self.downsample(x)), inplace=True)


class _Bottleneck(nn.Module):
    expansion = 4

    def __init__(self, in_channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        # The stride is on the 3 × 3, as in the published weights, and not on the first 1 × 1 as in the paper.
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, 4 * width, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(4 * width)
        self.downsample = _shortcut(in_channels, 4 * width, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(conv_norm(x, self.conv1, self.bn1), inplace=True)
        y = F.relu(conv_norm(y, self.conv2, self.bn2), inplace=True)
        y = conv_norm(y, self.conv3, self.bn3)
        return F.relu(y + (x if self.downsample is None else self.downsample(x)), inplace=True)


class _ResNet(Backbone):
    ignored_keys = ("fc.",)
    block: ClassVar[type[_Basic] | type[_Bottleneck]]
    depths: ClassVar[tuple[int, int, int, int]]
    layer1: nn.Sequential
    layer2: nn.Sequential
    layer3: nn.Sequential
    layer4: nn.Sequential

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, 2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.maxpool = nn.MaxPool2d(3, 2, padding=1)
        in_channels = 64
        for number, depth in enumerate(self.depths, start=1):
            width = 32 << number
            stage = nn.Sequential()
            for index in range(depth):
                stage.append(self.block(in_channels, width, 2 if index == 0 and number > 1 else 1))
                in_channels = width * self.block.expansion
            setattr(self, f"layer{number}", stage)
        for layer in self.modules():
            if isinstance(layer, nn.Conv2d):
                nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")

    @folded_pass
    def maps(self, x: Tensor) -> dict[str, Tensor]:
        x = self.maxpool(F.relu(conv_norm(x, self.conv1, self.bn1), inplace=True))
        low = self.layer2(self.layer1(x))
        mid = self.layer3(low)
        return {"low": low, "mid": mid, "high": self.layer4(mid)}


@register
class ResNet18(_ResNet):
    """ResNet with 18 layers; levels after the stages layer2, layer3 and layer4.

    Reference:
        He et al., "Deep Residual Learning for Image Recognition", CVPR 2016.
    """

    key = "resnet18"
    channels = by_level(128, 256, 512)
    block, depths = _Basic, (2, 2, 2, 2)


@register
class ResNet50(_ResNet):
    """ResNet with 50 layers, otherwise like :class:`ResNet18`."""

    key = "resnet50"
    channels = by_level(512, 1024, 2048)
    block, depths = _Bottleneck, (3, 4, 6, 3)
