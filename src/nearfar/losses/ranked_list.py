"""Ranked List Loss."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from nearfar.engine import Mean, Row, masked, row_sum
from nearfar.engine.programs import Program, Sums, Terms, mean_over
from nearfar.engine.rows import FLOOR
from nearfar.losses.base import PairLoss, register
from nearfar.utils.validation import non_negative, one_of, positive


@register("ranked_list", "RLL 8–14")
class RankedList(PairLoss):
    """Pulls positives into a ball and pushes negatives beyond a boundary; only the query is moved.

    Formula:
        L_P = mean of d − (alpha − margin) over the positives beyond alpha − margin
        L_N = Σ w (alpha − d) / Σ w over the negatives within alpha, w = e^(temperature (alpha − d))
        ℓ_i = L_P + balance · L_N

    Args:
        alpha: The boundary of negatives.
        margin: m, the difference between the boundaries of negatives and positives.
        temperature: T, how much the nearest negatives outweigh the others.
        balance: λ, the weight of the negatives.
        query_weighting: "mean": every query has the same weight. "violation": queries are weighted by the summed
            weights of their pairs (1 for a positive, w for a negative), as in the authors' layer.

    Differences:
        The gradient is that of the paper, not the derivative of the value: the other embeddings of a list and the
        weights w are constants.

    Reference:
        Wang et al., "Ranked List Loss for Deep Metric Learning", CVPR 2019. RLL 8–14.

    Example:
        >>> import torch, nearfar as nf
        >>> nf.losses.RankedList(alpha=1.2, margin=0.4)(torch.eye(4), torch.tensor([0, 0, 1, 1]))
        tensor(0.6142)
    """

    cuda_graph = deterministic = True
    measure = "euclidean"
    query_only = True
    closed_form = True

    def __init__(
        self,
        *,
        alpha: float = 1.2,
        margin: float = 0.4,
        temperature: float = 10.0,
        balance: float = 1.0,
        query_weighting: str = "mean",
    ) -> None:
        super().__init__()
        self.alpha, self.margin = positive("alpha", alpha), non_negative("margin", margin)
        self.temperature, self.balance = non_negative("temperature", temperature), non_negative("balance", balance)
        self.query_weighting = one_of("query_weighting", query_weighting, ("mean", "violation"))
        if query_weighting == "violation" and self.temperature * self.alpha > 120:
            raise ValueError(
                f"temperature · alpha is {self.temperature * self.alpha:g}; with query_weighting='violation' it "
                "must be ≤ 120, since the weights span e^(temperature · alpha)"
            )

    @property
    def mean_over_anchors(self) -> bool:  # type: ignore[override]
        return self.query_weighting == "mean"

    def rows(self, sim: Tensor, pos: Tensor, neg: Tensor) -> Row | Sequence[Mean]:
        distance, inner = sim, self.alpha - self.margin
        beyond = pos & (distance > inner)
        within = neg & (distance < self.alpha)
        closeness = masked(distance * -self.temperature, within, FLOOR)
        weights = masked(torch.softmax(closeness, dim=1), within)
        pulled = beyond.to(sim.dtype)
        pull = row_sum(pulled * (distance - inner), pulled) / pulled.sum(dim=1).clamp_(min=1.0)
        push = row_sum(weights * (self.alpha - distance), weights, -1.0)
        loss = pull + push * self.balance
        if self.query_weighting == "mean":
            return loss
        # In units of e^(T alpha / 2), halfway between the weight of a positive and the largest of a negative.
        half = self.temperature * self.alpha / 2
        violation = math.exp(-half) * pulled.sum(dim=1) + (closeness + half).exp().sum(dim=1)
        return [Mean(loss * violation, violation)]

    def program(self) -> Program:
        inner, half = self.alpha - self.margin, self.temperature * self.alpha / 2

        def loss(pos: Sums, neg: Sums) -> Tensor:
            pull = (pos.total - inner * pos.number) / pos.number.clamp(min=1.0)
            losses = pull + self.balance * (self.alpha - neg.expected) * neg.number.sign()
            if self.query_weighting == "mean":
                return losses.mean()
            violation = math.exp(-half) * pos.number + (neg.log.detach() + half).exp()
            return mean_over(losses * violation, violation)

        terms = Terms(total="linear"), Terms("linear", -self.temperature, expected=True)
        return Program(*terms, loss, bounds=(-inner, -self.alpha))
