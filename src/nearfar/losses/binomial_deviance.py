"""Binomial deviance loss."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import softplus

from nearfar import mining as minings
from nearfar.engine import Row, count, masked, row_sum
from nearfar.losses.base import PairLoss
from nearfar.losses.registry import register
from nearfar.mining import Choice
from nearfar.utils.validation import number, positive


@register
class BinomialDeviance(PairLoss):
    """A smooth contrastive loss: each pair counts by its own similarity.

    Formula:
        ℓ_i = mean_P log(1 + e^(alpha (base − s))) + mean_N log(1 + e^(beta (s − base)))

    Args:
        alpha: Sharpness for positives, 2.
        beta: Sharpness for negatives, 50.
        base: Γ = 0.5, the similarity that separates them.
        mining: Which pairs count; |P| and |N| are those of the mined sets.

    Reference:
        Yi, Lei, Li: Deep Metric Learning for Practical Person Re-Identification, 2014.
    """

    key = "binomial_deviance"
    source = "Unified View 12"
    minings = tuple(minings.names())
    closed_form = True

    def __init__(self, *, alpha: float = 2.0, beta: float = 50.0, base: float = 0.5, mining: Choice = "all") -> None:
        super().__init__(mining)
        self.alpha, self.beta = positive("alpha", alpha), positive("beta", beta)
        self.base = number("base", base)

    def rows(self, sim: Tensor, pos: Tensor, neg: Tensor) -> Row:
        return self.deviance(sim, pos, -self.alpha) + self.deviance(sim, neg, self.beta)

    def deviance(self, sim: Tensor, mask: Tensor, scale: float) -> Row:
        """Mean of log(1 + e^(scale (s − base))) over the mask."""
        logits = (sim - self.base) * scale
        terms = row_sum(masked(softplus(logits), mask), masked(logits.sigmoid(), mask), scale)
        return terms / count(mask, sim).clamp_(min=1.0)
