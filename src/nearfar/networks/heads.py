"""Heads that map pooled features [b, c] to embeddings [b, dim]."""

from __future__ import annotations

from torch import Tensor, nn

from nearfar.utils.validation import one_of, whole

NAMES = ("linear", "linear_norm", "mlp", "none")


class Head(nn.Module):
    """One linear layer, optionally followed by a layer norm, or two with a ReLU between them.

    Args:
        channels: Dimensions of the pooled features.
        dim: Dimensions of the embedding.
        kind: "linear"; "linear_norm", with a layer norm without parameters; "mlp", whose hidden layer is as wide as
            the pooled features.
    """

    def __init__(self, channels: int, dim: int, kind: str = "linear") -> None:
        super().__init__()
        self.kind = one_of("head", kind, NAMES[:3])
        whole("dim", dim)
        self.hidden = nn.Linear(channels, channels) if kind == "mlp" else None
        self.linear = nn.Linear(channels, dim)
        self.norm = nn.LayerNorm(dim, elementwise_affine=False) if kind == "linear_norm" else None
        for layer in (self.hidden, self.linear):
            if layer is not None:
                nn.init.xavier_uniform_(layer.weight)
                nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.hidden is not None:
            x = self.hidden(x).relu()
        x = self.linear(x)
        return x if self.norm is None else self.norm(x)


def create(kind: str, channels: int, dim: int | None) -> nn.Module:
    """Create a head by name.

    Args:
        kind: "linear", "linear_norm", "mlp", or "none" for the pooled features themselves.
        channels: Dimensions of the pooled features.
        dim: Dimensions of the embedding; None for the pooled features themselves.

    Example:
        >>> create("linear", 1024, 512).linear
        Linear(in_features=1024, out_features=512, bias=True)
        >>> create("linear", 1024, None)
        Identity()
    """
    one_of("head", kind, NAMES)
    return nn.Identity() if kind == "none" or dim is None else Head(channels, dim, kind)
