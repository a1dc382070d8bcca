"""Supervised contrastive loss."""

from collections.abc import Sequence

import torch
from torch import Tensor

from nearfar.engine import Mean, Row, row_logsumexp
from nearfar.engine.programs import Program, Sums, Terms, mean_over
from nearfar.losses.base import ANY, PairLoss, register
from nearfar.mining import Choice
from nearfar.utils.validation import positive


@register("sup_con", "Khosla et al. 2020")
class SupCon(PairLoss):
    """Maximizes the likelihood of the positives among all others.

    Formula:
        ℓ_i = −mean over j∈P_i of log(e^(s_ij / temperature) / Σ_{k∈P_i∪N_i} e^(s_ik / temperature))

    Args:
        temperature: τ, the divisor of the cosines.

    Differences:
        The mean is over the anchors that have a positive. A positive is part of the denominator of the others, so one
        that is much nearer than the others is pushed: its pair weight is then negative.

    Reference:
        Khosla et al., "Supervised Contrastive Learning", NeurIPS 2020.

    Example:
        >>> import torch, nearfar as nf
        >>> nf.losses.SupCon(temperature=0.5)(torch.eye(4), torch.tensor([0, 0, 1, 1]))
        tensor(1.0986)
    """

    cuda_graph = deterministic = True
    minings = ANY
    closed_form = True

    def __init__(self, *, temperature: float = 0.1, mining: Choice = "all") -> None:
        super().__init__(mining)
        self.temperature = positive("temperature", temperature)

    def rows(self, sim: Tensor, pos: Tensor, neg: Tensor) -> Sequence[Mean]:
        positives = pos.to(sim.dtype)
        number = positives.sum(dim=1)
        has_positive = number.sign()
        factor = number.clamp_(min=1.0).mul_(-self.temperature).reciprocal_()
        pull = Row(torch.linalg.vecdot(sim, positives) * factor, [(factor, positives)])
        push = row_logsumexp(sim, pos | neg, 1.0 / self.temperature)
        return [Mean(push * has_positive + pull, has_positive)]

    def program(self) -> Program:
        scale = 1.0 / self.temperature

        def loss(pos: Sums, neg: Sums) -> Tensor:
            has_positive = pos.number.sign()
            push = torch.logaddexp(pos.log, neg.log) * has_positive
            return mean_over(push + pos.total / pos.number.clamp(min=1.0), has_positive)

        return Program(Terms("linear", scale, total="linear", scale=-scale), Terms("linear", scale), loss)
