"""Tuplet margin loss."""

import math
from collections.abc import Sequence

from torch import Tensor

from nearfar.engine import Mean, masked
from nearfar.losses.base import ANY, PairLoss, register
from nearfar.losses.n_pair import against_negatives
from nearfar.mining import Choice
from nearfar.utils.validation import number, positive


@register("tuplet_margin", "Yu and Tao 2019")
class TupletMargin(PairLoss):
    """Compares each positive with all negatives at once, after making its angle smaller by a slack.

    Formula:
        loss = mean over all positive pairs of log(1 + Σ_{k∈N_i} e^(scale (cos θ_ik − cos(θ_ij − slack))))

    Args:
        slack: β in radians. 0.1 is 5.73°.
        scale: s, the factor of the cosines.

    Differences:
        As printed, positives nearer than the slack are pushed: their pair weights are negative. At θ = 0 and θ = π,
        where the angle has no derivative, only cos θ has a gradient. The paper's second term, the variance within
        positive and within negative pairs, is left out.

    Reference:
        Yu and Tao, "Deep Metric Learning with Tuplet Margin Loss", ICCV 2019.

    Example:
        >>> import torch, nearfar as nf
        >>> nf.losses.TupletMargin(slack=0.0)(torch.eye(4), torch.tensor([0, 0, 1, 1]))
        tensor(1.0986)
    """

    cuda_graph = deterministic = True
    minings = ANY
    closed_form = True

    def __init__(self, *, slack: float = 0.1, scale: float = 64.0, mining: Choice = "all") -> None:
        super().__init__(mining)
        self.slack = number("slack", slack, low=0.0, high=math.pi / 2)
        self.scale = positive("scale", scale)

    def rows(self, sim: Tensor, pos: Tensor, neg: Tensor) -> Sequence[Mean]:
        return [Mean(*against_negatives(sim, pos, neg, self.scale, self.nearer))]

    def nearer(self, cosines: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos(θ − slack) and its derivative by cos θ, given cos θ."""
        cos_slack, sin_slack = math.cos(self.slack), math.sin(self.slack)
        sine = (1.0 - cosines.square()).clamp_(min=0.0).sqrt_()
        slope = cos_slack - masked(cosines / sine, sine > 0) * sin_slack
        return cosines * cos_slack + sine * sin_slack, slope
