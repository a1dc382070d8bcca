"""Ensembles of embedders."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nearfar.networks.embedder import Embedder, EmbeddingModel


class Ensemble(EmbeddingModel):
    """Concatenates the embeddings of independent members.

    Members are trained separately. They get the same input, so all must expect the same normalization.

    Args:
        members: Embedders, at least one.
        normalize: Normalize the embedding of each member and the concatenated one to length 1, so that all members
            count the same. False: concatenate embeddings as they are.

    Reference:
        Elezi et al., "The Group Loss for Deep Metric Learning", ECCV 2020 (with 2 and with 5 members).

    Example:
        >>> from nearfar.networks import create
        >>> Ensemble([create("linear", in_dim=8, dim=2) for _ in range(5)])(torch.randn(3, 8)).shape
        torch.Size([3, 10])
    """

    def __init__(self, members: Sequence[Embedder], *, normalize: bool = True) -> None:
        super().__init__()
        if not members:
            raise ValueError("members is empty; an ensemble needs at least one")
        if len({id(member) for member in members}) != len(members):
            raise ValueError("members has the same embedder twice; each must be a different one")
        first = members[0]
        for number, member in enumerate(members):
            pair = f"members[{number}] ({member.backbone.key}) reads {{}} members[0] ({first.backbone.key}) {{}}"
            if member.normalization != first.normalization:
                raise ValueError(pair.format("other input than", f": {member.normalization}, {first.normalization}"))
            if member.backbone.in_channels != first.backbone.in_channels:
                ours, theirs = member.backbone.in_channels, first.backbone.in_channels
                raise ValueError(pair.format(f"{ours} channels and", theirs))
        self.members = nn.ModuleList(members)  # type: ignore[assignment]
        self.normalize = normalize
        self.dim = sum(member.dim for member in members)

    def forward(self, x: Tensor) -> Tensor:
        """Return the concatenated embeddings of all members."""
        return concatenate([member(x) for member in self.members], normalize=self.normalize)

    def param_groups(
        self, lr: float, head_multiplier: float = 1.0, weight_decay: float | None = None
    ) -> list[dict[str, Any]]:
        """Return the parameter groups of all members, named "0.backbone", "0.head", "1.backbone", …

        Args:
            lr: Learning rate of the backbones.
            head_multiplier: Factor of the learning rate of the heads.
            weight_decay: Weight decay; None for the default of the optimizer.
        """
        return [
            {**group, "name": f"{number}.{group['name']}"}
            for number, member in enumerate(self.members)
            for group in member.param_groups(lr, head_multiplier, weight_decay)
        ]


def concatenate(embeddings: Sequence[Tensor], *, normalize: bool = True) -> Tensor:
    """Concatenate the embeddings of several networks."""
    if not normalize:
        return torch.cat(list(embeddings), dim=1)
    return F.normalize(torch.cat([F.normalize(values, dim=1) for values in embeddings], dim=1), dim=1)
