"""Embedders: a backbone with pooling and head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nearfar.networks import heads, pooling
from nearfar.networks.backbones.base import Backbone
from nearfar.utils.normalization import Normalization
from nearfar.utils.validation import non_negative, positive


class Embedder(nn.Module):
    """Maps normalized images [b, c, h, w] or vectors [b, d] to embeddings [b, dim].

    With several ``levels``, each level has its own pooling and head. In training each level has its own copy of the
    loss (:meth:`levels_forward`); ``forward`` concatenates the embeddings of all levels and normalizes them again.
    Embeddings are float32 also if the network computes in lower precision.

    Args:
        backbone: The backbone.
        dim: Dimensions of the embedding, of each level; None for the pooled features themselves.
        pooling: "avg", "max", "avg+max" or "gem"; "token" for the class token of a backbone that has one.
        normalize: Normalize embeddings to length 1.
        head: "linear", "linear_norm", "mlp", or "none" for the pooled features themselves.
        levels: Any of "low", "mid" and "high", in the order of concatenation; None for "high".
        freeze_batchnorm: Freeze statistics and affine parameters of the backbone's batch norms.

    Attributes:
        dim: Dimensions of the output of ``forward``, over all levels.

    Reference:
        Three levels: Wang et al., "Ranked List Loss for Deep Metric Learning", CVPR 2019.

    Example:
        >>> from nearfar.networks import create
        >>> create("linear", in_dim=8, dim=2)(torch.randn(5, 8)).shape
        torch.Size([5, 2])
    """

    def __init__(
        self,
        backbone: Backbone,
        *,
        dim: int | None = 512,
        pooling: str = "avg",
        normalize: bool = True,
        head: str = "linear",
        levels: Sequence[str] | None = None,
        freeze_batchnorm: bool = False,
    ) -> None:
        super().__init__()
        self.levels = _checked_levels(backbone, levels)
        if pooling != "avg" and not backbone.gives_maps and self.levels == ("high",):
            raise ValueError(f"pooling is {pooling!r}; {backbone.key} returns vectors, which are not pooled")
        self._uses_token = pooling == "token"
        if self._uses_token:
            _check_token(backbone, self.levels)
        self.backbone = backbone
        self.poolings = nn.ModuleDict({level: _pooling(pooling) for level in self.levels})
        self.heads = nn.ModuleDict({level: heads.create(head, backbone.channels[level], dim) for level in self.levels})
        self.normalize = normalize
        kept = dim is None or head == "none"
        self.dim = sum(backbone.channels[level] if kept or dim is None else dim for level in self.levels)
        if freeze_batchnorm:
            backbone.freeze_batchnorm()

    @property
    def normalization(self) -> Normalization | None:
        """Normalization of pixels that the backbone expects; None if it reads vectors."""
        return self.backbone.normalization

    @property
    def input_size(self) -> int | None:
        """Side of the images that the backbone's weights were trained on; None if it reads vectors."""
        return self.backbone.input_size

    def levels_forward(self, x: Tensor) -> dict[str, Tensor]:
        """Return the embedding [b, dim] of each level, for one copy of the loss each.

        Args:
            x: Normalized images or vectors.
        """
        maps = {"high": self.backbone.class_token(x)} if self._uses_token else self.backbone.level_maps(x)
        return {level: self._finish(self.heads[level](self.poolings[level](maps[level]))) for level in self.levels}

    def forward(self, x: Tensor) -> Tensor:
        """Return the embeddings; those of several levels are concatenated."""
        found = list(self.levels_forward(x).values())
        return found[0] if len(found) == 1 else self._finish(torch.cat(found, dim=1))

    def freeze_backbone(self) -> None:
        """Freeze the backbone, so that only pooling and head are trained, as in warm-up epochs.

        Create the optimizer before, so that it has the parameters of the backbone; without gradients it skips them.
        """
        self.backbone.freeze()

    def unfreeze_backbone(self) -> None:
        """Unfreeze the backbone; frozen batch norms stay frozen."""
        self.backbone.unfreeze()

    def param_groups(
        self, lr: float, head_multiplier: float = 1.0, weight_decay: float | None = None
    ) -> list[dict[str, Any]]:
        """Return parameter groups for an optimizer: "backbone", and "head" with the pooling.

        Frozen parameters are left out, and so are groups without parameters. The defaults are those of recipes.

        Args:
            lr: Learning rate of the backbone.
            head_multiplier: Factor of the learning rate of head and pooling.
            weight_decay: Weight decay; None for the default of the optimizer.

        Example:
            >>> from nearfar.networks import create
            >>> model = create("mlp", in_dim=8, dim=2)
            >>> [(group["name"], group["lr"]) for group in model.param_groups(0.5, head_multiplier=10.0)]
            [('backbone', 0.5), ('head', 5.0)]
        """
        positive("lr", lr)
        positive("head_multiplier", head_multiplier)
        extra = {} if weight_decay is None else {"weight_decay": non_negative("weight_decay", weight_decay)}
        parts: list[tuple[str, float, list[nn.Module]]] = [
            ("backbone", lr, [self.backbone]),
            ("head", lr * head_multiplier, [self.poolings, self.heads]),
        ]
        groups = []
        for name, rate, modules in parts:
            params = [each for module in modules for each in module.parameters() if each.requires_grad]
            if params:
                groups.append({"name": name, "params": params, "lr": rate, **extra})
        return groups

    def _finish(self, x: Tensor) -> Tensor:
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        return F.normalize(x, dim=1) if self.normalize else x


_pooling = pooling.create  # the constructor has an argument of that name


def _check_token(backbone: Backbone, levels: tuple[str, ...]) -> None:
    if not backbone.has_token:
        allowed = ", ".join(pooling.MAPS)
        raise ValueError(f"pooling is 'token'; {backbone.key} has no class token; allowed are {allowed}")
    if levels != ("high",):
        raise ValueError(f"pooling is 'token' and levels is {levels!r}; only the level 'high' has a class token")


def _checked_levels(backbone: Backbone, levels: Sequence[str] | None) -> tuple[str, ...]:
    if levels is None:
        return ("high",)
    if isinstance(levels, str):
        raise TypeError(f"levels is {levels!r}; a tuple is needed, such as ({levels!r},)")
    for level in levels:
        if level not in backbone.channels:
            raise ValueError(f"levels has {level!r}; {backbone.key} has {', '.join(backbone.channels)}")
    if not levels or len(set(levels)) != len(levels):
        raise ValueError(f"levels is {tuple(levels)!r}; at least one level is needed, and none twice")
    return tuple(levels)
