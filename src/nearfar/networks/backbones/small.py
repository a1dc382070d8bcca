"""Small networks for digits and for vectors."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn

from nearfar.networks.backbones.base import Backbone
from nearfar.networks.registry import register
from nearfar.utils.preprocessing import GREY, PLAIN
from nearfar.utils.validation import whole


@register
class SmallCNN(Backbone):
    """Two convolutions; the head is a fully connected layer over the flattened last map.

    Args:
        channels: Channels of the images: 1 or 3.
        size: Side of the images; the fully connected layer fits no other size.

    Differences:
        The paper only gives the number of layers. 5 × 5 kernels, 32 and 64 channels, and a ReLU and 2 × 2 max pooling
        after each convolution are the usual choice for MNIST.

    Reference:
        Schall et al., "Deep Metric Learning using Similarities from Nonlinear Rank Approximations", MMSP 2019.
    """

    key = "small_cnn"
    gives_maps = False

    def __init__(self, *, channels: int = 1, size: int = 28) -> None:
        super().__init__()
        if channels not in (1, 3):
            raise ValueError(f"channels is {channels!r}; allowed are 1 and 3")
        self.in_channels, self.input_size = channels, whole("size", size, low=4)
        self.settings = {"channels": self.in_channels, "size": self.input_size}
        self.normalization = GREY if channels == 1 else PLAIN
        self.channels = {"low": 32, "mid": 64, "high": 64 * (size // 4) ** 2}
        self.conv1 = nn.Conv2d(channels, 32, 5, padding=2)
        self.conv2 = nn.Conv2d(32, 64, 5, padding=2)
        self.pool = nn.MaxPool2d(2)
        _initialize(self)

    def maps(self, x: Tensor) -> dict[str, Tensor]:
        if x.shape[2:] != (self.input_size, self.input_size):
            raise ValueError(f"input is {x.shape[2]} × {x.shape[3]}; {self.key} expects size={self.input_size}")
        low = self.pool(self.conv1(x).relu())
        mid = self.pool(self.conv2(low).relu())
        return {"low": low, "mid": mid, "high": mid.flatten(1)}


class _Vectors(Backbone):
    normalization = None
    input_size = None
    gives_maps = False


@register
class MLP(_Vectors):
    """Fully connected layers for vectors, with a ReLU after each.

    Args:
        in_dim: Dimensions of the vectors.
        hidden: Widths of the layers.
    """

    key = "mlp"

    def __init__(self, *, in_dim: int, hidden: Sequence[int] = (512, 512)) -> None:
        super().__init__()
        self.in_channels = whole("in_dim", in_dim)
        if not hidden:
            raise ValueError("hidden is empty; at least one layer is needed, or the network 'linear'")
        widths = [self.in_channels, *(whole("hidden", width) for width in hidden)]
        self.settings = {"in_dim": self.in_channels, "hidden": widths[1:]}
        self.channels = {"high": widths[-1]}
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))
        _initialize(self)

    def maps(self, x: Tensor) -> dict[str, Tensor]:
        for layer in self.layers:
            x = layer(x).relu()
        return {"high": x}


@register
class Linear(_Vectors):
    """The identity, for vectors: the head is the whole network.

    With a linear head L and ``normalize=False``, Euclidean distances of embeddings are the Mahalanobis distances of
    the metric LᵀL (the bias cancels), so any loss learns a Mahalanobis metric.

    Args:
        in_dim: Dimensions of the vectors.
    """

    key = "linear"

    def __init__(self, *, in_dim: int) -> None:
        super().__init__()
        self.in_channels = whole("in_dim", in_dim)
        self.settings = {"in_dim": self.in_channels}
        self.channels = {"high": self.in_channels}

    def maps(self, x: Tensor) -> dict[str, Tensor]:
        return {"high": x}


def _initialize(backbone: Backbone) -> None:
    for layer in backbone.modules():
        if isinstance(layer, (nn.Conv2d, nn.Linear)):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            assert layer.bias is not None
            nn.init.zeros_(layer.bias)
