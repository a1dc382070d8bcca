"""SoftTriple: several centers for each class."""

import torch
from torch import Tensor

from nearfar.engine import masked, unit
from nearfar.losses.base import register
from nearfar.losses.proxies import ClassificationLoss
from nearfar.utils.tensors import blocks
from nearfar.utils.validation import non_negative, positive, whole

SHARE_BYTES = 1 << 24  # of the shares of all centers that exist at once
NO_GAMMA = 1e-17  # counts as 0: the centers of a class have equal shares, even in float64


@register("soft_triple", "Thesis 2.30")
class SoftTriple(ClassificationLoss):
    """Classifies by a soft maximum over several centers per class, and lets the centers of a class merge.

    Formula:
        S_c = Σ_k softmax_k(gamma · x·w_ck) x·w_ck
        ℓ_i = −log e^(alpha (S_y − margin)) / (e^(alpha (S_y − margin)) + Σ_{c≠y} e^(alpha S_c))
        loss = mean of ℓ_i + tau · Σ_c Σ_{t<u} √(2 − 2 w_ct·w_cu) / (C·K(K − 1))

    Args:
        centers: Number K of centers per class; the parameter ``proxies`` has the shape [num_classes, centers, dim].
        alpha: Steepness over classes.
        gamma: Steepness over the centers of a class. It is a factor; some implementations divide by it.
        tau: Weight of the distances between centers.
        margin: λ. The paper uses 0.01.

    Differences:
        The thesis prints the formula for one center. Equal centers do not move each other.

    Reference:
        Qian et al., "SoftTriple Loss: Deep Metric Learning Without Triplet Sampling", ICCV 2019. Thesis 2.30.

    Example:
        >>> import torch, nearfar as nf
        >>> loss = nf.losses.SoftTriple(num_classes=2, dim=4, centers=3)
        >>> loss(torch.eye(4), torch.tensor([0, 0, 1, 1])).backward()
        >>> loss.proxies.grad.shape
        torch.Size([2, 3, 4])
    """

    cuda_graph = deterministic = mean_over_anchors = True
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
        count = whole("centers", centers)
        super().__init__(num_classes, dim, sample_rate, lr_multiplier, count)
        self.centers = count
        self.alpha = positive("alpha", alpha)
        self.gamma, self.tau = non_negative("gamma", gamma), non_negative("tau", tau)
        self.margin = non_negative("margin", margin)

    @property
    def sharpness(self) -> float:
        return self.alpha

    def target(self, similarity: Tensor) -> tuple[Tensor, None]:
        return similarity - self.alpha * self.margin, None

    @property
    def pool_scale(self) -> float:  # type: ignore[override]
        return self.gamma if self.gamma > NO_GAMMA else 1.0

    def pool(self, similarities: Tensor) -> tuple[Tensor, Tensor]:
        if self.gamma <= NO_GAMMA:
            return similarities.mean(dim=2), torch.full_like(similarities, 1.0 / similarities.shape[2])
        pooled, slopes = torch.empty_like(similarities[:, :, 0]), torch.empty_like(similarities)
        for rows in blocks(similarities.flatten(1), SHARE_BYTES):
            part, slope = similarities[rows], slopes[rows]
            shares = torch.softmax(part, dim=2)
            torch.sum(torch.mul(shares, part, out=slope), dim=2, out=pooled[rows])
            slope.addcmul_(shares, (1.0 - pooled[rows]).unsqueeze(2))  # shares · (1 + similarity − pooled)
        return pooled, slopes

    def proxy_cost(self, similarities: Tensor) -> tuple[Tensor, Tensor]:
        distances = _distances(similarities)
        weight = self.tau / max(1, self.centers * (self.centers - 1))
        # Each pair occurs in the matrix twice, and d/ds √(2 − 2s) = −1/√(2 − 2s).
        return 0.5 * weight * distances.sum(), masked(distances.reciprocal(), distances > 0).mul_(-weight)

    @torch.no_grad()
    def distinct_centers(self, tolerance: float = 0.1) -> Tensor:
        """Count the distinct centers that each class still has, [num_classes].

        The regularizer merges superfluous centers. So if the numbers are below ``centers``, it was large enough.

        Args:
            tolerance: A center counts if its distance to every center counted before it is larger than this.
        """
        non_negative("tolerance", tolerance)
        points = unit(self.proxies)
        merged = _distances(points @ points.transpose(1, 2)) <= tolerance
        counted = torch.zeros(merged.shape[:2], dtype=torch.bool, device=merged.device)
        for center in range(self.centers):
            counted[:, center] = ~(merged[:, center] & counted).any(dim=1)
        return counted.sum(dim=1)


def _distances(similarities: Tensor) -> Tensor:
    """Distances of unit vectors from their cosines, [c, k, k]; 0 on the diagonal and below the rounding error."""
    squares = 2.0 - 2.0 * similarities
    squares.diagonal(dim1=1, dim2=2).zero_()
    return squares.clamp_(min=0.0).sqrt_()
