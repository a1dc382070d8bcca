"""FastAP loss."""

from collections.abc import Sequence

import torch
from torch import Tensor

from nearfar.engine import Mean, Row, masked
from nearfar.engine.histograms import SoftHistograms, running_sum
from nearfar.losses.base import PairLoss, register
from nearfar.utils.validation import whole


@register("fast_ap", "Cakir et al. 2019")
class FastAP(PairLoss):
    """Increases the average precision of each anchor's ranking, computed from a soft histogram of its distances.

    Formula:
        h⁺, h: soft histograms of the anchor's d² to its positives and to all others, on 0, 4/bins, …, 4
        H⁺, H: their cumulative sums
        ℓ_i = 1 − 1/|P| Σ_r h⁺_r H⁺_r / H_r

    Args:
        bins: Number of bins; there is one node more.

    Differences:
        The mean is over the anchors that have a positive. A positive can be pushed to where positives are denser: its
        pair weight is then negative.

    Reference:
        Cakir et al., "Deep Metric Learning to Rank", CVPR 2019.

    Example:
        >>> import torch, nearfar as nf
        >>> nf.losses.FastAP(bins=10)(torch.eye(4), torch.tensor([0, 0, 1, 1]))
        tensor(0.6667)
    """

    cuda_graph = deterministic = True
    measure = "squared_euclidean"
    closed_form = True
    row_bytes = 40

    def __init__(self, *, bins: int = 10) -> None:
        super().__init__()
        self.bins = whole("bins", bins)

    def rows(self, sim: Tensor, pos: Tensor, neg: Tensor) -> Sequence[Mean]:
        histograms = SoftHistograms(sim, pos, neg, low=0.0, high=4.0, bins=self.bins)
        counts = histograms.counts()
        positives, cumulated = counts[:, 1], running_sum(counts)
        positives_before, all_before = cumulated[:, 1], cumulated.sum(dim=1)
        all_before = masked(all_before, all_before > 0, 1.0)
        precision, share = positives_before / all_before, positives / all_before
        lost = share * precision
        # A count changes the precision at its node and all later ones; a positive also adds the precision at its node.
        slopes = running_sum(torch.stack([-lost, share - lost], dim=1), backwards=True)
        slopes[:, 1] += precision
        number = positives.sum(dim=1).round()
        has_positive = number.sign()
        factor = number.clamp_(min=1.0).reciprocal_().neg_()
        value = torch.linalg.vecdot(positives, precision) * factor + has_positive
        return [Mean(Row(value, [(factor, histograms.weights(slopes))]), has_positive)]
