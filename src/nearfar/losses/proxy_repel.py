"""Proxy-Repel: proxies push each other apart."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import torch
from torch import Tensor

from nearfar.engine import (
    LossComputation,
    Row,
    RowLoss,
    Tile,
    by_autograd,
    differentiable,
    masked,
    row_logsumexp,
    row_loss,
    unit,
)
from nearfar.losses.proxies import ProxyLoss
from nearfar.losses.proxy_anchor import pull, share_of_present
from nearfar.losses.registry import register
from nearfar.utils.validation import number, one_of, positive


@register
class ProxyRepel(ProxyLoss, RowLoss):
    """Each proxy pulls the embeddings of its class, and proxies push each other apart.

    Formula:
        loss = mean over proxies w with embeddings in the batch of log(1 + Σ_{x∈X_w} e^(−alpha (w·x − margin)))
             + mean over w∈W of log(1 + Σ_{v∈W, v≠w} e^(alpha (w·v + margin))),  W all proxies, or the absent ones

    Args:
        num_classes: Number of classes.
        dim: Dimension of the embeddings.
        alpha: Steepness. The thesis uses 32.
        margin: λ. The thesis uses 0.1.
        through_batch: True: proxies are compared through the batch, by Σ_x (w·x)(x·v) instead of w·v.
        repelled: W. "all": all proxies. "absent": the proxies without embeddings in the batch, which is W⁻ of Thesis
            6.1 read literally.
        lr_multiplier: Learning rate of the proxies divided by that of the network.

    Differences:
        Thesis 6.1 prints W⁻ for the second term, and its text describes all proxies; both readings are available. A
        proxy does not repel itself, though the printed sum includes it. Through a batch of m embeddings, two proxies
        can have a similarity of up to m, so the second term grows with the batch. All pairs of proxies are compared:
        the time grows with the square of the number of classes.

    Reference:
        Psomas, "Metric Learning: A Deep Dive", 2020, chapter 6. Thesis 6.1–6.2.

    Example:
        >>> import torch, nearfar as nf
        >>> labels = torch.tensor([0, 0, 1, 1])
        >>> loss = nf.losses.ProxyRepel(num_classes=2, dim=4)
        >>> loss(torch.eye(4), labels).backward()
        >>> loss.proxies.grad.shape
        torch.Size([2, 4])
    """

    key = "proxy_repel"
    source = "Thesis 6.1–6.2"
    cuda_graph = True
    deterministic = True
    closed_form = True

    def __init__(
        self,
        *,
        num_classes: int,
        dim: int,
        alpha: float = 32.0,
        margin: float = 0.1,
        through_batch: bool = False,
        repelled: str = "all",
        lr_multiplier: float = 100.0,
    ) -> None:
        super().__init__(num_classes, dim, lr_multiplier)
        self.alpha, self.margin = positive("alpha", alpha), number("margin", margin)
        self.through_batch = through_batch
        self.repelled = one_of("repelled", repelled, ("all", "absent"))

    def against_proxies(self, embeddings: Tensor, labels: Tensor, proxies: Tensor) -> Tensor:
        classes = torch.arange(self.num_classes, device=labels.device)
        weights = share_of_present(classes, labels, proxies.dtype)
        pulls = row_loss(self, proxies, classes, embeddings, labels, anchor_values=weights)
        repulsion = _Repulsion(
            alpha=self.alpha,
            margin=self.margin,
            normalize=not self.through_batch,
            memory_budget=self.memory_budget,
            cuda_graph=self.graph_key() is not None,
        )
        names, share = classes, None
        if self.repelled == "absent":
            # Absent proxies have one name, so that they are the positives of each other; only they count in the mean.
            names = (weights > 0).long()
            share = masked(torch.ones_like(weights), weights <= 0)
            share = share * (len(share) / share.sum().clamp(min=1.0))
        if not self.through_batch:
            return pulls + row_loss(repulsion, proxies, names, anchor_values=share, owner=self)

        def through(proxies: Tensor, embeddings: Tensor, names: Tensor, share: Tensor | None) -> Tensor:
            points = unit(proxies) @ unit(embeddings).T
            return row_loss(repulsion, points, names, anchor_values=share, owner=self)

        pairs = len(proxies) * (len(proxies) + len(labels))
        constants = names, share
        computation = LossComputation(by_autograd(through), constants, self, repulsion.graph_key, pairs, static=(0,))
        return pulls + differentiable(computation, (proxies, embeddings))

    def on_tile(self, tile: Tile) -> Row:
        return pull(tile, self.alpha, self.margin)


@dataclass(frozen=True, kw_only=True)
class _Repulsion(RowLoss):
    """The loss of each proxy for the similarities to all others."""

    alpha: float
    margin: float
    normalize: bool  # compared through the batch, proxies are rows of similarities and not normalized
    memory_budget: int
    cuda_graph: bool
    measure = "dot"
    closed_form = True

    def graph_key(self) -> Hashable:
        return self if self.cuda_graph else None

    def on_tile(self, tile: Tile) -> Row:
        others = tile.negatives if tile.anchor_values is None else tile.positives
        repulsion = (row_logsumexp(tile.values, others, self.alpha) + self.alpha * self.margin).softplus()
        return repulsion if tile.anchor_values is None else repulsion * tile.anchor_values
