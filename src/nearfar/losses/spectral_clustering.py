"""Spectral clustering loss: compares the projections of labels and of embeddings."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from nearfar.engine import LossComputation, differentiable, masked, unit
from nearfar.losses.base import Loss, refuse_gallery
from nearfar.losses.registry import register


@register
class SpectralClustering(Loss):
    """Makes the coordinates of the embeddings span the same space as the indicators of the classes.

    Formula:
        loss = ½ ‖C − F F⁺‖²,  F the embeddings, [m, d], and C_ij = [y_i = y_j] / size of the class
        gradient by F: −2 (I − F F⁺) C (F⁺)ᵀ

    Differences:
        If m ≤ d embeddings are linearly independent, F F⁺ = I and nothing is learned; a warning says so once. Singular
        values up to max(m, d) · eps · the largest count as 0. On a GPU the host waits for the decomposition of F.

    Reference:
        Law et al., "Deep Spectral Clustering Learning", ICML 2017. RLL 2.1.2.

    Example:
        >>> import torch, nearfar as nf
        >>> labels = torch.tensor([0, 0, 1, 1])
        >>> nf.losses.SpectralClustering()(torch.eye(4)[:, :2], labels)
        tensor(1.)
    """

    key = "spectral_clustering"
    source = "RLL 2.1.2"
    deterministic = True

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
        value = torch.add(value, found.sum(), alpha=0.0)  # the decomposition does not accept NaN, so it is added here
        if count <= dim and not self._warned and int(rank) == count:
            self._warned = True
            warnings.warn(
                "SpectralClustering needs more embeddings than dimensions: "
                f"from {count} of dimension {dim} nothing is learned",
                stacklevel=2,
            )
        gradients: list[Tensor | None] = [gradient]
        return differentiable(LossComputation(lambda *_: (value, gradients)), (points,))


def projection_gap(points: Tensor, ideal: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute ½‖ideal − P‖² for the projection P onto the columns of ``points``, its gradient by them, and P's rank.

    The gradient is a closed form for projections. Differentiating the decomposition would divide by the differences
    between singular values.
    """
    left, values, right = torch.linalg.svd(points, full_matrices=False)
    kept = values > max(points.shape) * torch.finfo(points.dtype).eps * values[:1]
    left, rank = left * kept, kept.sum()
    value = 0.5 * (ideal - left @ left.T).square().sum()
    seen = ideal @ left
    beyond = torch.addmm(seen, left, left.T @ seen, alpha=-1.0)  # (I − P) C U
    inverse = masked(values.reciprocal(), kept & (rank < len(points)))  # P = I has exactly no gradient
    return value, beyond.mul_(-2.0 * inverse) @ right, rank
