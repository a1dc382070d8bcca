"""ArcFace: a margin on the angle."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from nearfar.engine import masked
from nearfar.losses.proxies import ClassificationLoss
from nearfar.losses.registry import register
from nearfar.utils.validation import number, positive, whole


@register
class ArcFace(ClassificationLoss):
    """Classifies by angles, with the angle to the own proxy made wider by a margin.

    Formula:
        ℓ_i = −log e^(scale·cos(θ_y + margin)) / (e^(scale·cos(θ_y + margin)) + Σ_{c≠y} e^(scale·cos θ_c))
        θ_c: the angle to the proxy of class c or, where it has several, to the nearest of them

    Args:
        num_classes, dim: How many classes, and the length of an embedding.
        centers: K = 1 proxy for each class; several (the paper: 3) are Sub-center ArcFace, for wrong labels,
            and the parameter ``proxies`` then has the shape [num_classes, centers, dim].
        margin: Λ = 0.5, in radians (28.6°), at most π/2.
        scale: S = 64.
        sample_rate: 1; below: compare with the classes of the batch and a random part of the others.
        lr_multiplier: Learning rate of the proxies over that of the network, 10.

    Differences:
        Where θ_y + margin > π the cosine would rise again; there cos θ_y − margin·sin(margin) stands for it, as
        in the authors' code. Where θ_y is exactly 0 or π it has no direction, and only cos θ_y is followed. Of
        equally near centres the first is taken. The paper later drops all centres of a class but one, and the
        samples far from that; here all stay.

    Reference:
        Deng et al.: ArcFace: Additive Angular Margin Loss for Deep Face Recognition, 2019.
        Deng et al.: Sub-center ArcFace: Boosting Face Recognition by Large-Scale Noisy Web Faces, 2020.
    """

    key = "arcface"
    source = "Thesis 2.29"

    def __init__(
        self,
        *,
        num_classes: int,
        dim: int,
        centers: int = 1,
        margin: float = 0.5,
        scale: float = 64.0,
        sample_rate: float = 1.0,
        lr_multiplier: float = 10.0,
    ) -> None:
        several = whole("centers", centers) > 1
        super().__init__(num_classes, dim, sample_rate, lr_multiplier, centers if several else None)
        self.centers, self.pools = centers, several
        self.margin = number("margin", margin, low=0.0, high=math.pi / 2)
        self.scale = positive("scale", scale)

    def target(self, own: Tensor) -> tuple[Tensor, Tensor]:
        scale, cos_margin, sin_margin = self.scale, math.cos(self.margin), math.sin(self.margin)
        sine = (scale**2 - own * own).clamp_(min=0.0).sqrt_()  # like ``own``, times the scale
        widened = torch.sub(own * cos_margin, sine, alpha=sin_margin)
        slope = masked(own / sine, sine > 0).mul_(sin_margin).add_(cos_margin)
        near = own >= -scale * cos_margin
        return torch.where(near, widened, own - scale * self.margin * sin_margin), masked(slope, near, 1.0)

    def pool(self, similarities: Tensor) -> tuple[Tensor, Tensor]:
        nearest, which = similarities.max(dim=2, keepdim=True)
        return nearest.squeeze(2), torch.zeros_like(similarities).scatter_(2, which, 1.0)
