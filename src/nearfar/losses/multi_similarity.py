"""Multi-Similarity loss."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import softplus

from nearfar.engine import Row, row_logsumexp
from nearfar.engine.fused import Program, Sums, Terms
from nearfar.losses.base import PairLoss, register
from nearfar.mining import ValidTriplet
from nearfar.utils.validation import number, positive


@register("multi_similarity", "Thesis 2.24, Unified View 17")
class MultiSimilarity(PairLoss):
    """Weights each pair by its own similarity and by how it compares with the anchor's other pairs.

    Formula:
        ℓ_i = 1/alpha log(1 + Σ_P e^(−alpha (s − base))) + 1/beta log(1 + Σ_N e^(beta (s − base)))
        P: positives with s < max_N s + epsilon,  N: negatives with s > min_P s − epsilon

    Args:
        alpha: Steepness for positives. The paper uses 2.
        beta: Steepness for negatives. The paper uses 50.
        base: λ, the similarity both are compared with.
        epsilon: Margin of the valid-triplet mining.

    Differences:
        Anchors without a valid pair contribute zero and still count in the mean. This is ``raw`` with the mining
        "valid_triplet": the two papers derive the same function.

    Reference:
        Wang et al., "Multi-Similarity Loss with General Pair Weighting for Deep Metric Learning", CVPR 2019.
        Thesis 2.24, Unified View 17.

    Example:
        >>> import torch, nearfar as nf
        >>> labels = torch.tensor([0, 0, 1, 1])
        >>> nf.losses.MultiSimilarity(alpha=2.0)(torch.eye(4), labels)
        tensor(0.6566)
    """

    cuda_graph = deterministic = mean_over_anchors = True
    minings = ("valid_triplet",)
    fixed = ("mining",)
    closed_form = True

    def __init__(self, *, alpha: float = 2.0, beta: float = 50.0, base: float = 0.5, epsilon: float = 0.1) -> None:
        mining = ValidTriplet(margin=number("epsilon", epsilon))
        super().__init__(mining)
        self._valid_triplet = mining
        self.alpha, self.beta = positive("alpha", alpha), positive("beta", beta)
        self.base = number("base", base)

    @property
    def epsilon(self) -> float:
        """Margin of the valid-triplet mining."""
        return self._valid_triplet.margin

    @epsilon.setter
    def epsilon(self, epsilon: float) -> None:
        self._valid_triplet.margin = number("epsilon", epsilon)

    def rows(self, sim: Tensor, pos: Tensor, neg: Tensor) -> Row:
        alpha, beta, base = self.alpha, self.beta, self.base
        pull = (row_logsumexp(sim, pos, -alpha) + alpha * base).softplus() * (1.0 / alpha)
        return pull + (row_logsumexp(sim, neg, beta) + -beta * base).softplus() * (1.0 / beta)

    def program(self) -> Program:
        return soft_extremes_program(self.alpha, self.beta, self.base)


def soft_extremes(sim: Tensor, pos: Tensor, neg: Tensor, alpha: float, beta: float, base: float) -> Row:
    """Return 1/alpha log(1 + Σ_P e^(−alpha (s − base))) + 1/beta log(1 + Σ_N e^(beta (s − base))) of each row."""
    pull = (row_logsumexp(sim, pos, -alpha) + alpha * base).softplus() / alpha
    return pull + (row_logsumexp(sim, neg, beta) - beta * base).softplus() / beta


def soft_extremes_program(alpha: float, beta: float, base: float) -> Program:
    """Return the mean of ``soft_extremes`` as sums over rows."""

    def loss(pos: Sums, neg: Sums) -> Tensor:
        return (softplus(pos.log + alpha * base) / alpha + softplus(neg.log - beta * base) / beta).mean()

    return Program(Terms("linear", -alpha), Terms("linear", beta), loss)
