"""N-pair loss."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import softplus

from nearfar.engine import FLOOR, Row, masked, positive_columns, row_logsumexp
from nearfar.losses.base import PairLoss
from nearfar.losses.registry import register
from nearfar.mining import Choice
from nearfar.utils.validation import non_negative


@register
class NPair(PairLoss):
    """Compares each positive with all negatives at once, by dot products of embeddings that are not normalized.

    Formula:
        ℓ_i = mean over j∈P_i of log(1 + Σ_{k∈N_i} e^(s_ik − s_ij)),  plus l2 · mean ‖e‖²

    Args:
        l2: Weight of the squared lengths. Nothing else keeps the embeddings small.
        mining: Which pairs are used.

    Differences:
        Every anchor uses all its positives; for a batch of pairs this is the loss of the paper. To compare anchors
        with the positives of all pairs only, as the paper does, pass the positives as gallery.

    Reference:
        Sohn, "Improved Deep Metric Learning with Multi-class N-pair Loss Objective", NIPS 2016. Thesis 2.22, NRA 4,
        RLL 2.

    Example:
        >>> import torch, nearfar as nf
        >>> labels = torch.tensor([0, 0, 1, 1])
        >>> nf.losses.NPair(l2=0.0)(torch.eye(4), labels)
        tensor(1.0986)
    """

    key = "n_pair"
    source = "Thesis 2.22, NRA 4, RLL 2"
    cuda_graph = True
    deterministic = True
    mean_over_anchors = True
    measure = "dot"
    normalize = False
    closed_form = True
    minings = ("all", "semi_hard", "hard", "valid_triplet", "random")

    def __init__(self, *, l2: float = 0.02, mining: Choice = "all") -> None:
        super().__init__(mining)
        self.l2 = non_negative("l2", l2)

    def rows(self, sim: Tensor, pos: Tensor, neg: Tensor) -> Row:
        total, number = against_negatives(sim, pos, neg)
        return total / number.clamp_(min=1.0)

    def penalty(self, embeddings: Tensor) -> Tensor | None:
        return self.l2 * embeddings.square().sum(dim=1).mean() if self.l2 else None


def against_negatives(sim: Tensor, pos: Tensor, neg: Tensor, scale: float = 1.0) -> tuple[Row, Tensor]:
    """Compute Σ_{j∈P} log(1 + Σ_{k∈N} e^(scale (s_k − s_j))) of each row, and the number of its positives."""
    negatives = row_logsumexp(sim, neg, scale)
    columns, filled = positive_columns(pos)
    gap = masked(negatives.value.unsqueeze(1) - scale * sim.gather(1, columns), filled, FLOOR)
    share = gap.sigmoid()
    ((_, weights),) = negatives.parts  # zero at the positives
    weights.mul_(share.sum(dim=1, keepdim=True)).scatter_add_(1, columns, -share)
    return Row(softplus(gap).sum(dim=1), [(scale, weights)]), filled.sum(dim=1, dtype=sim.dtype)
