"""RAW of the unified view, and Multi-Similarity, which is RAW with valid-triplet mining."""

from __future__ import annotations

from torch import Tensor

from nearfar import mining as minings
from nearfar.engine import Row, row_logsumexp
from nearfar.losses.base import PairLoss
from nearfar.losses.registry import register
from nearfar.mining import Choice, ValidTriplet
from nearfar.utils.validation import number, positive


@register
class Raw(PairLoss):
    """Weighs a pair by its similarity and by how it compares with the anchor's other pairs.

    Formula:
        ℓ_i = 1/alpha log(1 + Σ_P e^(−alpha (s − base))) + 1/beta log(1 + Σ_N e^(beta (s − base)))

    Args:
        alpha: Sharpness for positives, 2.
        beta: Sharpness for negatives, 50.
        base: Γ = 0.5, the similarity that separates them.
        mining: Which pairs count; the paper's full method is "valid_triplet".

    Reference:
        A Unified View of Deep Metric Learning via Gradient Analysis.
    """

    key = "raw"
    source = "Unified View 15–17"
    minings = tuple(minings.names())
    closed_form = True

    def __init__(self, *, alpha: float = 2.0, beta: float = 50.0, base: float = 0.5, mining: Choice = "all") -> None:
        super().__init__(mining)
        self.alpha, self.beta = positive("alpha", alpha), positive("beta", beta)
        self.base = number("base", base)

    def rows(self, sim: Tensor, pos: Tensor, neg: Tensor) -> Row:
        alpha, beta, base = self.alpha, self.beta, self.base
        pull = (row_logsumexp(sim, pos, -alpha) + alpha * base).softplus() / alpha
        return pull + (row_logsumexp(sim, neg, beta) - beta * base).softplus() / beta


@register
class MultiSimilarity(Raw):
    """RAW over the pairs that valid-triplet mining leaves.

    Formula:
        as raw, over the positives with s < max_N s + epsilon and the negatives with s > min_P s − epsilon

    Args:
        alpha, beta, base: As in raw: 2, 50, 0.5.
        epsilon: Margin of the mining, 0.1.

    Reference:
        Wang et al.: Multi-Similarity Loss with General Pair Weighting for Deep Metric Learning, 2019.
    """

    key = "multi_similarity"
    source = "Thesis 2.24, Unified View 17"
    fixed = ("mining",)

    def __init__(self, *, alpha: float = 2.0, beta: float = 50.0, base: float = 0.5, epsilon: float = 0.1) -> None:
        valid = ValidTriplet(margin=number("epsilon", epsilon))
        super().__init__(alpha=alpha, beta=beta, base=base, mining=valid)
        self._valid = valid

    @property
    def epsilon(self) -> float:
        """Margin of the mining, which keeps it."""
        return self._valid.margin

    @epsilon.setter
    def epsilon(self, epsilon: float) -> None:
        self._valid.margin = number("epsilon", epsilon)
