"""Threshold-consistent margin loss."""

from collections.abc import Sequence

from torch import Tensor

from nearfar.engine import Mean, masked
from nearfar.engine.rows import row_hinge
from nearfar.losses.base import PairLoss, register
from nearfar.utils.validation import non_negative, number


@register("threshold_consistent_margin", "Zhang et al. 2024")
class ThresholdConsistentMargin(PairLoss):
    """Moves hard pairs beyond fixed similarities, so that one threshold separates pairs of all classes.

    Formula:
        loss = positive_weight · mean over positive pairs with s < positive_margin of (positive_margin − s)
             + negative_weight · mean over negative pairs with s > negative_margin of (s − negative_margin)

    Args:
        positive_margin: m⁺, the similarity that positives should exceed.
        negative_margin: m⁻, the similarity that negatives should stay below.
        positive_weight: λ⁺.
        negative_weight: λ⁻.

    Differences:
        In the paper it is a regularizer, added to another loss: see ``MultipleLosses``. A pair exactly at its margin
        is not counted.

    Reference:
        Zhang et al., "Threshold-Consistent Margin Loss for Open-World Deep Metric Learning", ICLR 2024.

    Example:
        >>> import torch, nearfar as nf
        >>> nf.losses.ThresholdConsistentMargin()(torch.eye(4), torch.tensor([0, 0, 1, 1]))
        tensor(0.9000)
    """

    cuda_graph = deterministic = True
    closed_form = True

    def __init__(
        self,
        *,
        positive_margin: float = 0.9,
        negative_margin: float = 0.5,
        positive_weight: float = 1.0,
        negative_weight: float = 1.0,
    ) -> None:
        super().__init__()
        self.positive_margin = number("positive_margin", positive_margin, low=-1.0, high=1.0)
        self.negative_margin = number("negative_margin", negative_margin, low=-1.0, high=1.0)
        self.positive_weight = non_negative("positive_weight", positive_weight)
        self.negative_weight = non_negative("negative_weight", negative_weight)

    def rows(self, sim: Tensor, pos: Tensor, neg: Tensor) -> Sequence[Mean]:
        pull, pulled = row_hinge(masked((self.positive_margin - sim).relu_(), pos))
        push, pushed = row_hinge(masked((sim - self.negative_margin).relu_(), neg))
        pull = pull.chain(pull.value, -1.0)  # the derivative is by minus the similarity
        return [Mean(pull * self.positive_weight, pulled), Mean(push * self.negative_weight, pushed)]
