"""What every backbone offers."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar, Self

from torch import Tensor, nn

from nearfar.networks import batchnorm
from nearfar.utils.normalization import IMAGENET, Normalization

LEVELS = ("low", "mid", "high")


def by_level(low: int, mid: int, high: int) -> Mapping[str, int]:
    """Numbers of channels of the three levels.

    >>> by_level(512, 1024, 2048)["high"]
    2048
    """
    return MappingProxyType({"low": low, "mid": mid, "high": high})


class Backbone(nn.Module):
    """From images to feature maps, or from vectors to vectors.

    A backbone has no classifier. Its state-dict keys are those of the published weights, without the classifier's.

    A subclass sets what is listed here and defines ``maps``.

    Attributes
        key             its name in the registry.
        normalization   what its weights expect of pixels; None where it reads vectors.
        input_size      the side of the pictures its weights were trained on; None where it reads vectors.
        in_channels     how many channels a picture has, or how many dimensions a vector.
        channels        by level, how many channels the map has. Every backbone has the level "high", its last map.
        gives_maps      whether the last level is a map [b, c, h, w]; otherwise it is a vector [b, c].
        has_token       whether it has a class token, as wide as the last map; one that has defines ``token``, too.
        ignored_keys    prefixes of published weights that are left out: classifiers.
    """

    key: ClassVar[str]
    ignored_keys: ClassVar[tuple[str, ...]] = ()
    normalization: Normalization | None = IMAGENET
    input_size: int | None = 224
    in_channels: int = 3
    channels: Mapping[str, int]
    gives_maps: bool = True
    has_token: bool = False

    def __init__(self) -> None:
        super().__init__()
        self._frozen: frozenset[str] | None = None  # parameters to wake again; None while nothing is frozen
        self._batchnorm_frozen = False

    def maps(self, x: Tensor) -> dict[str, Tensor]:
        """The maps after the stages that ``channels`` names, of input that has been looked at."""
        raise NotImplementedError

    def token(self, x: Tensor) -> Tensor:
        """The class token of every picture, [b, c], of input that has been looked at."""
        raise NotImplementedError

    def level_maps(self, x: Tensor) -> dict[str, Tensor]:
        """The map of every level by name: [b, c, h, w], or [b, c]. (``features`` is a key of published weights.)"""
        self._check(x)
        return self.maps(x)

    def class_token(self, x: Tensor) -> Tensor:
        """The class token of every picture, [b, c], of a backbone that has one."""
        self._check(x)
        return self.token(x)

    def forward(self, x: Tensor) -> Tensor:
        """The map of the last level."""
        return self.level_maps(x)["high"]

    # --- what stays as it is in training ---------------------------------------------------------------------

    def freeze(self) -> None:
        """Make it a fixed function: no gradients, and no change of batch-norm statistics by ``train()``."""
        if self._frozen is None:
            self._frozen = frozenset(name for name, parameter in self.named_parameters() if parameter.requires_grad)
        self.train(self.training)

    def unfreeze(self) -> None:
        """Undo ``freeze``. What was not trained before is still not trained, nor are frozen batch norms."""
        awake, self._frozen = self._frozen or (), None
        for name, parameter in self.named_parameters():
            if name in awake:
                parameter.requires_grad_(True)
        self.train(self.training)

    def freeze_batchnorm(self) -> None:
        """Keep statistics and affine parameters of all batch norms, through ``train``, ``unfreeze`` and reloads."""
        self._batchnorm_frozen = True
        self.train(self.training)

    @property
    def frozen(self) -> bool:
        """Whether ``freeze`` was called."""
        return self._frozen is not None

    @property
    def batchnorm_frozen(self) -> bool:
        """Whether ``freeze_batchnorm`` was called."""
        return self._batchnorm_frozen

    def train(self, mode: bool = True) -> Self:
        """Training mode for all that is not frozen."""
        super().train(mode)
        if self.frozen:
            for child in self.children():
                child.eval()
            self.requires_grad_(False)
        if self._batchnorm_frozen:
            batchnorm.freeze(self)
        return self

    def _check(self, x: Tensor) -> None:
        if not x.is_floating_point():
            hint = "; a Normalization turns pixels into what the network reads" if self.normalization else ""
            raise TypeError(f"input is of {x.dtype}; floating point is needed{hint}")
        if self.normalization is None:
            if x.ndim != 2 or x.shape[1] != self.in_channels:
                raise ValueError(f"input has shape {tuple(x.shape)}; {self.key} reads [b, {self.in_channels}]")
        elif x.ndim != 4 or x.shape[1] != self.in_channels:
            raise ValueError(f"input has shape {tuple(x.shape)}; {self.key} reads [b, {self.in_channels}, h, w]")
