"""Histogram loss."""

from torch import Tensor

from nearfar.engine import Tile
from nearfar.engine.histograms import SoftHistograms, running_sum
from nearfar.losses.base import PairLoss, register
from nearfar.utils.validation import whole


@register("histogram", "Ustinova and Lempitsky 2016")
class Histogram(PairLoss):
    """Reduces the probability that a random negative pair is more similar than a random positive pair.

    Formula:
        h⁺, h⁻: soft histograms of the similarities of all positive and of all negative pairs, each divided by its
        number of pairs, on the nodes −1, −1 + 2/bins, …, 1
        loss = Σ_r h⁻_r Σ_{q≤r} h⁺_q

    Args:
        bins: Number of bins; there is one node more.

    Differences:
        A function of the whole batch, not of one anchor's row. Without positives or without negatives it is 0.

    Reference:
        Ustinova and Lempitsky, "Learning Deep Embeddings with Histogram Loss", NIPS 2016.

    Example:
        >>> import torch, nearfar as nf
        >>> nf.losses.Histogram(bins=100)(torch.eye(4), torch.tensor([0, 0, 1, 1]))
        tensor(1.)
    """

    cuda_graph = deterministic = True
    closed_form = True
    from_sums = True
    row_bytes = 40

    def __init__(self, *, bins: int = 100) -> None:
        super().__init__()
        self.bins = whole("bins", bins)

    def batch_sums(self, tile: Tile) -> SoftHistograms:
        return SoftHistograms(tile.values, tile.positives, tile.negatives, low=-1.0, high=1.0, bins=self.bins)

    def loss_of_sums(self, sums: Tensor) -> Tensor:
        negatives, positives = (sums / sums.sum(dim=1, keepdim=True).clamp(min=1.0)).unbind()
        return (negatives * running_sum(positives)).sum()
