"""Margin loss with a learned boundary."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from nearfar.engine import LossBatch, Mean, Row, Tile, masked
from nearfar.engine.programs import Program, Sums, Terms, mean_over
from nearfar.engine.rows import row_hinge
from nearfar.losses.base import ANY, PairLoss, check_classes, register
from nearfar.mining import Choice
from nearfar.utils.validation import non_negative, number, positive, whole


@register("margin", "Thesis 2.23")
class Margin(PairLoss):
    """Keeps positives inside and negatives outside of a learned boundary.

    Formula:
        loss = (Σ_P [d − β + margin]+ + Σ_N [β − d + margin]+) / number of non-zero terms  +  nu · Σ β

    Args:
        margin: λ, the half width of the boundary. The thesis uses 0.5.
        beta: Initial value of the boundary β.
        num_classes: One boundary for each class, chosen by the anchor's label; None: one for all classes.
        nu: Weight of Σ β.
        beta_lr: Learning rate of the boundary; None: that of the network.
        mining: Which pairs are used. Distance-weighted sampling is an essential part of the paper.

    Differences:
        Distance-weighted sampling draws a negative for each positive, never one beyond a distance of 1.4. If all
        negatives of an anchor are beyond it, its positives are not used either; with the mining "all" they are.

    Reference:
        Wu et al., "Sampling Matters in Deep Embedding Learning", ICCV 2017. Thesis 2.23.

    Example:
        >>> import torch, nearfar as nf
        >>> loss = nf.losses.Margin(mining="all")
        >>> loss(torch.eye(4), torch.tensor([0, 0, 1, 1])).detach()
        tensor(0.4142)
        >>> loss.param_groups(lr=1e-3)[0]["lr"]
        5e-05
    """

    cuda_graph = deterministic = True
    measure = "euclidean"
    closed_form = True
    minings = ANY
    fixed = ("num_classes",)

    def __init__(
        self,
        *,
        margin: float = 0.2,
        beta: float = 1.2,
        num_classes: int | None = None,
        nu: float = 0.0,
        beta_lr: float | None = 5e-5,
        mining: Choice = "distance_weighted",
    ) -> None:
        super().__init__(mining)
        self.margin = non_negative("margin", margin)
        self.num_classes = None if num_classes is None else whole("num_classes", num_classes)
        self.nu = number("nu", nu)
        self.beta_lr = None if beta_lr is None else positive("beta_lr", beta_lr)
        shape = () if self.num_classes is None else (self.num_classes,)
        self.initial_beta = number("beta", beta)
        self.beta = nn.Parameter(torch.full(shape, self.initial_beta))

    def settings(self) -> dict[str, Any]:
        return super().settings() | {"beta": self.initial_beta}

    def param_groups(self, lr: float) -> list[dict[str, Any]]:
        return [{"params": [self.beta], "lr": lr if self.beta_lr is None else self.beta_lr, "weight_decay": 0.0}]

    @property
    def needs_labels(self) -> str | None:
        return None if self.num_classes is None else "has a boundary for each class"

    def anchor_values(self, batch: LossBatch) -> Tensor:
        if self.num_classes is None:
            return self.beta.expand(len(batch.embeddings))
        check_classes(batch.labels, self.num_classes)
        return self.beta.index_select(0, batch.labels)  # fails for a negative label on a GPU, too

    def on_tile(self, tile: Tile) -> Sequence[Mean]:
        assert tile.anchor_values is not None
        pos, neg = self.mining.select(tile)
        beyond = tile.values - tile.anchor_values.unsqueeze(1)
        pulls, pulled = row_hinge(masked((beyond + self.margin).relu_(), pos))
        pushes, pushed = row_hinge(masked(beyond.neg_().add_(self.margin).relu_(), neg))
        total = pulls + pushes.chain(pushes.value, -1.0)
        slopes = total.weights()
        return [Mean(Row(total.value, [(1.0, slopes)], by_anchor_values=-slopes.sum(dim=1)), pulled + pushed)]

    def program(self) -> Program:
        def loss(pos: Sums, neg: Sums) -> Tensor:
            return mean_over(pos.total + neg.total, pos.active + neg.active)

        positives = Terms(total="hinge", shift=self.margin)
        negatives = Terms(total="hinge", scale=-1.0, shift=self.margin)
        return Program(positives, negatives, loss, shift="anchor_values")

    def regularizer(self, embeddings: Tensor) -> Tensor | None:
        return self.nu * self.beta.sum() if self.nu else None
