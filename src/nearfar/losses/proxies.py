"""Losses that learn a vector, a proxy, for every class."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from nearfar.engine import DEFAULT_BUDGET, Measure, class_loss, measure
from nearfar.losses.base import Loss, check_classes, refuse_gallery
from nearfar.utils.validation import number, positive, whole


class ProxyLoss(Loss):
    """A loss of embeddings against learned class vectors, the parameter ``proxies``.

    ``proxies`` has shape [num_classes, dim], or [num_classes, centers, dim] where a class has several. They
    learn faster than a network: ``lr_multiplier`` times its learning rate, without weight decay.
    """

    fixed = ("num_classes", "dim", "centers")

    def __init__(self, num_classes: int, dim: int, lr_multiplier: float, centers: int | None = None) -> None:
        super().__init__()
        self.num_classes, self.dim = whole("num_classes", num_classes), whole("dim", dim)
        self.lr_multiplier = positive("lr_multiplier", lr_multiplier)
        shape = (self.num_classes, self.dim) if centers is None else (self.num_classes, centers, self.dim)
        # Directions are uniform and lengths about 1, so that raw and normalised losses start alike.
        self.proxies = nn.Parameter(torch.randn(shape) * self.dim**-0.5)

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
        refuse_gallery(self, gallery, "compares with its proxies")
        if embeddings.shape[1] != self.dim:
            raise ValueError(f"embeddings have {embeddings.shape[1]} dimensions and proxies {self.dim}")
        if embeddings.device != self.proxies.device:
            raise ValueError(f"embeddings are on {embeddings.device} and proxies on {self.proxies.device}")
        check_classes(labels, self.num_classes)
        # Whichever of the two has more digits; the parameter itself keeps its own.
        dtype = torch.promote_types(embeddings.dtype, self.proxies.dtype)
        return self.against_proxies(embeddings.to(dtype), labels, self.proxies.to(dtype))

    def against_proxies(self, embeddings: Tensor, labels: Tensor, proxies: Tensor) -> Tensor:
        """The loss of checked input, a scalar: embeddings [m, dim], labels in [0, num_classes), proxies."""
        raise NotImplementedError(f"{type(self).__name__} must define against_proxies(embeddings, labels, proxies)")


class ClassificationLoss(ProxyLoss):
    """A cross-entropy over classes: ℓ_i = −target + log(e^target + Σ_{c≠y} e^(scale·s_ic)).

    A subclass says how embeddings are compared (``measure``, ``raw``, ``scale``) and what stands for
    scale·s_iy, the scaled similarity to the own class (``target``). The engine goes over the classes in tiles, so
    that a million of them need no batch × classes matrix. With ``sample_rate`` below 1 every step compares
    with the classes of the batch and a random part of the others.
    """

    measure: str = "cosine"
    raw: bool = False  # compare the embeddings as they are, not normalised
    pools: bool = False  # a class has several proxies: see `pool`
    penalizes: bool = False  # several proxies of a class cost something by themselves: see `penalty`
    memory_budget: int = DEFAULT_BUDGET  # bytes for one tile; settable on any loss
    scale: float = 1.0  # of the similarities
    include_positive: bool = True  # the own class is part of the sum

    def __init__(
        self, num_classes: int, dim: int, sample_rate: float, lr_multiplier: float, centers: int | None = None
    ) -> None:
        super().__init__(num_classes, dim, lr_multiplier, centers)
        self.sample_rate = number("sample_rate", sample_rate, low=0.0, high=1.0, open_low=True)

    @property
    def comparison(self) -> Measure:
        """How embeddings and proxies are compared."""
        return measure(self.measure, raw=self.raw)

    @property
    def sharpness(self) -> float:
        """What similarities are multiplied by in the sum: the scale, unless a loss has another word for it."""
        return self.scale

    def target(self, own: Tensor) -> tuple[Tensor, Tensor | None]:
        """What stands for the scaled similarity to the own class, [m], and its derivative by that; None: 1."""
        return own, None

    def pool(self, similarities: Tensor) -> tuple[Tensor, Tensor]:
        """Similarities to proxies, [m, c, k], as similarities to classes, [m, c], and the derivatives, [m, c, k]."""
        raise NotImplementedError(f"{type(self).__name__} sets pools and must define pool(similarities)")

    def penalty(self, similarities: Tensor) -> tuple[Tensor, Tensor]:
        """What the similarities within each class, [c, k, k], cost in sum, and its derivative by them."""
        raise NotImplementedError(f"{type(self).__name__} sets penalizes and must define penalty(similarities)")

    def sample_classes(self, labels: Tensor) -> Tensor:
        """The classes of the batch and random others, sample_rate · num_classes of them (or enough for the batch)."""
        share = math.ceil(round(self.sample_rate * self.num_classes, 6))  # 0.55 · 20 is 11.000000000000002
        count = max(share, min(len(labels), self.num_classes))
        chance = torch.rand(self.num_classes, dtype=torch.float32, device=labels.device)
        return chance.scatter_(0, labels, 2.0).topk(count, sorted=False).indices

    def against_proxies(self, embeddings: Tensor, labels: Tensor, proxies: Tensor) -> Tensor:
        sampled = None if self.sample_rate == 1.0 else self.sample_classes(labels)
        loss: Tensor = class_loss(self, embeddings, labels, proxies, sampled)
        return loss
