"""A backbone with pooling and head: from pictures or vectors to embeddings."""

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
    """Embeddings [b, dim] of normalised pictures [b, c, h, w], or of vectors [b, d].

    With ``levels`` each level has its own pooling and head. In training each has its own copy of the loss
    (``levels_forward``); ``forward`` concatenates the embeddings of all levels and gives them length 1 again.

    Args:
        backbone: What makes maps of the input.
        dim: Dimensions of the embedding, of each level; None for the pooled features themselves.
        pooling: "avg", "max", "avg+max", or "gem"; "token" for the class token of a backbone that has one.
        normalize: Give embeddings length 1.
        head: "linear", "linear_norm", "mlp", or "none" for the pooled features themselves.
        levels: Any of "low", "mid" and "high", in the order of concatenation; only "high" if not given.
        freeze_batchnorm: Keep statistics and affine parameters of the backbone's batch norms.

    Attributes
        dim                dimensions of what ``forward`` gives, over all levels.
        normalization      how pixels become the numbers that ``forward`` reads; None where it reads vectors.
        input_size         the side of the pictures that the backbone's weights were trained on.

    Embeddings are float32 where the network works with fewer bits.

    Reference:
        Three levels: Wang et al.: Ranked List Loss for Deep Metric Learning. CVPR 2019.

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
            raise ValueError(f"pooling is {pooling!r}; {backbone.key} gives vectors, and there is nothing to pool")
        self._of_token = pooling == "token"
        if self._of_token:
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
        """What the backbone expects of pixels."""
        return self.backbone.normalization

    @property
    def input_size(self) -> int | None:
        """The side of the pictures that the backbone's weights were trained on."""
        return self.backbone.input_size

    def levels_forward(self, x: Tensor) -> dict[str, Tensor]:
        """The embedding of every level, [b, dim] each: one copy of the loss for each of them."""
        maps = {"high": self.backbone.class_token(x)} if self._of_token else self.backbone.level_maps(x)
        return {level: self._finish(self.heads[level](self.poolings[level](maps[level]))) for level in self.levels}

    def forward(self, x: Tensor) -> Tensor:
        """Embeddings; those of several levels side by side, in the order of ``levels``."""
        found = list(self.levels_forward(x).values())
        return found[0] if len(found) == 1 else self._finish(torch.cat(found, dim=1))

    def freeze_backbone(self) -> None:
        """Train only pooling and head, as in warm-up epochs. The backbone is a fixed function until it is unfrozen.

        An optimiser that has the backbone's parameters leaves them alone, as they get no gradient: make it before.
        """
        self.backbone.freeze()

    def unfreeze_backbone(self) -> None:
        """Train the backbone again; frozen batch norms stay frozen."""
        self.backbone.unfreeze()

    def param_groups(
        self, lr: float, head_multiplier: float = 1.0, weight_decay: float | None = None
    ) -> list[dict[str, Any]]:
        """Groups for an optimiser: "backbone", and "head" (with pooling) at a multiple of the learning rate.

        What is frozen is left out, and so is a group without parameters.

        >>> from nearfar.networks import create
        >>> [(group["name"], group["lr"]) for group in create("mlp", in_dim=8, dim=2).param_groups(0.5)]
        [('backbone', 0.5), ('head', 0.5)]
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


_pooling = pooling.create  # the class has a setting of that name


def _check_token(backbone: Backbone, levels: tuple[str, ...]) -> None:
    if not backbone.has_token:
        allowed = ", ".join(pooling.MAPS)
        raise ValueError(f"pooling is 'token'; {backbone.key} has no class token, and allowed are {allowed}")
    if levels != ("high",):
        raise ValueError(f"pooling is 'token' and levels is {levels!r}; the class token is of the level 'high' alone")


def _checked_levels(backbone: Backbone, levels: Sequence[str] | None) -> tuple[str, ...]:
    if levels is None:
        return ("high",)
    if isinstance(levels, str):
        raise TypeError(f"levels is {levels!r}; a tuple is needed, such as ({levels!r},)")
    for level in levels:
        if level not in backbone.channels:
            raise ValueError(f"levels has {level!r}; {backbone.key} has {', '.join(backbone.channels)}")
    if not levels or len(set(levels)) != len(levels):
        raise ValueError(f"levels is {tuple(levels)!r}; each level once, and at least one, is needed")
    return tuple(levels)
