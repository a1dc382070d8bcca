"""Softmax of cosines."""

from __future__ import annotations

from nearfar.losses.proxies import ClassificationLoss
from nearfar.losses.registry import register
from nearfar.utils.validation import positive


@register
class NormalizedSoftmax(ClassificationLoss):
    """Classifies by the angle to each proxy.

    Formula:
        ℓ_i = −log e^(cos(x_i, w_y) / temperature) / Σ_c e^(cos(x_i, w_c) / temperature)

    Args:
        num_classes, dim: How many classes, and the length of an embedding.
        temperature: Τ = 0.05.
        sample_rate: 1; below: compare with the classes of the batch and a random part of the others.
        lr_multiplier: Learning rate of the proxies over that of the network, 10.

    Reference:
        Zhai, Wu: Classification is a Strong Baseline for Deep Metric Learning, 2019.
    """

    key = "normalized_softmax"
    source = "Group Loss [52]"

    def __init__(
        self,
        *,
        num_classes: int,
        dim: int,
        temperature: float = 0.05,
        sample_rate: float = 1.0,
        lr_multiplier: float = 10.0,
    ) -> None:
        super().__init__(num_classes, dim, sample_rate, lr_multiplier)
        self.temperature = positive("temperature", temperature)

    @property
    def sharpness(self) -> float:
        return 1.0 / self.temperature
