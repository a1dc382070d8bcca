"""Binomial deviance loss."""

from torch import Tensor
from torch.nn.functional import softplus

from nearfar.engine import Row, masked, row_sum
from nearfar.engine.programs import Program, Sums, Terms
from nearfar.engine.rows import count
from nearfar.losses.base import ANY, PairLoss, register
from nearfar.mining import Choice
from nearfar.utils.validation import number, positive


@register("binomial_deviance", "Unified View 12")
class BinomialDeviance(PairLoss):
    """Weights each pair by its own similarity: a smooth contrastive loss.

    Formula:
        ℓ_i = mean_P log(1 + e^(alpha (base − s))) + mean_N log(1 + e^(beta (s − base)))

    Args:
        alpha: Steepness for positives.
        beta: Steepness for negatives.
        base: γ, the similarity that separates positives from negatives.
        mining: Which pairs are used; the means are over the mined pairs.

    Reference:
        Yi et al., "Deep Metric Learning for Practical Person Re-Identification", 2014. Unified View 12.

    Example:
        >>> import torch, nearfar as nf
        >>> nf.losses.BinomialDeviance(beta=10.0)(torch.eye(4), torch.tensor([0, 0, 1, 1]))
        tensor(1.3200)
    """

    cuda_graph = deterministic = mean_over_anchors = True
    minings = ANY
    closed_form = True

    def __init__(self, *, alpha: float = 2.0, beta: float = 50.0, base: float = 0.5, mining: Choice = "all") -> None:
        super().__init__(mining)
        self.alpha, self.beta = positive("alpha", alpha), positive("beta", beta)
        self.base = number("base", base)

    def rows(self, sim: Tensor, pos: Tensor, neg: Tensor) -> Row:
        return self.deviance(sim, pos, -self.alpha) + self.deviance(sim, neg, self.beta)

    def deviance(self, sim: Tensor, mask: Tensor, scale: float) -> Row:
        """Return the mean of log(1 + e^(scale (s − base))) over the mask."""
        logits = (sim - self.base) * scale
        terms = row_sum(masked(softplus(logits), mask), masked(logits.sigmoid(), mask), scale)
        return terms / count(mask, sim).clamp_(min=1.0)

    def program(self) -> Program:
        def terms(scale: float) -> Terms:
            return Terms(total="softplus", scale=scale, shift=-scale * self.base)

        def loss(pos: Sums, neg: Sums) -> Tensor:
            return (pos.total / pos.number.clamp(min=1.0) + neg.total / neg.number.clamp(min=1.0)).mean()

        return Program(terms(-self.alpha), terms(self.beta), loss)
