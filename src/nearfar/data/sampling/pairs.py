"""Pairs of items, for the N-pair loss."""

from __future__ import annotations

from nearfar.data.sampling.base import Labels
from nearfar.data.sampling.class_balanced import ClassBalanced


class Pairs(ClassBalanced):
    """Draws two items of each of several classes, for the N-pair loss; classes with one item are never drawn.

    Args:
        labels: Integer labels [n], one per item.
        classes: Pairs per batch; the papers use 64.
        steps: Batches per epoch; None for n // batch_size.
        seed: Seed of all random draws.
        rank: Which share of each batch this sampler returns.
        ranks: Number of shares; ``classes`` must be a multiple of it.

    Reference:
        Sohn, "Improved Deep Metric Learning with Multi-class N-pair Loss Objective", NeurIPS 2016.

    Example:
        >>> sorted(Pairs([0, 0, 1, 1, 2], classes=2).batch(epoch=0, step=0).tolist())
        [0, 1, 2, 3]
    """

    key = "pairs"
    min_items = 2

    def __init__(
        self,
        labels: Labels,
        *,
        classes: int,
        steps: int | None = None,
        seed: int = 0,
        rank: int = 0,
        ranks: int = 1,
    ) -> None:
        super().__init__(labels, classes=classes, per_class=2, steps=steps, seed=seed, rank=rank, ranks=ranks)
