"""Circle loss."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from nearfar import mining as minings
from nearfar.engine import FLOOR, Mean, Row, row_logsumexp
from nearfar.losses.base import PairLoss
from nearfar.losses.registry import register
from nearfar.mining import Choice
from nearfar.utils.validation import number, positive


@register
class Circle(PairLoss):
    """Moves each pair at a pace of its own: the farther from where it should be, the faster.

    Formula:
        w_p = [1 + margin − s]+ for positives, w_n = [s + margin]+ for negatives
        ℓ_i = log(1 + Σ_P e^(−scale w_p (s − (1 − margin))) · Σ_N e^(scale w_n (s − margin)))

    Args:
        margin: M = 0.4: positives are wanted above 1 − m, negatives below m.
        scale: Γ = 80.
        mining: Which pairs count.

    Differences:
        The gradient is the paper's, not the derivative of the value: the weights w are constants. The mean
        is over the anchors that have both a positive and a negative; other libraries leave out those, too,
        whose loss is 0 in float32.

    Reference:
        Sun et al.: Circle Loss: A Unified Perspective of Pair Similarity Optimization, 2020.
    """

    key = "circle"
    source = "beyond the five papers"
    minings = tuple(minings.names())
    closed_form = True

    def __init__(self, *, margin: float = 0.4, scale: float = 80.0, mining: Choice = "all") -> None:
        super().__init__(mining)
        self.margin, self.scale = number("margin", margin, low=0.0, high=1.0), positive("scale", scale)

    def rows(self, sim: Tensor, pos: Tensor, neg: Tensor) -> Sequence[Mean]:
        margin, scale = self.margin, self.scale
        pull = _paced(sim - (1.0 - margin), (1.0 + margin - sim).relu_(), pos, -scale)
        push = _paced(sim - margin, (sim + margin).relu_(), neg, scale)
        both = pull + push
        complete = (both.value > FLOOR / 2).to(sim.dtype)  # an empty sum would be about FLOOR
        return [Mean(both.softplus(), complete)]


def _paced(values: Tensor, paces: Tensor, mask: Tensor, scale: float) -> Row:
    """log Σ exp(scale · paces · values) over the mask, by values; the paces are constants."""
    total = row_logsumexp(values.mul_(paces), mask, scale)
    ((factor, probabilities),) = total.parts
    return Row(total.value, [(factor, probabilities.mul_(paces))])
