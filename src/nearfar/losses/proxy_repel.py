"""Proxy-Repel: the thesis's own loss, in which proxies push each other."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import torch
from torch import Tensor

from nearfar.engine import (
    Batch,
    Row,
    RowLoss,
    Step,
    Tile,
    by_autograd,
    differentiable,
    row_logsumexp,
    row_loss,
    unit,
)
from nearfar.losses.proxies import ProxyLoss
from nearfar.losses.proxy_anchor import pull, share_of_present
from nearfar.losses.registry import register
from nearfar.utils.validation import number, positive


@register
class ProxyRepel(ProxyLoss, RowLoss):
    """Lets each proxy pull its embeddings, and the proxies push each other.

    Formula:
        loss = mean over proxies w with embeddings in the batch of log(1 + Σ_{x∈X_w} e^(−alpha (w·x − margin)))
             + mean over all proxies w of log(1 + Σ_{v≠w} e^(alpha (w·v + margin)))

    Args:
        num_classes, dim: How many classes, and the length of an embedding.
        alpha: Sharpness, 32.
        margin: Λ = 0.1.
        through_batch: False; True: proxies are compared through the batch, Σ_x (w·x)(x·v) instead of w·v.
        lr_multiplier: Learning rate of the proxies over that of the network, 100.

    Differences:
        Compared through a batch of m embeddings, two proxies can be up to m alike, so the second term grows
        with the batch. All pairs of proxies are compared: the time grows with the square of the classes.

    Reference:
        Psomas: Metric Learning: A Deep Dive, 2020, chapter 6.
    """

    key = "proxy_repel"
    source = "Thesis 6.1–6.2"
    closed_form = True

    def __init__(
        self,
        *,
        num_classes: int,
        dim: int,
        alpha: float = 32.0,
        margin: float = 0.1,
        through_batch: bool = False,
        lr_multiplier: float = 100.0,
    ) -> None:
        super().__init__(num_classes, dim, lr_multiplier)
        self.alpha, self.margin = positive("alpha", alpha), number("margin", margin)
        self.through_batch = through_batch

    def against_proxies(self, embeddings: Tensor, labels: Tensor, proxies: Tensor) -> Tensor:
        classes = torch.arange(self.num_classes, device=labels.device)
        pulls = row_loss(Batch(self, classes, labels), proxies, embeddings, share_of_present(proxies, labels))
        repulsion = _Repulsion(
            alpha=self.alpha,
            margin=self.margin,
            raw=self.through_batch,
            memory_budget=self.memory_budget,
            record=self.recordable() is not None,
        )
        if not self.through_batch:
            return pulls + row_loss(Batch(repulsion, classes, classes, owner=self), proxies, None, None)

        def through(proxies: Tensor, embeddings: Tensor, classes: Tensor) -> Tensor:
            batch = Batch(repulsion, classes, classes, owner=self)
            return row_loss(batch, unit(proxies) @ unit(embeddings).T, None, None)

        pairs = len(proxies) * (len(proxies) + len(labels))
        step = Step(by_autograd(through), (classes,), self, repulsion.recordable, pairs, lasting=(0,))
        pushes: Tensor = differentiable(step, (proxies, embeddings))
        return pulls + pushes

    def on_tile(self, tile: Tile) -> Row:
        return pull(tile, self.alpha, self.margin)


@dataclass(frozen=True, kw_only=True)
class _Repulsion(RowLoss):
    """Every proxy, as the others see it."""

    alpha: float
    margin: float
    raw: bool  # seen through the batch, proxies are rows of numbers and their dot products count
    memory_budget: int
    record: bool
    measure = "dot"
    closed_form = True

    def recordable(self) -> Hashable:
        return self if self.record else None

    def on_tile(self, tile: Tile) -> Row:
        others = row_logsumexp(tile.values, tile.negatives, self.alpha) + self.alpha * self.margin
        return others.softplus()
