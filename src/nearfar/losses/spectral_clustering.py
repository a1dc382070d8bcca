"""Spectral clustering loss: compares the projections of labels and of embeddings."""

import warnings

import torch
from torch import Tensor

from nearfar.engine import LossBatch, masked, unit
from nearfar.engine.autograd import LossComputation, differentiable
from nearfar.losses.base import Loss, refuse_gallery, register

# Up to this ratio of squared singular values, a Cholesky decomposition in float64 is as exact as the points.
LARGEST_CONDITION = {torch.float32: 1e8, torch.float64: 1e4}


@register("spectral_clustering", "RLL 2.1.2")
class SpectralClustering(Loss):
    """Makes the coordinates of the embeddings span the same space as the indicators of the classes.

    Formula:
        loss = ½ ‖C − F F⁺‖²,  F the embeddings, [m, d], and C_ij = [y_i = y_j] / size of the class
        gradient by F: −2 (I − F F⁺) C (F⁺)ᵀ

    Differences:
        If m ≤ d embeddings are linearly independent, F F⁺ = I and nothing is learned; a warning says so once. Singular
        values up to max(m, d) · eps · the largest count as 0. A batch of full rank that is well conditioned takes a
        Cholesky decomposition in float64, any other one a singular value decomposition. On a GPU the host waits for it.

    Reference:
        Law et al., "Deep Spectral Clustering Learning", ICML 2017. RLL 2.1.2.

    Example:
        >>> import torch, nearfar as nf
        >>> nf.losses.SpectralClustering()(torch.eye(4)[:, :2], torch.tensor([0, 0, 1, 1]))
        tensor(1.)
    """

    deterministic = True

    def __init__(self) -> None:
        super().__init__()
        self._warned = False

    def compute(self, batch: LossBatch) -> Tensor:
        refuse_gallery(self, batch, "clusters the batch")
        (count, dim), points = batch.embeddings.shape, unit(batch.embeddings)
        same = batch.labels.unsqueeze(1) == batch.labels
        ideal = same / same.sum(dim=1, dtype=points.dtype)
        constant = points.detach()
        value, gradient, rank = projection_gap(constant.nan_to_num(), ideal)
        value = torch.add(
            value, constant.sum(), alpha=0.0
        )  # the decomposition does not accept NaN, so it is added here
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

    The gradient is a closed form for projections. Differentiating a decomposition would divide by the differences
    between singular values.
    """
    count, dim = points.shape
    wide = points.double()
    squares = wide @ wide.T if count <= dim else wide.T @ wide
    lower, failed = torch.linalg.cholesky_ex(squares)
    inverse = torch.linalg.solve_triangular(
        lower, torch.eye(len(lower), dtype=lower.dtype, device=lower.device), upper=False
    )
    # The largest over the smallest eigenvalue is at most this product.
    condition = squares.trace() * inverse.square().sum()
    largest = min(LARGEST_CONDITION[points.dtype], _tolerance(points) ** -2)
    if not bool((failed == 0) & (condition < largest)):
        return _by_singular_values(points, ideal)
    rank = torch.full((), min(count, dim), device=points.device)
    if count <= dim:
        identity = torch.eye(count, dtype=points.dtype, device=points.device)
        return 0.5 * (ideal - identity).square().sum(), torch.zeros_like(points), rank
    basis = (wide @ inverse.T).to(points.dtype)  # orthonormal columns
    seen = ideal @ basis
    # ‖C − P‖² = tr C + tr P − 2 tr CP, and ‖Q − CQ‖² = tr P − tr CP.
    value = 0.5 * (ideal.trace() - dim) + (basis - seen).square_().sum()
    beyond = torch.addmm(seen, basis, basis.T @ seen, alpha=-1.0)  # (I − P) C Q
    return value.relu_(), beyond @ inverse.to(points.dtype).mul_(-2.0), rank


def _by_singular_values(points: Tensor, ideal: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same for points of any rank."""
    left, values, right = torch.linalg.svd(points, full_matrices=False)
    kept = values > _tolerance(points) * values[:1]
    left, rank = left * kept, kept.sum()
    value = 0.5 * (ideal - left @ left.T).square().sum()
    seen = ideal @ left
    beyond = torch.addmm(seen, left, left.T @ seen, alpha=-1.0)  # (I − P) C U
    inverse = masked(values.reciprocal(), kept & (rank < len(points)))  # P = I has exactly no gradient
    return value, beyond.mul_(-2.0 * inverse) @ right, rank


def _tolerance(points: Tensor) -> float:
    """The ratio to the largest singular value up to which one counts as 0."""
    return max(points.shape) * torch.finfo(points.dtype).eps
