"""Networks by name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from nearfar.networks.backbones.base import Backbone
from nearfar.networks.embedder import Embedder
from nearfar.utils.registry import Registry

B = TypeVar("B", bound=type[Backbone])
_BACKBONES: Registry[type[Backbone]] = Registry("network")
names = _BACKBONES.names
"""Return the names of all registered backbones, sorted."""
get = _BACKBONES.get
"""Return the class of a backbone."""
defaults = _BACKBONES.defaults
"""Return the settings of a backbone and their defaults (``inspect.Parameter.empty`` if required)."""


def register(backbone: B) -> B:
    """Register a backbone class under its ``key``. Used as a decorator.

    Args:
        backbone: The class.
    """
    _BACKBONES.register(backbone.key, backbone)
    return backbone


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
    """Create an embedder by the name of its backbone.

    Args:
        name: One of ``names()``, or "timm:NAME", "torchvision:NAME" or "transformers:NAME" if the library is installed.
        dim: Dimensions of the embedding, of each level; None for the pooled features themselves.
        pooling: "avg", "max", "avg+max" or "gem"; "token" for the class token of a backbone that has one.
        normalize: Normalize embeddings to length 1.
        head: "linear", "linear_norm", "mlp", "residual", or "none" for the pooled features themselves.
        levels: Any of "low", "mid" and "high", in the order of concatenation; None for "high".
        pretrained: True for the published weights, a file with weights, or False for random weights.
        freeze_batchnorm: Freeze statistics and affine parameters of the backbone's batch norms.
        settings: Settings of the backbone, such as ``in_dim`` of "linear" and "mlp", see ``defaults(name)``; for
            "timm:NAME" those of ``timm.create_model``, such as ``img_size``.

    Example:
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
    """Create a backbone without pooling and head.

    Args:
        name: As for :func:`create`.
        pretrained: As for :func:`create`.
        settings: Settings of the backbone.

    Example:
        >>> create_backbone("mlp", in_dim=64, hidden=(32,)).channels["high"]
        32
    """
    if ":" in name:
        from nearfar.networks.backbones import external

        return external.create(name, pretrained=pretrained, settings=settings)
    backbone: Backbone = _BACKBONES.create(name, **settings)
    if pretrained is not False:
        from nearfar.networks.weights import published

        published.load_pretrained(backbone, name, pretrained, ignore=backbone.ignored_keys)
    return backbone
