"""Circle loss."""

from collections.abc import Sequence

from torch import Tensor
from torch.nn.functional import softplus

from nearfar.engine import Mean, Row, row_logsumexp
from nearfar.engine.programs import Program, Sums, Terms, mean_over
from nearfar.engine.rows import FLOOR
from nearfar.losses.base import ANY, PairLoss, register
from nearfar.mining import Choice
from nearfar.utils.validation import number, positive


@register("circle", "Sun et al. 2020")
class Circle(PairLoss):
    """Weights each pair by its distance from the optimum, so that each moves at its own pace.

    Formula:
        w_p = [1 + margin − s]+ for positives, w_n = [s + margin]+ for negatives
        ℓ_i = log(1 + Σ_P e^(−scale w_p (s − (1 − margin))) · Σ_N e^(scale w_n (s − margin)))

    Args:
        margin: m. The goal is a similarity above 1 − m for positives and below m for negatives.
        scale: γ, the factor of the exponents.

    Differences:
        The gradient is that of the paper, not the derivative of the value: the weights w are constants. The mean is
        over the anchors with a positive and a negative; other libraries also leave out anchors whose loss is 0 in
        float32.

    Reference:
        Sun et al., "Circle Loss: A Unified Perspective of Pair Similarity Optimization", CVPR 2020.

    Example:
        >>> import torch, nearfar as nf
        >>> nf.losses.Circle(scale=1.0)(torch.eye(4), torch.tensor([0, 0, 1, 1]))
        tensor(1.5989)
    """

    cuda_graph = deterministic = True
    minings = ANY
    closed_form = True

    def __init__(self, *, margin: float = 0.4, scale: float = 80.0, mining: Choice = "all") -> None:
        super().__init__(mining)
        self.margin, self.scale = number("margin", margin, low=0.0, high=1.0), positive("scale", scale)

    def rows(self, sim: Tensor, pos: Tensor, neg: Tensor) -> Sequence[Mean]:
        margin, scale = self.margin, self.scale
        pull = _weighted_logsumexp(sim - (1.0 - margin), (1.0 + margin - sim).relu_(), pos, -scale)
        push = _weighted_logsumexp(sim - margin, (sim + margin).relu_(), neg, scale)
        both = pull + push
        complete = (both.value > FLOOR / 2).to(sim.dtype)  # an empty sum would be about FLOOR
        return [Mean(both.softplus(), complete)]

    def program(self) -> Program:
        margin, scale = self.margin, self.scale

        def loss(pos: Sums, neg: Sums) -> Tensor:
            both = pos.log + neg.log
            return mean_over(softplus(both), (both > FLOOR / 2).to(both.dtype))

        positives = Terms("circle", -scale, optimum=1.0 + margin, delta=1.0 - margin)
        return Program(positives, Terms("circle", scale, optimum=-margin, delta=margin), loss)


def _weighted_logsumexp(values: Tensor, weights: Tensor, mask: Tensor, scale: float) -> Row:
    """log Σ exp(scale · weights · values) over the mask, with its derivative by values; the weights are constants."""
    total = row_logsumexp(values.mul_(weights), mask, scale)
    ((factor, probabilities),) = total.parts
    return Row(total.value, [(factor, probabilities.mul_(weights))])
