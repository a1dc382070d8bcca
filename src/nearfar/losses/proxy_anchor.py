"""Proxy-Anchor: proxies are the anchors, the batch is what they look at."""

from __future__ import annotations

import torch
from torch import Tensor

from nearfar.engine import Batch, Row, RowLoss, Tile, row_logsumexp, row_loss
from nearfar.losses.proxies import ProxyLoss
from nearfar.losses.registry import register
from nearfar.utils.validation import number, positive


@register
class ProxyAnchor(ProxyLoss, RowLoss):
    """Lets each proxy pull its embeddings and push all others, the hardest most.

    Formula:
        loss = mean over proxies w with embeddings in the batch of log(1 + Σ_{x∈X_w} e^(−alpha (w·x − margin)))
             + mean over all proxies w of log(1 + Σ_{x∉X_w} e^(alpha (w·x + margin)))

    Args:
        num_classes, dim: How many classes, and the length of an embedding.
        alpha: Sharpness, 32.
        margin: Λ = 0.1.
        lr_multiplier: Learning rate of the proxies over that of the network, 100.

    Reference:
        Kim et al.: Proxy Anchor Loss for Deep Metric Learning, 2020.
    """

    key = "proxy_anchor"
    source = "Thesis 2.31–2.32"
    closed_form = True

    def __init__(
        self,
        *,
        num_classes: int,
        dim: int,
        alpha: float = 32.0,
        margin: float = 0.1,
        lr_multiplier: float = 100.0,
    ) -> None:
        super().__init__(num_classes, dim, lr_multiplier)
        self.alpha, self.margin = positive("alpha", alpha), number("margin", margin)

    def against_proxies(self, embeddings: Tensor, labels: Tensor, proxies: Tensor) -> Tensor:
        classes = torch.arange(self.num_classes, device=labels.device)
        batch = Batch(self, classes, labels)
        loss: Tensor = row_loss(batch, proxies, embeddings, share_of_present(proxies, labels))
        return loss

    def on_tile(self, tile: Tile) -> Row:
        push = row_logsumexp(tile.values, tile.negatives, self.alpha) + self.alpha * self.margin
        return pull(tile, self.alpha, self.margin) + push.softplus()


def pull(tile: Tile, alpha: float, margin: float) -> Row:
    """What each proxy costs for the embeddings of its class."""
    assert tile.anchor_values is not None
    total = row_logsumexp(tile.values, tile.positives, -alpha) + alpha * margin
    return total.softplus() * tile.anchor_values


def share_of_present(proxies: Tensor, labels: Tensor) -> Tensor:
    """C / |W⁺| for the proxies with embeddings in the batch, 0 for others: a mean over all becomes one over W⁺."""
    present = proxies.new_zeros(len(proxies)).scatter_(0, labels, 1.0)
    return present * (len(proxies) / present.sum())
