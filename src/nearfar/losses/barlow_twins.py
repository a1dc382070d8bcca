"""Barlow Twins: redundancy reduction."""

import torch
from torch import Tensor

from nearfar.engine import LossBatch, masked
from nearfar.engine.rows import masks
from nearfar.losses.base import Loss, register
from nearfar.utils.validation import non_negative

EPSILON = 1e-5  # added to variances, as in batch normalization


@register("barlow_twins", "Zbontar et al. 2021")
class BarlowTwins(Loss):
    """Makes each coordinate equal for positives and uncorrelated with all others; negatives are not used.

    Formula:
        C = mean over positive pairs (i, j) of ẑ_i ẑ'_jᵀ, [d, d]
        loss = Σ_k (1 − C_kk)² + redundancy · Σ_{k≠l} C_kl²
        ẑ: the embeddings, each coordinate with mean 0 and variance 1 over the batch;  ẑ': the same for the gallery or,
        without one, the embeddings

    Args:
        redundancy: λ, weight of the correlations of different coordinates. The paper uses 0.005.

    Differences:
        Two views of the same images are given as embeddings and gallery, with the numbers of the images as labels. In a
        labeled batch, members of a class are views of it. Without positive pairs the loss is 0.

    Reference:
        Zbontar et al., "Barlow Twins: Self-Supervised Learning via Redundancy Reduction", ICML 2021.

    Example:
        >>> import torch, nearfar as nf
        >>> views, items = (torch.randn(8, 4), torch.randn(8, 4)), torch.arange(8)
        >>> nf.losses.BarlowTwins()(views[0], items, views[1], items).shape
        torch.Size([])
    """

    cuda_graph = deterministic = True

    def __init__(self, *, redundancy: float = 0.005) -> None:
        super().__init__()
        self.redundancy = non_negative("redundancy", redundancy)

    def compute(self, batch: LossBatch) -> Tensor:
        constants = batch.labels, batch.column_labels, batch.positions
        return self.differentiate(self._loss, (batch.embeddings, batch.gallery), constants)

    def _loss(
        self,
        embeddings: Tensor,
        gallery: Tensor | None,
        labels: Tensor,
        gallery_labels: Tensor,
        positions: Tensor | None,
    ) -> Tensor:
        first = second = _standardized(embeddings)
        if gallery is not None:
            second = _standardized(gallery)
        positives, _ = masks(labels, gallery_labels, 0 if gallery is None else positions)
        number = positives.sum()
        correlations = first.T @ (positives.to(first.dtype) @ second) / number.clamp(min=1)
        diagonal = correlations.diagonal()
        others = correlations.square().sum() - diagonal.square().sum()
        return masked((1.0 - diagonal).square().sum() + self.redundancy * others, (number > 0) | diagonal.isnan().any())


def _standardized(view: Tensor) -> Tensor:
    """Coordinates with mean 0 and variance 1; NaN if a variance overflows."""
    centered = view - view.mean(dim=0)
    variances = centered.square().mean(dim=0)
    return centered / torch.add(variances, variances.detach(), alpha=0.0).add(EPSILON).sqrt()
