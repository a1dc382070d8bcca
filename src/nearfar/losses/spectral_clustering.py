"""Spectral clustering loss: one projection by labels, one by embeddings."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from nearfar.engine import Step, differentiable, masked, unit
from nearfar.losses.base import Loss, refuse_gallery
from nearfar.losses.registry import register


@register
class SpectralClustering(Loss):
    """Wants the coordinates of the embeddings to span what the indicators of the classes span.

    Formula:
        loss = ½ ‖C − F F⁺‖²,  F the embeddings, [m, d], and C_ij = [y_i = y_j] / size of the class
        gradient by F: −2 (I − F F⁺) C (F⁺)ᵀ

    Differences:
        Where m ≤ d embeddings are linearly independent, F F⁺ = I whatever they are: nothing is learned, and a
        warning says so once. Singular values up to max(m, d) · eps · the largest count as 0. The
        decomposition of F makes the host wait for a GPU.

    Reference:
        Law, Urtasun, Zemel: Deep Spectral Clustering Learning, 2017.
    """

    key = "spectral_clustering"
    source = "RLL 2.1.2"

    def __init__(self) -> None:
        super().__init__()
        self._warned = False

    def compute(
        self,
        embeddings: Tensor,
        labels: Tensor,
        gallery: Tensor | None,
        gallery_labels: Tensor,
        positions: Tensor | None,
    ) -> Tensor:
        refuse_gallery(self, gallery, "clusters the batch")
        (count, dim), points = embeddings.shape, unit(embeddings)
        same = labels.unsqueeze(1) == labels
        ideal = same / same.sum(dim=1, dtype=points.dtype)
        found = points.detach()
        value, gradient, rank = projection_gap(found.nan_to_num(), ideal)
        value = torch.add(value, found.sum(), alpha=0.0)  # no decomposition takes NaN, so it shows here
        if count <= dim and not self._warned and int(rank) == count:
            self._warned = True
            warnings.warn(
                "SpectralClustering needs more embeddings than dimensions: "
                f"from {count} of dimension {dim} nothing is learned",
                stacklevel=2,
            )
        gradients: list[Tensor | None] = [gradient]
        loss: Tensor = differentiable(Step(lambda *_: (value, gradients)), (points,))
        return loss


def projection_gap(points: Tensor, ideal: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """½‖ideal − P‖² for the projection P onto the columns of ``points``, its gradient by them, and P's rank.

    The closed form is that of projections. Differentiating the decomposition would divide by the differences
    between singular values.
    """
    left, values, right = torch.linalg.svd(points, full_matrices=False)
    kept = values > max(points.shape) * torch.finfo(points.dtype).eps * values[:1]
    left, rank = left * kept, kept.sum()
    value = 0.5 * (ideal - left @ left.T).square().sum()
    seen = ideal @ left
    beyond = torch.addmm(seen, left, left.T @ seen, alpha=-1.0)  # (I − P) C U
    inverse = masked(values.reciprocal(), kept & (rank < len(points)))  # P = I has no gradient, to the last digit
    return value, beyond.mul_(-2.0 * inverse) @ right, rank
