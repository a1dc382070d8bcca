"""Proxy-Anchor: proxies are the anchors, the batch is their gallery."""

import torch
from torch import Tensor

from nearfar.engine import LossBatch, Row, Tile, row_logsumexp
from nearfar.engine.tiles import RowLoss, row_loss
from nearfar.losses.base import register
from nearfar.losses.proxies import ProxyLoss
from nearfar.utils.validation import number, positive


@register("proxy_anchor", "Thesis 2.31–2.32")
class ProxyAnchor(ProxyLoss, RowLoss):
    """Each proxy pulls the embeddings of its class and pushes all others, the hardest most.

    Formula:
        loss = mean over proxies w with embeddings in the batch of log(1 + Σ_{x∈X_w} e^(−alpha (w·x − margin)))
             + mean over all proxies w of log(1 + Σ_{x∉X_w} e^(alpha (w·x + margin)))

    Args:
        alpha: Steepness. The paper uses 32.
        margin: λ. The paper uses 0.1.

    Reference:
        Kim et al., "Proxy Anchor Loss for Deep Metric Learning", CVPR 2020. Thesis 2.31–2.32.

    Example:
        >>> import torch, nearfar as nf
        >>> loss = nf.losses.ProxyAnchor(num_classes=2, dim=4)
        >>> loss(torch.eye(4), torch.tensor([0, 0, 1, 1])).backward()
        >>> loss.param_groups(lr=1e-4)[0]["lr"]
        0.01
    """

    cuda_graph = deterministic = True
    closed_form = True
    shardable = True

    def __init__(
        self, *, num_classes: int, dim: int, alpha: float = 32.0, margin: float = 0.1, lr_multiplier: float = 100.0
    ) -> None:
        super().__init__(num_classes, dim, lr_multiplier)
        self.alpha, self.margin = positive("alpha", alpha), number("margin", margin)

    def against_proxies(self, embeddings: Tensor, labels: Tensor, proxies: Tensor) -> Tensor:
        classes = torch.arange(self.num_classes, device=labels.device)
        weights = share_of_present(classes, labels, proxies.dtype)
        if self.shard is not None:
            classes, weights = (tensor[self.shard.start : self.shard.stop] for tensor in (classes, weights))
        value = row_loss(self, LossBatch(proxies, classes, embeddings, labels, anchor_values=weights))
        return value if self.shard is None else self.shard.sum(value * (len(proxies) / self.num_classes))

    def on_tile(self, tile: Tile) -> Row:
        push = row_logsumexp(tile.values, tile.negatives, self.alpha) + self.alpha * self.margin
        return pull(tile, self.alpha, self.margin) + push.softplus()


def pull(tile: Tile, alpha: float, margin: float) -> Row:
    """Return the loss of each proxy for the embeddings of its class."""
    assert tile.anchor_values is not None
    total = row_logsumexp(tile.values, tile.positives, -alpha) + alpha * margin
    return total.softplus() * tile.anchor_values


def share_of_present(classes: Tensor, labels: Tensor, dtype: torch.dtype) -> Tensor:
    """Return C / |W⁺| for the classes with embeddings in the batch, 0 for others.

    With these weights the mean over all proxies is the mean over those in W⁺.
    """
    present = torch.zeros_like(classes, dtype=dtype).scatter_(0, labels, 1.0)
    return present * (len(present) / present.sum())
