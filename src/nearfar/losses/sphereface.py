"""SphereFace: a margin that multiplies the angle."""

import math

import torch
from torch import Tensor

from nearfar.engine import LossBatch
from nearfar.engine.measures import inverse
from nearfar.losses.base import register
from nearfar.losses.proxies import ClassificationLoss
from nearfar.utils.validation import positive, whole


@register("sphereface", "Liu et al. 2017")
class SphereFace(ClassificationLoss):
    """Classifies by angles, with the angle between an embedding and its own proxy multiplied by a margin.

    Formula:
        ψ(θ) = (−1)^k cos(margin·θ) − 2k  for  θ ∈ [kπ/margin, (k + 1)π/margin]
        ℓ_i = −log e^(scale·ψ(θ_y)) / (e^(scale·ψ(θ_y)) + Σ_{c≠y} e^(scale·cos θ_c))

    Args:
        margin: m, a whole number. 1 is no margin. The paper uses 4.
        scale: Factor of ψ and of the cosines; None: the length of the embedding, as in the paper.

    Differences:
        The authors' code starts with plain cosines and blends ψ in, because the margin of 4 is hard to begin with.
        Here a training can begin with a stage of another loss, or with a smaller margin.

    Reference:
        Liu et al., "SphereFace: Deep Hypersphere Embedding for Face Recognition", CVPR 2017.

    Example:
        >>> import torch, nearfar as nf
        >>> loss = nf.losses.SphereFace(num_classes=2, dim=4, margin=2)
        >>> loss(torch.eye(4), torch.tensor([0, 0, 1, 1])).backward()
    """

    cuda_graph = deterministic = mean_over_anchors = True
    scale: float | None  # type: ignore[assignment]

    def __init__(
        self,
        *,
        num_classes: int,
        dim: int,
        margin: int = 4,
        scale: float | None = None,
        sample_rate: float = 1.0,
        lr_multiplier: float = 10.0,
    ) -> None:
        super().__init__(num_classes, dim, sample_rate, lr_multiplier)
        self.margin = whole("margin", margin)
        self.scale = None if scale is None else positive("scale", scale)

    @property
    def raw_embeddings(self) -> bool:  # type: ignore[override]
        return self.scale is None

    @property
    def sharpness(self) -> float:
        return 1.0 if self.scale is None else self.scale

    def anchor_values(self, batch: LossBatch) -> Tensor | None:
        return None if self.scale is not None else torch.linalg.vector_norm(batch.embeddings, dim=1)

    def target(self, similarity: Tensor) -> tuple[Tensor, Tensor]:
        psi, slope = self.psi(similarity / self.sharpness)
        return psi * self.sharpness, slope

    def anchored_target(self, similarity: Tensor, anchor_values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        cosine = similarity * inverse(anchor_values)
        psi, slope = self.psi(cosine)
        return psi * anchor_values, slope, psi - slope * cosine

    def psi(self, cosine: Tensor) -> tuple[Tensor, Tensor]:
        """Return ψ(θ) and its derivative by cos θ.

        cos(mθ) and its derivative m sin(mθ) / sin θ are Chebyshev polynomials of cos θ, so both are smooth.
        """
        cosine = cosine.clamp(-1.0, 1.0)
        before, value = torch.ones_like(cosine), cosine  # T₀, T₁
        slope_before, slope = torch.zeros_like(cosine), torch.ones_like(cosine)  # their derivatives
        for _ in range(self.margin - 1):
            before, value, slope_before, slope = (
                value,
                2.0 * cosine * value - before,
                slope,
                2.0 * value + 2.0 * cosine * slope - slope_before,
            )
        turns = (cosine.acos() * (self.margin / math.pi)).floor_().clamp_(max=self.margin - 1.0)
        sign = 1.0 - 2.0 * turns.remainder(2.0)
        return sign * value - 2.0 * turns, sign * slope
