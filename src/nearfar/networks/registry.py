"""Networks by name."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from nearfar.networks.backbones.base import Backbone
from nearfar.networks.embedder import Embedder
from nearfar.utils.validation import nearest, refuse_missing, refuse_unknown

B = TypeVar("B", bound=type[Backbone])
_BACKBONES: dict[str, type[Backbone]] = {}


def register(backbone: B) -> B:
    """Class decorator: make a backbone known by its ``key``."""
    if _BACKBONES.get(backbone.key, backbone).__qualname__ != backbone.__qualname__:
        other = _BACKBONES[backbone.key].__name__
        raise ValueError(f"two backbones have the key {backbone.key!r}: {other} and {backbone.__name__}")
    _BACKBONES[backbone.key] = backbone
    return backbone


def names() -> list[str]:
    """The keys of all backbones that are built in.

    >>> "resnet50" in names()
    True
    """
    return sorted(_BACKBONES)


def get(name: str) -> type[Backbone]:
    """The class behind a key."""
    if name not in _BACKBONES:
        raise ValueError(f"network is {name!r}{nearest(name, names())}; allowed are {', '.join(names())}")
    return _BACKBONES[name]


def defaults(name: str) -> dict[str, Any]:
    """The settings of a backbone and their defaults (``inspect.Parameter.empty`` where one must be given).

    >>> defaults("resnet50"), list(defaults("linear"))
    ({}, ['in_dim'])
    """
    parameters = inspect.signature(get(name)).parameters
    return {key: parameter.default for key, parameter in parameters.items()}


def create(
    name: str,
    *,
    dim: int | None = 512,
    pooling: str = "avg",
    normalize: bool = True,
    head: str = "linear",
    levels: Sequence[str] | None = None,
    pretrained: bool | str | Path = False,
    freeze_batchnorm: bool = False,
    **settings: Any,
) -> Embedder:
    """An embedder by the name of its backbone.

    Args:
        name: One of ``names()``, or "timm:NAME", "torchvision:NAME", "transformers:NAME" where that library is.
        pretrained: True for the published weights, or a file with weights; False for random ones.
        settings: Those of the backbone, such as ``in_dim`` of "linear" and "mlp"; see ``defaults(name)``. Those of
            "timm:NAME" are ``timm.create_model``'s, such as ``img_size``.

    The others are those of :class:`~nearfar.networks.Embedder`.

    >>> create("mlp", in_dim=64, dim=16).dim
    16
    """
    backbone = create_backbone(name, pretrained=pretrained, **settings)
    return Embedder(
        backbone,
        dim=dim,
        pooling=pooling,
        normalize=normalize,
        head=head,
        levels=levels,
        freeze_batchnorm=freeze_batchnorm,
    )


def create_backbone(name: str, *, pretrained: bool | str | Path = False, **settings: Any) -> Backbone:
    """A backbone alone, without pooling and head.

    >>> create_backbone("mlp", in_dim=64, hidden=(32,)).channels["high"]
    32
    """
    if ":" in name:
        from nearfar.networks.backbones import external

        return external.create(name, pretrained=pretrained, settings=settings)
    allowed = defaults(name)
    refuse_unknown(name, settings, allowed)
    refuse_missing(name, settings, allowed)
    backbone = get(name)(**settings)
    if pretrained is not False:
        from nearfar.networks.weights import published

        published.load_pretrained(backbone, name, pretrained, ignore=backbone.ignored_keys)
    return backbone
