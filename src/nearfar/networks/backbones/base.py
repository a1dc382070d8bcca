"""Base class of backbones, and batch norms whose statistics and affine parameters are frozen."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import batch_norm
from torch.nn.modules.batchnorm import _BatchNorm

from nearfar.utils.preprocessing import IMAGENET, Normalization
from nearfar.utils.tensors import check_input

LEVELS = ("low", "mid", "high")


def by_level(low: int, mid: int, high: int) -> Mapping[str, int]:
    """Return the numbers of channels of the three levels."""
    return MappingProxyType({"low": low, "mid": mid, "high": high})


class Backbone(nn.Module):
    """Maps images to feature maps, or vectors to vectors.

    A backbone has no classifier. Its state-dict keys are those of the published weights, without the classifier's. A
    subclass sets the attributes and defines :meth:`maps`.

    Attributes:
        key: Name in the registry.
        normalization: Normalization of pixels that its weights expect; None if it reads vectors.
        input_size: Side of the images that its weights were trained on; None if it reads vectors.
        in_channels: Channels of the images, or dimensions of the vectors.
        channels: Channels of the map of each level. Every backbone has the level "high", its last map.
        gives_maps: Whether the last level is a map [b, c, h, w]; otherwise it is a vector [b, c].
        has_token: Whether it has a class token, with as many channels as the last map; it then defines :meth:`token`.
        ignored_keys: Prefixes of keys of published weights that are not loaded: classifiers.
        settings: Settings it was created with, as JSON stores them. A constructor with settings sets it.

    Example:
        >>> from nearfar import networks
        >>> networks.create_backbone("resnet18").channels["high"]
        512
    """

    key: ClassVar[str]
    ignored_keys: ClassVar[tuple[str, ...]] = ()
    normalization: Normalization | None = IMAGENET
    input_size: int | None = 224
    in_channels: int = 3
    channels: Mapping[str, int]
    gives_maps: bool = True
    has_token: bool = False
    settings: Mapping[str, Any] = MappingProxyType({})

    def __init__(self) -> None:
        super().__init__()
        self._frozen: frozenset[str] | None = None  # parameters to unfreeze; None if not frozen
        self.batchnorm_frozen = False

    def maps(self, x: Tensor) -> dict[str, Tensor]:
        """Return the map [b, c, h, w] or vector [b, c] of each level in ``channels``.

        Args:
            x: Normalized images [b, c, h, w] or vectors [b, d], as :meth:`forward` checks them.
        """
        raise NotImplementedError

    def token(self, x: Tensor) -> Tensor:
        """Return the class tokens [b, c] of normalized images [b, c, h, w], if the backbone has them."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        """Return the map of the last level."""
        check_input(x, self.key, self.in_channels, images=self.normalization is not None)
        return self.maps(x)["high"]

    def freeze(self) -> None:
        """Freeze all parameters and the statistics of batch norms, also in training mode."""
        if self._frozen is None:
            self._frozen = frozenset(name for name, parameter in self.named_parameters() if parameter.requires_grad)
        self.train(self.training)

    def unfreeze(self) -> None:
        """Undo :meth:`freeze`. Parameters that were frozen before, and frozen batch norms, stay frozen."""
        trainable, self._frozen = self._frozen or (), None
        for name, parameter in self.named_parameters():
            if name in trainable:
                parameter.requires_grad_(True)
        self.train(self.training)

    def freeze_batchnorm(self) -> None:
        """Freeze statistics and affine parameters of all batch norms; ``train`` and ``unfreeze`` do not change that."""
        self.batchnorm_frozen = True
        self.train(self.training)

    @property
    def frozen(self) -> bool:
        """Whether :meth:`freeze` was called."""
        return self._frozen is not None

    def train(self, mode: bool = True) -> Self:
        """Set training mode for everything that is not frozen."""
        super().train(mode)
        if self.frozen:
            for child in self.children():
                child.eval()
            self.requires_grad_(False)
        if self.batchnorm_frozen:
            freeze_batchnorms(self)
        return self


def batchnorm_layers(module: nn.Module) -> Iterator[nn.Module]:
    """Iterate over all batch norms of a module, including itself."""
    return (layer for layer in module.modules() if isinstance(layer, _BatchNorm))


def freeze_batchnorms(module: nn.Module) -> None:
    """Freeze statistics and affine parameters of all batch norms until ``module.train()``.

    A :class:`~nearfar.networks.Backbone` with frozen batch norms calls this again after ``train()``.
    """
    for layer in batchnorm_layers(module):
        layer.eval()
        layer.requires_grad_(False)
        if type(layer) is nn.BatchNorm2d:
            layer.__class__ = FixedBatchNorm2d


class FixedBatchNorm2d(nn.BatchNorm2d):
    """A batch norm whose backward pass is one multiplication while it is frozen.

    PyTorch's batch norm stores its input for a gradient that is not needed, and takes five times as long for
    channels-last maps. :func:`freeze_batchnorms` converts layers to this class; after unfreezing they work as usual.
    """

    def forward(self, x: Tensor) -> Tensor:
        parameters = (self.running_mean, self.running_var, self.weight, self.bias)
        trainable = any(value.requires_grad for value in self.parameters())
        if (
            self.training
            or trainable
            or not (torch.is_grad_enabled() and x.requires_grad)
            or any(value is None for value in parameters)
        ):
            return super().forward(x)
        y: Tensor = _Fixed.apply(x, *parameters, self.eps)  # type: ignore[no-untyped-call]
        return y


class _Fixed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, mean: Tensor, variance: Tensor, weight: Tensor, bias: Tensor, eps: float
    ) -> Tensor:
        ctx.save_for_backward(variance, weight)
        ctx.eps = eps
        return batch_norm(x, mean, variance, weight, bias, eps=eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        variance, weight = ctx.saved_tensors
        zero = torch.zeros_like(weight)
        # A batch norm without mean and bias is this multiplication, with a fast kernel for every memory layout.
        return batch_norm(gradient, zero, variance, weight, zero, eps=ctx.eps), None, None, None, None, None
