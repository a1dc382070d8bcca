"""CoSENT: every positive pair of a batch above every negative pair."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import softplus

from nearfar.engine import Tile, masked, masked_sum
from nearfar.losses.base import PairLoss
from nearfar.losses.registry import register
from nearfar.utils.validation import number

LARGEST_SCALE = 40.0  # e^(−2 · 40) is far above the smallest float32 number


@register
class CoSENT(PairLoss):
    """Ranks every positive pair of the batch above every negative pair, whatever their anchors.

    Formula:
        loss = log(1 + Σ over positive pairs (i, j) and negative pairs (k, l) of e^(scale (s_kl − s_ij)))

    Args:
        scale: Factor of the cosines, at most 40.

    Differences:
        A function of the whole batch, not of one anchor's row. Pairs are ordered: without a gallery (i, j) and (j, i)
        both count, which adds at most log 4. The original also ranks pairs by graded similarities; here a pair is
        positive or negative.

    Reference:
        Su, "CoSENT: A More Efficient Sentence Vector Scheme than Sentence-BERT", 2022.

    Example:
        >>> import torch, nearfar as nf
        >>> labels = torch.tensor([0, 0, 1, 1])
        >>> nf.losses.CoSENT()(torch.eye(4), labels)  # 4 positive and 8 negative pairs: log(1 + 32)
        tensor(3.4965)
    """

    key = "cosent"
    source = "Su 2022"
    cuda_graph = deterministic = True
    from_totals = True

    def __init__(self, *, scale: float = 20.0) -> None:
        super().__init__()
        self.scale = number("scale", scale, low=0.0, high=LARGEST_SCALE, open_low=True)

    def totals(self, tile: Tile) -> Tensor:
        # Exponents are relative to the largest possible ones, so the sums of all tiles can be added.
        near = masked_sum((self.scale * (tile.values - 1.0)).exp(), tile.negatives).sum()
        far = masked_sum((-self.scale * (tile.values + 1.0)).exp(), tile.positives).sum()
        return torch.stack([near, far])

    def loss_of_totals(self, totals: Tensor) -> Tensor:
        logarithms = totals.clamp(min=torch.finfo(totals.dtype).tiny).log()
        return masked(softplus(logarithms.sum() + 2.0 * self.scale), (totals > 0).all())
