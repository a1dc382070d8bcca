"""AdaFace: a margin that depends on the length of the embedding."""

import math

import torch
from torch import Tensor

from nearfar.engine import LossBatch, masked
from nearfar.losses.base import register
from nearfar.losses.proxies import ClassificationLoss
from nearfar.utils.validation import number, positive

SMALLEST_SPREAD = 1e-3  # added to the standard deviation of lengths


@register("adaface", "Kim et al. 2022")
class AdaFace(ClassificationLoss):
    """Classifies by angles with a margin that is adapted to the quality of each image, read off its embedding's length.

    Formula:
        q = clip((‖x‖ − μ) / (σ / concentration), −1, 1), with μ and σ the mean and standard deviation of ‖x‖
        target = scale · (cos(θ_y − margin·q) − margin·q − margin)
        ℓ_i = −log e^target / (e^target + Σ_{c≠y} e^(scale·cos θ_c))

    Args:
        margin: m. Short embeddings (q = −1) get the margin of ArcFace, usual ones (q = 0) that of CosFace.
        concentration: h. The smaller, the fewer embeddings reach q = ±1.
        scale: s, the factor of the cosines.
        momentum: Share of the old values when μ and σ are updated with those of a batch.

    Differences:
        μ and σ are the buffers ``length_mean`` and ``length_std``. The first batch sets them, where the authors' code
        starts from 20 and 100; in evaluation mode they do not change. As in the authors' code, q has no gradient, and
        the angle θ_y − margin·q is kept between 0 and π.

    Reference:
        Kim et al., "AdaFace: Quality Adaptive Margin for Face Recognition", CVPR 2022.

    Example:
        >>> import torch, nearfar as nf
        >>> loss = nf.losses.AdaFace(num_classes=2, dim=4)
        >>> loss(torch.eye(4), torch.tensor([0, 0, 1, 1])).backward()
        >>> loss.length_mean
        tensor(1.)
    """

    cuda_graph = deterministic = True
    length_mean: Tensor
    length_std: Tensor

    def __init__(
        self,
        *,
        num_classes: int,
        dim: int,
        margin: float = 0.4,
        concentration: float = 0.333,
        scale: float = 64.0,
        momentum: float = 0.99,
        sample_rate: float = 1.0,
        lr_multiplier: float = 10.0,
    ) -> None:
        super().__init__(num_classes, dim, sample_rate, lr_multiplier)
        self.margin = number("margin", margin, low=0.0, high=math.pi / 2)
        self.concentration = positive("concentration", concentration)
        self.scale = positive("scale", scale)
        self.momentum = number("momentum", momentum, low=0.0, high=1.0)
        for name in ("length_mean", "length_std"):
            self.register_buffer(name, torch.tensor(math.nan))  # NaN: not known yet

    @torch.no_grad()
    def anchor_values(self, batch: LossBatch) -> Tensor:
        lengths: Tensor = torch.linalg.vector_norm(batch.embeddings, dim=1)
        mean = lengths.mean()
        std = ((lengths - mean).square().sum() / max(1, len(lengths) - 1)).sqrt()
        mean, std = (self._running(*pair) for pair in ((self.length_mean, mean), (self.length_std, std)))
        return ((lengths - mean) * self.concentration / (std + SMALLEST_SPREAD)).clamp(-1.0, 1.0)

    def _running(self, kept: Tensor, measured: Tensor) -> Tensor:
        """The statistic to use: the kept one, or that of the batch if none is kept; updated in training."""
        old = torch.where(kept.isnan(), measured.to(kept.dtype), kept)
        if not self.training:
            return old
        new = old.lerp(measured.to(kept.dtype), 1.0 - self.momentum)
        kept.copy_(torch.where(new.isfinite(), new, kept))
        return new

    def anchored_target(self, similarity: Tensor, anchor_values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        cosine, angle = similarity / self.scale, -self.margin * anchor_values
        cos_angle, sin_angle = angle.cos(), angle.sin()
        sine = (1.0 - cosine.square()).clamp_(min=0.0).sqrt_()
        turned = cosine * cos_angle - sine * sin_angle
        slope = cos_angle + masked(cosine / sine, sine > 0) * sin_angle
        low, high = (angle < 0) & (cosine > cos_angle), (angle > 0) & (cosine < -cos_angle)  # beyond 0 and π
        turned = masked(masked(turned, ~low, 1.0), ~high, -1.0)
        target = self.scale * (turned + angle - self.margin)
        return target, masked(slope, ~(low | high)), torch.zeros_like(target)
