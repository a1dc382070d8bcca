"""SoftTriple: several centres for each class."""

from __future__ import annotations

import torch
from torch import Tensor

from nearfar.engine import masked, unit
from nearfar.losses.proxies import ClassificationLoss
from nearfar.losses.registry import register
from nearfar.utils.validation import non_negative, positive, whole


@register
class SoftTriple(ClassificationLoss):
    """Classifies by the nearest of several centres, softly, and lets centres of a class merge.

    Formula:
        S_c = Σ_k softmax_k(gamma · x·w_ck) x·w_ck
        ℓ_i = −log e^(alpha (S_y − margin)) / (e^(alpha (S_y − margin)) + Σ_{c≠y} e^(alpha S_c))
        loss = mean of ℓ_i + tau · Σ_c Σ_{t<u} √(2 − 2 w_ct·w_cu) / (C·K(K − 1))

    Args:
        num_classes, dim: How many classes, and the length of an embedding.
        centers: K = 10 for each class, the parameter ``proxies`` of shape [num_classes, centers, dim].
        alpha: Sharpness over classes, 20.
        gamma: Sharpness over the centres of a class, 10. It multiplies; some codes divide by it.
        tau: Weight of the distances between centres, 0.2.
        margin: Λ = 0.1 (the paper: 0.01).
        sample_rate: 1; below: compare with the classes of the batch and a random part of the others.
        lr_multiplier: Learning rate of the proxies over that of the network, 100.

    Differences:
        The thesis prints the case of one centre. Equal centres do not move each other.

    Reference:
        Qian et al.: SoftTriple Loss: Deep Metric Learning Without Triplet Sampling, 2019.
    """

    key = "soft_triple"
    source = "Thesis 2.30"
    pools = True
    penalizes = True

    def __init__(
        self,
        *,
        num_classes: int,
        dim: int,
        centers: int = 10,
        alpha: float = 20.0,
        gamma: float = 10.0,
        tau: float = 0.2,
        margin: float = 0.1,
        sample_rate: float = 1.0,
        lr_multiplier: float = 100.0,
    ) -> None:
        self_centers = whole("centers", centers)
        super().__init__(num_classes, dim, sample_rate, lr_multiplier, self_centers)
        self.centers = self_centers
        self.alpha = positive("alpha", alpha)
        self.gamma, self.tau = non_negative("gamma", gamma), non_negative("tau", tau)
        self.margin = non_negative("margin", margin)

    @property
    def sharpness(self) -> float:
        return self.alpha

    def target(self, own: Tensor) -> tuple[Tensor, None]:
        return own - self.alpha * self.margin, None

    def pool(self, similarities: Tensor) -> tuple[Tensor, Tensor]:
        shares = torch.softmax(self.gamma * similarities, dim=2)
        weighted = shares * similarities
        pooled = weighted.sum(dim=2)
        # shares · (1 + gamma (similarity − pooled)), in place
        slopes = weighted.mul_(self.gamma).addcmul_(shares, (1.0 - self.gamma * pooled).unsqueeze(2))
        return pooled, slopes

    def penalty(self, similarities: Tensor) -> tuple[Tensor, Tensor]:
        distances = _distances(similarities)
        weight = self.tau / max(1, self.centers * (self.centers - 1))
        # Each pair stands in the matrix twice, and d/ds √(2 − 2s) = −1/√(2 − 2s).
        return 0.5 * weight * distances.sum(), masked(distances.reciprocal(), distances > 0).mul_(-weight)

    @torch.no_grad()
    def distinct_centers(self, tolerance: float = 0.1) -> Tensor:
        """How many different centres each class still has, [num_classes].

        A centre counts if it is farther than ``tolerance`` (a distance of unit vectors) from every centre
        counted before it. The regulariser draws superfluous centres together, so this tells whether
        ``centers`` was large enough: it was where the numbers are below it.
        """
        non_negative("tolerance", tolerance)
        points = unit(self.proxies)
        near = _distances(points @ points.transpose(1, 2)) <= tolerance
        counted = torch.zeros(near.shape[:2], dtype=torch.bool, device=near.device)
        for center in range(self.centers):
            counted[:, center] = ~(near[:, center] & counted).any(dim=1)
        return counted.sum(dim=1)


def _distances(similarities: Tensor) -> Tensor:
    """Distances of unit vectors from their cosines, [c, k, k]; 0 on the diagonal and where rounding decides."""
    squares = 2.0 - 2.0 * similarities
    squares.diagonal(dim1=1, dim2=2).zero_()
    return squares.clamp_(min=0.0).sqrt_()
