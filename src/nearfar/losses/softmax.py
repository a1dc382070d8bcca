"""Softmax cross-entropy, as a classifier is trained."""

from __future__ import annotations

from nearfar.losses.proxies import ClassificationLoss
from nearfar.losses.registry import register


@register
class Softmax(ClassificationLoss):
    """Classifies raw embeddings with a linear layer.

    Formula:
        ℓ_i = −log e^(w_y·x_i) / Σ_c e^(w_c·x_i)

    Args:
        num_classes, dim: How many classes, and the length of an embedding.
        sample_rate: 1; below: compare with the classes of the batch and a random part of the others.
        lr_multiplier: Learning rate of the proxies over that of the network, 10.

    Differences:
        The layer has no bias, as the formula has none: at retrieval there are no classes it could belong to.

    Reference:
        Zhai, Wu: Classification is a Strong Baseline for Deep Metric Learning, 2019.
    """

    key = "softmax"
    source = "Thesis 2.25–2.26"
    measure = "dot"
    raw = True

    def __init__(self, *, num_classes: int, dim: int, sample_rate: float = 1.0, lr_multiplier: float = 10.0) -> None:
        super().__init__(num_classes, dim, sample_rate, lr_multiplier)
