"""CosFace: a margin on the cosine."""

from __future__ import annotations

from torch import Tensor

from nearfar.losses.proxies import ClassificationLoss
from nearfar.losses.registry import register
from nearfar.utils.validation import non_negative, positive


@register
class CosFace(ClassificationLoss):
    """Classifies by cosines, with a margin taken off the cosine to the own proxy.

    Formula:
        ℓ_i = −log e^(scale·(cos θ_y − margin)) / (e^(scale·(cos θ_y − margin)) + Σ_{c≠y} e^(scale·cos θ_c))

    Args:
        num_classes, dim: How many classes, and the length of an embedding.
        margin: 0.35.
        scale: S = 64.
        sample_rate: 1; below: compare with the classes of the batch and a random part of the others.
        lr_multiplier: Learning rate of the proxies over that of the network, 10.

    Reference:
        Wang et al.: CosFace: Large Margin Cosine Loss for Deep Face Recognition, 2018.
    """

    key = "cosface"
    source = "beyond the five papers"

    def __init__(
        self,
        *,
        num_classes: int,
        dim: int,
        margin: float = 0.35,
        scale: float = 64.0,
        sample_rate: float = 1.0,
        lr_multiplier: float = 10.0,
    ) -> None:
        super().__init__(num_classes, dim, sample_rate, lr_multiplier)
        self.margin = non_negative("margin", margin)
        self.scale = positive("scale", scale)

    def target(self, own: Tensor) -> tuple[Tensor, None]:
        return own - self.scale * self.margin, None
