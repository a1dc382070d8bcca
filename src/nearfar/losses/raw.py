"""RAW, the loss of the Unified View."""

from torch import Tensor
from torch.nn.functional import softplus

from nearfar.engine import Row, row_logsumexp
from nearfar.engine.programs import Program, Sums, Terms
from nearfar.losses.base import ANY, PairLoss, register
from nearfar.mining import Choice
from nearfar.utils.validation import number, positive


@register("raw", "Unified View 15–17")
class Raw(PairLoss):
    """Weights each pair by its own similarity and relative to the anchor's other pairs.

    Formula:
        ℓ_i = 1/alpha log(1 + Σ_P e^(−alpha (s − base))) + 1/beta log(1 + Σ_N e^(beta (s − base)))

    Args:
        alpha: Steepness for positives. The paper uses 2.
        beta: Steepness for negatives. The paper uses 50.
        base: γ, the similarity that separates positives from negatives.
        mining: Which pairs are used. The full method of the paper is "valid_triplet".

    Reference:
        "A Unified View of Deep Metric Learning via Gradient Analysis". Unified View 15–17.

    Example:
        >>> import torch, nearfar as nf
        >>> nf.losses.Raw(mining="valid_triplet")(torch.eye(4), torch.tensor([0, 0, 1, 1]))
        tensor(0.6566)
    """

    cuda_graph = deterministic = mean_over_anchors = True
    minings = ANY
    closed_form = True

    def __init__(self, *, alpha: float = 2.0, beta: float = 50.0, base: float = 0.5, mining: Choice = "all") -> None:
        super().__init__(mining)
        self.alpha, self.beta = positive("alpha", alpha), positive("beta", beta)
        self.base = number("base", base)

    def rows(self, sim: Tensor, pos: Tensor, neg: Tensor) -> Row:
        alpha, beta, base = self.alpha, self.beta, self.base
        pull = (row_logsumexp(sim, pos, -alpha) + alpha * base).softplus() * (1.0 / alpha)
        return pull + (row_logsumexp(sim, neg, beta) + -beta * base).softplus() * (1.0 / beta)

    def program(self) -> Program:
        alpha, beta, base = self.alpha, self.beta, self.base

        def loss(pos: Sums, neg: Sums) -> Tensor:
            return (softplus(pos.log + alpha * base) / alpha + softplus(neg.log - beta * base) / beta).mean()

        return Program(Terms("linear", -alpha), Terms("linear", beta), loss)
