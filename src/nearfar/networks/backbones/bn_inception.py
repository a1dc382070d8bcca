"""BN-Inception (Inception v2), with the state-dict keys of the PyTorch port of the Caffe weights."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nearfar.networks.backbones.base import Backbone, by_level
from nearfar.networks.backbones.folded import conv_norm, folded_pass
from nearfar.networks.registry import register
from nearfar.utils.preprocessing import CAFFE

# Channels of a block: 1×1; 3×3 reduce, 3×3; double 3×3 reduce, double 3×3; after the pooling.
# Blocks without a 1×1 halve the map, and their pooling has no convolution.
BLOCKS = {
    "3a": (64, 64, 64, 64, 96, 32),
    "3b": (64, 64, 96, 64, 96, 64),
    "3c": (0, 128, 160, 64, 96, 0),
    "4a": (224, 64, 96, 96, 128, 128),
    "4b": (192, 96, 128, 96, 128, 128),
    "4c": (160, 128, 160, 128, 160, 128),
    "4d": (96, 128, 192, 160, 192, 128),
    "4e": (0, 128, 192, 192, 256, 0),
    "5a": (352, 192, 320, 160, 224, 128),
    "5b": (352, 192, 320, 192, 224, 128),
}
LEVEL_AFTER = {"3c": "low", "4e": "mid", "5b": "high"}


@register
class BNInception(Backbone):
    """BN-Inception; levels after inception 3c, 4e and 5b, as in the ranked list loss.

    Its weights come from Caffe: it reads BGR from 0 to 255 minus a mean.

    Differences:
        If a block that halves the map gets an odd side, the published network fails, as its branches have different
        sizes. Here the pooling then has the padding of the convolutions; at 224 and 227 no side is odd.

    Reference:
        Ioffe and Szegedy, "Batch Normalization: Accelerating Deep Network Training by Reducing Internal Covariate
        Shift", ICML 2015.
    """

    key = "bn_inception"
    normalization = CAFFE
    channels = by_level(576, 1056, 1024)
    ignored_keys = ("last_linear.", "fc.")

    def __init__(self) -> None:
        super().__init__()
        self._add("conv1_7x7_s2", 3, 64, 7, stride=2)
        self._add("conv2_3x3_reduce", 64, 64)
        self._add("conv2_3x3", 64, 192, 3)
        in_channels = 192
        for name, (one, reduce3, three, reduce5, double, pool) in BLOCKS.items():
            block, stride = f"inception_{name}", 1 if one else 2
            if one:
                self._add(f"{block}_1x1", in_channels, one)
            self._add(f"{block}_3x3_reduce", in_channels, reduce3)
            self._add(f"{block}_3x3", reduce3, three, 3, stride)
            self._add(f"{block}_double_3x3_reduce", in_channels, reduce5)
            self._add(f"{block}_double_3x3_1", reduce5, double, 3)
            self._add(f"{block}_double_3x3_2", double, double, 3, stride)
            if pool:
                self._add(f"{block}_pool_proj", in_channels, pool)
            in_channels = one + three + double + (pool or in_channels)

    def _add(self, name: str, in_channels: int, out_channels: int, kernel: int = 1, stride: int = 1) -> None:
        layer = nn.Conv2d(in_channels, out_channels, kernel, stride, padding=kernel // 2)
        nn.init.xavier_uniform_(layer.weight)
        assert layer.bias is not None
        nn.init.zeros_(layer.bias)  # the batch norm cancels it, but published weights contain it
        self.add_module(name, layer)
        self.add_module(f"{name}_bn", nn.BatchNorm2d(out_channels))

    @folded_pass
    def maps(self, x: Tensor) -> dict[str, Tensor]:
        x = F.max_pool2d(self._conv(x, "conv1_7x7_s2"), 3, 2, ceil_mode=True)
        x = F.max_pool2d(self._conv(x, "conv2_3x3_reduce", "conv2_3x3"), 3, 2, ceil_mode=True)
        maps = {}
        for name in BLOCKS:
            x = self._block(x, name)
            if name in LEVEL_AFTER:
                maps[LEVEL_AFTER[name]] = x
        return maps

    def _block(self, x: Tensor, name: str) -> Tensor:
        block = f"inception_{name}"
        three = self._conv(x, f"{block}_3x3_reduce", f"{block}_3x3")
        double = self._conv(x, f"{block}_double_3x3_reduce", f"{block}_double_3x3_1", f"{block}_double_3x3_2")
        if not BLOCKS[name][0]:
            odd = (int(x.shape[2]) % 2, int(x.shape[3]) % 2)
            return torch.cat([three, double, F.max_pool2d(x, 3, 2, padding=odd, ceil_mode=True)], dim=1)
        # The last block takes the maximum, all others the average including the padding.
        pooled = F.max_pool2d(x, 3, 1, padding=1) if name == "5b" else F.avg_pool2d(x, 3, 1, padding=1)
        one = self._conv(x, f"{block}_1x1")
        return torch.cat([one, three, double, self._conv(pooled, f"{block}_pool_proj")], dim=1)

    def _conv(self, x: Tensor, *names: str) -> Tensor:
        for name in names:
            x = F.relu(conv_norm(x, getattr(self, name), getattr(self, f"{name}_bn")), inplace=True)
        return x
