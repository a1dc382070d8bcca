"""GoogLeNet (Inception v1), with the batch norms and state-dict keys of torchvision."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nearfar.networks.backbones.base import Backbone, by_level
from nearfar.networks.backbones.folded import conv_norm, folded_pass
from nearfar.networks.registry import register
from nearfar.utils.preprocessing import MINUS_ONE_TO_ONE

# Channels of a block: input; 1×1; 3×3 reduce, 3×3; "5×5" reduce, "5×5"; after the pooling.
BLOCKS = {
    "3a": (192, 64, 96, 128, 16, 32, 32),
    "3b": (256, 128, 128, 192, 32, 96, 64),
    "4a": (480, 192, 96, 208, 16, 48, 64),
    "4b": (512, 160, 112, 224, 24, 64, 64),
    "4c": (512, 128, 128, 256, 24, 64, 64),
    "4d": (512, 112, 144, 288, 32, 64, 64),
    "4e": (528, 256, 160, 320, 32, 128, 128),
    "5a": (832, 256, 160, 320, 32, 128, 128),
    "5b": (832, 384, 192, 384, 48, 128, 128),
}


class _Conv(nn.Module):
    def __init__(self, in_channels: int, out_channels: int, kernel: int = 1, stride: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, kernel, stride, padding=kernel // 2, bias=False)
        self.bn = nn.BatchNorm2d(out_channels, eps=0.001)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(conv_norm(x, self.conv, self.bn), inplace=True)


class _Inception(nn.Module):
    def __init__(
        self, in_channels: int, one: int, reduce3: int, three: int, reduce5: int, five: int, pool: int
    ) -> None:
        super().__init__()
        self.branch1 = _Conv(in_channels, one)
        self.branch2 = nn.Sequential(_Conv(in_channels, reduce3), _Conv(reduce3, three, 3))
        # The paper has 5 × 5 here; the published weights have 3 × 3.
        self.branch3 = nn.Sequential(_Conv(in_channels, reduce5), _Conv(reduce5, five, 3))
        self.branch4 = nn.Sequential(nn.MaxPool2d(3, stride=1, padding=1), _Conv(in_channels, pool))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.branch1(x), self.branch2(x), self.branch3(x), self.branch4(x)], dim=1)


@register
class GoogLeNet(Backbone):
    """GoogLeNet with batch norms; levels after inception 3b, 4e and 5b.

    There are no auxiliary classifiers. There is no inception 3c: 3b is the last block of its stage.

    Reference:
        Szegedy et al., "Going Deeper with Convolutions", CVPR 2015.
    """

    key = "googlenet"
    # The weights come from TensorFlow. torchvision reads ImageNet's normalization and converts it inside the network
    # (transform_input); here the network declares the normalization it reads.
    normalization = MINUS_ONE_TO_ONE
    channels = by_level(480, 832, 1024)
    ignored_keys = ("fc.", "aux1.", "aux2.")

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = _Conv(3, 64, 7, stride=2)
        self.conv2 = _Conv(64, 64)
        self.conv3 = _Conv(64, 192, 3)
        for name, widths in BLOCKS.items():
            self.add_module(f"inception{name}", _Inception(*widths))
        for layer in self.modules():
            if isinstance(layer, nn.Conv2d):
                nn.init.trunc_normal_(layer.weight, std=0.01, a=-2, b=2)

    @folded_pass
    def maps(self, x: Tensor) -> dict[str, Tensor]:
        x = _halve(self.conv1(x))
        x = _halve(self.conv3(self.conv2(x)))
        low = self._blocks(x, "3a", "3b")
        mid = self._blocks(_halve(low), "4a", "4b", "4c", "4d", "4e")
        high = self._blocks(F.max_pool2d(mid, 2, 2, ceil_mode=True), "5a", "5b")
        return {"low": low, "mid": mid, "high": high}

    def _blocks(self, x: Tensor, *names: str) -> Tensor:
        for name in names:
            x = getattr(self, f"inception{name}")(x)
        return x


def _halve(x: Tensor) -> Tensor:
    return F.max_pool2d(x, 3, 2, ceil_mode=True)
