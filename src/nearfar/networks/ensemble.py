"""Several embedders as one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nearfar.networks.embedder import Embedder
from nearfar.utils.normalization import Normalization


class Ensemble(nn.Module):
    """The embeddings of independent members side by side, with length 1 again.

    Members are trained each on its own; what they share is the input, so all must read the same kind of it.

    Args:
        members: Embedders, at least one.
        normalize: Give the concatenated embedding length 1.

    Reference:
        Elezi et al.: The Group Loss for Deep Metric Learning. ECCV 2020 (with 2 and with 5 members).

    >>> from nearfar.networks import create
    >>> Ensemble([create("linear", in_dim=8, dim=2) for _ in range(5)])(torch.randn(3, 8)).shape
    torch.Size([3, 10])
    """

    def __init__(self, members: Sequence[Embedder], *, normalize: bool = True) -> None:
        super().__init__()
        if not members:
            raise ValueError("members is empty; an ensemble needs at least one")
        if len({id(member) for member in members}) != len(members):
            raise ValueError("members has the same embedder twice; each must be one of its own")
        first = members[0]
        for number, member in enumerate(members):
            pair = f"members[{number}] ({member.backbone.key}) reads {{}} members[0] ({first.backbone.key}) {{}}"
            if member.normalization != first.normalization:
                raise ValueError(pair.format("other input than", f": {member.normalization}, {first.normalization}"))
            if member.backbone.in_channels != first.backbone.in_channels:
                ours, theirs = member.backbone.in_channels, first.backbone.in_channels
                raise ValueError(pair.format(f"{ours} channels and", theirs))
        self.members = nn.ModuleList(members)
        self.normalize = normalize
        self.dim = sum(member.dim for member in members)

    @property
    def normalization(self) -> Normalization | None:
        """What all members expect of pixels."""
        return self._each()[0].normalization

    @property
    def input_size(self) -> int | None:
        """The side of the pictures that the first member's weights were trained on."""
        return self._each()[0].input_size

    def forward(self, x: Tensor) -> Tensor:
        """Embeddings of all members, in their order."""
        return side_by_side([member(x) for member in self.members], normalize=self.normalize)

    def freeze_backbone(self) -> None:
        """Freeze the backbones of all members."""
        for member in self._each():
            member.freeze_backbone()

    def unfreeze_backbone(self) -> None:
        """Unfreeze the backbones of all members."""
        for member in self._each():
            member.unfreeze_backbone()

    def param_groups(
        self, lr: float, head_multiplier: float = 1.0, weight_decay: float | None = None
    ) -> list[dict[str, Any]]:
        """The groups of all members, named "0.backbone", "0.head", "1.backbone", …"""
        return [
            {**group, "name": f"{number}.{group['name']}"}
            for number, member in enumerate(self._each())
            for group in member.param_groups(lr, head_multiplier, weight_decay)
        ]

    def _each(self) -> list[Embedder]:
        return [member for member in self.members if isinstance(member, Embedder)]


def side_by_side(found: Sequence[Tensor], *, normalize: bool = True) -> Tensor:
    """Embeddings [b, d] of several networks as one, in their order.

    Args:
        normalize: Give the concatenated embedding length 1.

    >>> side_by_side([torch.tensor([[3.0]]), torch.tensor([[4.0]])])
    tensor([[0.6000, 0.8000]])
    """
    together = torch.cat(list(found), dim=1)
    return F.normalize(together, dim=1) if normalize else together
