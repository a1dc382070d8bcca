"""Weighted sums of losses."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from nearfar.engine import LossBatch
from nearfar.losses.base import Loss
from nearfar.utils.validation import non_negative


class MultipleLosses(Loss):
    """The weighted sum of several losses of the same embeddings.

    Formula:
        loss = Σ_k weight_k · loss_k

    Args:
        losses: The losses.
        weights: Their weights; None: 1 for each.

    Differences:
        A gallery is given to all losses but those that compare embeddings with their own parameters, such as proxies.

    Example:
        >>> import torch, nearfar as nf
        >>> softmax, center = (nf.losses.create(key, num_classes=2, dim=4) for key in ("softmax", "center"))
        >>> loss = nf.losses.MultipleLosses([softmax, center], weights=[1.0, 0.003])
        >>> loss(torch.eye(4), torch.tensor([0, 0, 1, 1])).backward()
        >>> len(loss.param_groups(lr=1e-3))
        2
    """

    def __init__(self, losses: Sequence[Loss], *, weights: Sequence[float] | None = None) -> None:
        super().__init__()
        if not losses or not all(isinstance(loss, Loss) for loss in losses):
            kinds = [type(loss).__name__ for loss in losses]
            raise TypeError(f"losses is {kinds}; one or more losses of nearfar are needed")
        if weights is not None and len(weights) != len(losses):
            raise ValueError(f"weights has {len(weights)} numbers for {len(losses)} losses")
        self.losses = nn.ModuleList(losses)
        self.weights = (
            [1.0] * len(losses) if weights is None else [non_negative("weights", weight) for weight in weights]
        )

    @property
    def parts(self) -> list[Loss]:
        """The losses, as a list."""
        return [loss for loss in self.losses if isinstance(loss, Loss)]

    @property
    def draws(self) -> bool:
        return any(loss.draws for loss in self.parts)

    @property
    def mean_over_anchors(self) -> bool:  # type: ignore[override]
        return all(loss.mean_over_anchors for loss in self.parts)

    @property
    def shared_columns(self) -> bool:  # type: ignore[override]
        return any(loss.shared_columns for loss in self.parts)

    def param_groups(self, lr: float) -> list[dict[str, Any]]:
        return [group for loss in dict.fromkeys(self.parts) for group in loss.param_groups(lr)]  # each loss once

    @property
    def needs_labels(self) -> str | None:
        return next((reason for loss in self.parts if (reason := loss.needs_labels) is not None), None)

    @property
    def needs_grades(self) -> bool:  # type: ignore[override]
        return any(loss.needs_grades for loss in self.parts)

    def compute(self, batch: LossBatch) -> Tensor:
        values = []
        for number, (loss, weight) in enumerate(zip(self.parts, self.weights, strict=True)):
            part = self.part(number, batch)
            part = part if loss.shared_columns else part.without_gallery()
            values.append(weight * loss.compute_levels(part))
        return torch.stack(values).sum()

    def part(self, number: int, batch: LossBatch) -> LossBatch:
        """Return the part of a batch that the loss of this number is computed of: all of it."""
        return batch
