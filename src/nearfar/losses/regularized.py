"""Regularizers of embeddings and of proxies, added to a loss."""

from collections.abc import Callable

import torch
from torch import Tensor

from nearfar.engine import LossBatch, unit
from nearfar.losses.base import Loss
from nearfar.losses.multiple import MultipleLosses
from nearfar.losses.proxies import ProxyLoss
from nearfar.utils.validation import non_negative, one_of


def _l1(embeddings: Tensor) -> Tensor:
    return embeddings.abs().sum(dim=1).mean()


def _l2(embeddings: Tensor) -> Tensor:
    return embeddings.square().sum(dim=1).mean()


def _zero_mean(embeddings: Tensor) -> Tensor:
    return embeddings.sum(dim=1).abs().mean()


def _center_invariant(proxies: Tensor) -> Tensor:
    squares = proxies.square().sum(dim=-1).flatten()
    return 0.25 * (squares - squares.mean()).square().mean()


def _orthogonal(proxies: Tensor) -> Tensor:
    points = unit(proxies).flatten(0, -2)
    count = len(points)
    # Σ cos² over all pairs is ‖W Wᵀ‖² = ‖Wᵀ W‖²: a matrix of dimensions instead of one of classes.
    return ((points.T @ points).square().sum() - points.square().sum()) / max(1, count * (count - 1))


def _sparse_centers(proxies: Tensor) -> Tensor:
    if proxies.ndim != 3 or proxies.shape[1] == 1:
        raise ValueError("regularizer 'sparse_centers' needs a loss with several centers per class")
    points, count = unit(proxies), proxies.shape[1]
    first, second = torch.triu_indices(count, count, offset=1, device=proxies.device)
    squares = (points[:, first] - points[:, second]).square().sum(dim=2)
    apart = squares > 0  # equal centers have no direction to move in
    lengths = torch.where(apart, torch.where(apart, squares, 1.0).sqrt(), 0.0)
    return lengths.sum() / (len(proxies) * count * (count - 1))


OF_EMBEDDINGS: dict[str, Callable[[Tensor], Tensor]] = {"l1": _l1, "l2": _l2, "zero_mean": _zero_mean}
OF_PROXIES: dict[str, Callable[[Tensor], Tensor]] = {
    "center_invariant": _center_invariant,
    "orthogonal": _orthogonal,
    "sparse_centers": _sparse_centers,
}
REGULARIZERS = (*OF_EMBEDDINGS, *OF_PROXIES)


class Regularized(MultipleLosses):
    """A loss with a regularizer of the embeddings or of its proxies.

    Formula:
        loss + weight · regularizer, with embeddings and proxies as they are unless said
        l1:                mean of Σ_k |x_k|
        l2:                mean of ‖x‖²
        zero_mean:         mean of |Σ_k x_k|
        center_invariant:  ¼ mean of (‖w‖² − mean ‖w‖²)²
        orthogonal:        mean over pairs of different proxies of cos²
        sparse_centers:    Σ_c Σ_{t<u} ‖w_ct − w_cu‖ / (C·K(K − 1)), of unit vectors, for K proxies per class

    Args:
        loss: The loss.
        regularizer: "l1", "l2" or "zero_mean" of the embeddings, or "center_invariant", "orthogonal" or
            "sparse_centers" of the proxies.
        weight: Weight of the regularizer.

    Differences:
        "l1" and "l2" have no effect on the direction of embeddings, but for losses that normalize them they keep their
        lengths small.

    Reference:
        Yuan et al., "Signal-to-Noise Ratio: A Robust Distance Metric for Deep Metric Learning", CVPR 2019 (zero_mean).
        Wu et al., "Deep Face Recognition with Center Invariant Loss", 2017 (center_invariant).
        Qian et al., "SoftTriple Loss: Deep Metric Learning Without Triplet Sampling", ICCV 2019 (sparse_centers).

    Example:
        >>> import torch, nearfar as nf
        >>> labels = torch.tensor([0, 0, 1, 1])
        >>> loss = nf.losses.Contrastive()
        >>> nf.losses.Regularized(loss, "l2", weight=0.5)(torch.eye(4), labels) - loss(torch.eye(4), labels)
        tensor(0.5000)
    """

    mean_over_anchors = MultipleLosses.mean_over_anchors

    def __init__(self, loss: Loss, regularizer: str, *, weight: float = 1.0) -> None:
        super().__init__([loss])
        self.regularizer = one_of("regularizer", regularizer, REGULARIZERS)
        self.weight = non_negative("weight", weight)
        if regularizer in OF_PROXIES and not self._proxies():
            raise ValueError(f"regularizer {regularizer!r} is for losses with proxies; {type(loss).__name__} has none")

    def _proxies(self) -> list[Tensor]:
        return [module.proxies for module in self.modules() if isinstance(module, ProxyLoss)]

    def compute(self, batch: LossBatch) -> Tensor:
        total = super().compute(batch)
        given = [batch.embeddings] if self.regularizer in OF_EMBEDDINGS else self._proxies()
        for vectors in given:
            # Computed with its gradient: the backward pass may run under autocast.
            total = total + self.weight * self.differentiate((OF_EMBEDDINGS | OF_PROXIES)[self.regularizer], (vectors,))
        return total
