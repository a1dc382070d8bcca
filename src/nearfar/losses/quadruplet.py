"""Quadruplet loss."""

import torch
from torch import Tensor

from nearfar.engine import LossBatch
from nearfar.engine.autograd import Gradients, LossComputation, Needed, Tensors, differentiable
from nearfar.engine.measures import create as measure
from nearfar.engine.measures import propagate_nan
from nearfar.engine.rows import masks
from nearfar.losses.base import Loss, refuse_gallery, register
from nearfar.utils.validation import number

MOST_TERMS = 1 << 22  # quadruplets that are computed at once


@register("quadruplet", "NRA Table II")
class Quadruplet(Loss):
    """Triplets, and in addition every positive pair is nearer than every pair of two other classes.

    Formula:
        loss = mean over triplets of [d²_ap − d²_an + margin]+
             + mean over positive pairs (a, p) and pairs (m, n) of two other classes of [d²_ap − d²_mn + second_margin]+

    Args:
        margin: m₁, of the triplets.
        second_margin: m₂, of pairs without a common member; smaller than m₁ in the paper.

    Differences:
        All triplets and quadruplets of the batch are used, and the margins are constants; the paper sets them from the
        mean distances of each batch. The time grows with positive pairs times negative pairs; the
        memory does not. The loss compares pairs without a common member, so it is no function of the anchor's row and
        has no pair weights. On a GPU the host waits for the number of positive pairs.

    Reference:
        Chen et al., "Beyond Triplet Loss: A Deep Quadruplet Network for Person Re-Identification", CVPR 2017. Huang et
        al. train PDDM with a quadruplet loss: NRA Table II.

    Example:
        >>> import torch, nearfar as nf
        >>> nf.losses.Quadruplet()(torch.eye(6), torch.tensor([0, 0, 1, 1, 2, 2]))
        tensor(1.5000)
    """

    deterministic = True  # no CUDA graph: the host waits for the number of positive pairs

    def __init__(self, *, margin: float = 1.0, second_margin: float = 0.5) -> None:
        super().__init__()
        self.margin, self.second_margin = number("margin", margin), number("second_margin", second_margin)

    def compute(self, batch: LossBatch) -> Tensor:
        refuse_gallery(self, batch, "compares pairs of the batch")
        return differentiable(LossComputation(self._value_and_gradients, (batch.labels,)), (batch.embeddings,))

    def _value_and_gradients(self, inputs: Tensors, constants: Tensors, needed: Needed) -> tuple[Tensor, Gradients]:
        """The loss and the gradient by the embeddings, some positive pairs at a time."""
        (embeddings,), (labels,) = inputs, constants
        assert embeddings is not None
        assert labels is not None
        comparison = measure("squared_euclidean")
        prepared = comparison.prepare(embeddings)
        squares = comparison.pairwise(prepared, prepared)
        pos, neg = masks(labels, labels, own_columns=0)
        first, second = pos.nonzero().T
        weights = torch.zeros_like(squares)  # ∂loss/∂d²
        total = squares.new_zeros(())
        triplets = (pos.sum(dim=1) * neg.sum(dim=1)).sum().clamp(min=1)
        # Pairs (m, n) of two classes, without those of the positive pair: by class, one for each anchor's class.
        of_others = neg.sum() - 2 * neg.sum(dim=1) * (pos.sum(dim=1) + 1)
        quadruplets = (pos.sum(dim=1) * of_others).sum().clamp(min=1)
        step = max(1, MOST_TERMS // squares.numel())
        for start in range(0, len(first), step):
            rows = slice(start, start + step)
            anchors, distances = first[rows], squares[first[rows], second[rows]]
            gaps = (distances.unsqueeze(1) - squares[anchors] + self.margin).relu() * neg[anchors]
            active = gaps.sign() / triplets
            total += gaps.sum() / triplets
            weights.index_add_(0, anchors, active, alpha=-1.0)
            apart = neg[anchors].unsqueeze(2) & neg[anchors].unsqueeze(1) & neg
            wide = (distances.view(-1, 1, 1) - squares + self.second_margin).relu_() * apart
            total += wide.sum() / quadruplets
            signs = wide.sign_().div_(quadruplets)
            weights -= signs.sum(dim=0)
            weights.index_put_((anchors, second[rows]), active.sum(dim=1) + signs.sum(dim=(1, 2)), accumulate=True)
        loss = propagate_nan(total, prepared, prepared)
        if not needed[0]:
            return loss, [None]
        weights = comparison.to_dot(weights, squares)
        gradient = comparison.product(weights + weights.T, prepared.points, prepared.points)
        return loss, [comparison.to_embeddings(gradient, prepared)]
