"""Losses that learn a vector, a proxy, for every class."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from nearfar.losses.base import Loss
from nearfar.losses.settings import positive, whole


class ProxyLoss(Loss):
    """A loss of embeddings against learned class vectors, the parameter ``proxies``.

    ``proxies`` has shape [num_classes, dim], or [num_classes, centers, dim] where a class has several. They
    learn faster than a network: ``lr_multiplier`` times its learning rate, without weight decay.
    """

    def __init__(self, num_classes: int, dim: int, lr_multiplier: float, centers: int | None = None) -> None:
        super().__init__()
        self.num_classes, self.dim = whole("num_classes", num_classes), whole("dim", dim)
        self.lr_multiplier = positive("lr_multiplier", lr_multiplier)
        shape = (num_classes, dim) if centers is None else (num_classes, centers, dim)
        # Directions are uniform and lengths about 1, so that raw and normalised losses start alike.
        self.proxies = nn.Parameter(torch.randn(shape) * dim**-0.5)

    def param_groups(self, lr: float) -> list[dict[str, Any]]:
        return [{"params": [self.proxies], "lr": lr * self.lr_multiplier, "weight_decay": 0.0}]

    def compute(
        self,
        embeddings: Tensor,
        labels: Tensor,
        gallery: Tensor | None,
        gallery_labels: Tensor,
        positions: Tensor | None,
    ) -> Tensor:
        if gallery is not None:
            raise ValueError(f"{type(self).__name__} compares with its proxies and takes no gallery")
        if embeddings.shape[1] != self.dim:
            raise ValueError(f"embeddings have {embeddings.shape[1]} dimensions and proxies {self.dim}")
        if embeddings.device != self.proxies.device:
            raise ValueError(f"embeddings are on {embeddings.device} and proxies on {self.proxies.device}")
        check_classes(labels, self.num_classes)
        # Whichever of the two has more digits; the parameter itself keeps its own.
        dtype = torch.promote_types(embeddings.dtype, self.proxies.dtype)
        return self.against_proxies(embeddings.to(dtype), labels.long(), self.proxies.to(dtype))

    def against_proxies(self, embeddings: Tensor, labels: Tensor, proxies: Tensor) -> Tensor:
        """The loss of checked input, a scalar: embeddings [m, dim], labels in [0, num_classes), proxies."""
        raise NotImplementedError(f"{type(self).__name__} must define against_proxies(embeddings, labels, proxies)")


def check_classes(labels: Tensor, num_classes: int) -> None:
    """Labels are class numbers. Not looked at on a GPU, where that would stop the host."""
    if labels.device.type == "cpu":
        low, high = labels.min().item(), labels.max().item()
        if low < 0 or high >= num_classes:
            raise ValueError(
                f"labels go from {low} to {high}; with num_classes={num_classes} allowed are 0 to {num_classes - 1}"
            )
