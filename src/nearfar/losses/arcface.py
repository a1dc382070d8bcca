"""ArcFace: a margin on the angle."""

import math

import torch
from torch import Tensor

from nearfar.engine import masked
from nearfar.losses.base import register
from nearfar.losses.proxies import ClassificationLoss
from nearfar.utils.validation import number, positive, whole


@register("arcface", "Thesis 2.29")
class ArcFace(ClassificationLoss):
    """Classifies by angles, with a margin added to the angle between an embedding and its own proxy.

    Formula:
        ℓ_i = −log e^(scale·cos(θ_y + margin)) / (e^(scale·cos(θ_y + margin)) + Σ_{c≠y} e^(scale·cos θ_c))
        θ_c: angle to the proxy of class c or, if it has several, to the nearest of them

    Args:
        centers: Number K of proxies per class. With several (the paper: 3) this is Sub-center ArcFace, for noisy
            labels, and the parameter ``proxies`` has the shape [num_classes, centers, dim].
        margin: λ in radians, at most π/2. 0.5 is 28.6°.
        scale: s, the factor of the cosines. The paper uses 64.

    Differences:
        For θ_y + margin > π the cosine would increase again; as in the authors' code, cos θ_y − margin·sin(margin) is
        used there. At θ_y = 0 and θ_y = π, where the angle has no derivative, only cos θ_y has a gradient. Among
        equally near centers the first is used. The Sub-center paper later drops all but one center of a class and the
        samples far from it; here all stay.

    Reference:
        Deng et al., "ArcFace: Additive Angular Margin Loss for Deep Face Recognition", CVPR 2019. Thesis 2.29.
        Deng et al., "Sub-center ArcFace: Boosting Face Recognition by Large-Scale Noisy Web Faces", ECCV 2020.

    Example:
        >>> import torch, nearfar as nf
        >>> loss = nf.losses.ArcFace(num_classes=2, dim=4)
        >>> loss(torch.eye(4), torch.tensor([0, 0, 1, 1])).backward()
    """

    cuda_graph = deterministic = mean_over_anchors = True

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

    def target(self, similarity: Tensor) -> tuple[Tensor, Tensor]:
        scale, cos_margin, sin_margin = self.scale, math.cos(self.margin), math.sin(self.margin)
        sine = (scale**2 - similarity * similarity).clamp_(min=0.0).sqrt_()  # like the similarity, times the scale
        widened = torch.sub(similarity * cos_margin, sine, alpha=sin_margin)
        slope = masked(similarity / sine, sine > 0).mul_(sin_margin).add_(cos_margin)
        within = similarity >= -scale * cos_margin
        return torch.where(within, widened, similarity - scale * self.margin * sin_margin), masked(slope, within, 1.0)

    def pool(self, similarities: Tensor) -> tuple[Tensor, Tensor]:
        nearest, which = similarities.max(dim=2, keepdim=True)
        return nearest.squeeze(2), torch.zeros_like(similarities).scatter_(2, which, 1.0)
