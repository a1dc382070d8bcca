"""VICReg: variance, invariance and covariance."""

from collections.abc import Sequence

from torch import Tensor

from nearfar.engine import LossBatch, Mean, Tile, masked, row_sum
from nearfar.engine.rows import count
from nearfar.engine.tiles import RowLoss, row_loss
from nearfar.losses.base import Loss, register
from nearfar.utils.validation import non_negative

EPSILON = 1e-4  # added to variances


@register("vicreg", "Bardes et al. 2022")
class VICReg(Loss, RowLoss):
    """Makes positives equal, while every coordinate varies and no two are correlated; negatives are not used.

    Formula:
        loss = invariance · mean over positive pairs of ‖z_i − z'_j‖² / d
             + variance · ½ (v(Z) + v(Z')) + covariance · (c(Z) + c(Z'))
        v(Z) = mean over coordinates k of [1 − √(Var(z_k) + 0.0001)]+
        c(Z) = 1/d Σ_{k≠l} Cov(z_k, z_l)²
        Z: the embeddings, [m, d], not normalized;  Z': the gallery or, without one, the embeddings

    Args:
        invariance: λ, weight of the distances of positives.
        variance: μ, weight of the variances.
        covariance: ν, weight of the covariances.

    Differences:
        Two views of the same images are given as embeddings and gallery, with the numbers of the images as labels. In a
        labeled batch, members of a class are views of it. As in the authors' code, the variances of the two views are
        averaged; the paper prints their sum.

    Reference:
        Bardes et al., "VICReg: Variance-Invariance-Covariance Regularization for Self-Supervised Learning", ICLR 2022.

    Example:
        >>> import torch, nearfar as nf
        >>> views, items = (torch.randn(8, 4), torch.randn(8, 4)), torch.arange(8)
        >>> nf.losses.VICReg()(views[0], items, views[1], items).shape
        torch.Size([])
    """

    cuda_graph = deterministic = True
    measure = "squared_euclidean"
    normalize = False
    closed_form = True

    def __init__(self, *, invariance: float = 25.0, variance: float = 25.0, covariance: float = 1.0) -> None:
        super().__init__()
        self.invariance = non_negative("invariance", invariance)
        self.variance = non_negative("variance", variance)
        self.covariance = non_negative("covariance", covariance)

    def compute(self, batch: LossBatch) -> Tensor:
        loss, first = row_loss(self, batch), self.differentiate(self.spread, (batch.embeddings,))
        return loss + first + (first if batch.gallery is None else self.differentiate(self.spread, (batch.gallery,)))

    def on_tile(self, tile: Tile) -> Sequence[Mean]:
        terms, factor = masked(tile.values, tile.positives), self.invariance / tile.dim
        pull = row_sum(terms, tile.positives.to(terms.dtype)) * factor
        return [Mean(pull, count(tile.positives, terms))]

    def spread(self, view: Tensor) -> Tensor:
        """Return the weighted terms of the variances and covariances of one view, [m, d]; 0 for a single embedding."""
        size, dim = view.shape
        if size < 2:
            return view.sum() * 0.0
        centered = view - view.mean(dim=0)
        covariances = centered.T @ centered / (size - 1)
        variances = covariances.diagonal()
        narrow = (1.0 - (variances + EPSILON).sqrt()).relu().mean()
        correlated = (covariances.square().sum() - variances.square().sum()) / dim
        return 0.5 * self.variance * narrow + self.covariance * correlated
