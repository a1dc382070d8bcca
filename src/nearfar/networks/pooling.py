"""Pooling of feature maps [b, c, h, w] to one vector per image, [b, c]."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from nearfar.utils.validation import one_of, positive

MAPS = ("avg", "max", "avg+max", "gem")
NAMES = (*MAPS, "token")


class Pooling(nn.Module):
    """Average or maximum over all positions of a map, or their sum. Vectors [b, c] are returned unchanged.

    Args:
        kind: "avg", "max" or "avg+max" (the sum).

    Example:
        >>> Pooling("avg+max")(torch.tensor([[[[1.0, 3.0]]]]))
        tensor([[5.]])
    """

    def __init__(self, kind: str = "avg") -> None:
        super().__init__()
        self.kind = one_of("pooling", kind, MAPS[:3])

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim == 2:
            return x
        if self.kind == "avg":
            return x.mean(dim=(2, 3))
        if self.kind == "max":
            return x.amax(dim=(2, 3))
        return x.mean(dim=(2, 3)) + x.amax(dim=(2, 3))

    def extra_repr(self) -> str:
        return self.kind


class GeM(nn.Module):
    """Generalized mean (mean of xᵖ)^(1/p) with a learned exponent: 1 is the average, ∞ the maximum.

    Args:
        p: Initial exponent.
        smallest: Smaller values, including negative ones, are clamped to this.

    Reference:
        Radenović et al., "Fine-tuning CNN Image Retrieval with No Human Annotation", TPAMI 2019.

    Example:
        >>> GeM(p=1.0)(torch.tensor([[[[1.0, 3.0]]]])).tolist()
        [[2.0]]
    """

    def __init__(self, *, p: float = 3.0, smallest: float = 1e-6) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.tensor([positive("p", p)]))
        self.smallest = positive("smallest", smallest)

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim == 2:
            return x
        # At least float32: a sum of cubes overflows float16.
        x = x.to(torch.promote_types(x.dtype, torch.float32)).clamp(min=self.smallest)
        p = self.p.to(x.dtype)
        # Dividing by the largest value first prevents overflow; it cancels, and so does its gradient.
        top = x.detach().amax(dim=(2, 3), keepdim=True)
        return (x / top).pow(p).mean(dim=(2, 3)).pow(1 / p) * top.flatten(1)

    def extra_repr(self) -> str:
        return f"p={self.p.item():.3g}"


class Token(nn.Module):
    """The class token of a transformer, [b, c], returned unchanged.

    Example:
        >>> Token()(torch.tensor([[1.0, 3.0]]))
        tensor([[1., 3.]])
    """

    kind = "token"

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim != 2:
            raise ValueError(f"a class token has shape {tuple(x.shape)}; [b, c] is needed")
        return x


def create(kind: str) -> nn.Module:
    """Create a pooling layer by name.

    Args:
        kind: "avg", "max", "avg+max", "gem" or "token".

    Example:
        >>> create("gem")
        GeM(p=3)
    """
    one_of("pooling", kind, NAMES)
    return GeM() if kind == "gem" else Token() if kind == "token" else Pooling(kind)
