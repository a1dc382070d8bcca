"""Random batches that visit every item once per epoch."""

from __future__ import annotations

from collections.abc import Callable

from nearfar.data.sampling.base import Indices, Labels, Sampler, register
from nearfar.data.transforms.random_streams import stream
from nearfar.utils.validation import whole


@register
class Random(Sampler):
    """Shuffles the items of each epoch; the incomplete last batch is dropped.

    Args:
        labels: Integer labels [n], one per item.
        batch_size: Items per batch, over all ranks.
        steps: Batches per epoch; None for n // batch_size. With more, items are shuffled again.
        seed: Seed of all random draws.
        rank: Which share of each batch this sampler returns.
        ranks: Number of shares; ``batch_size`` must be a multiple of it.

    Example:
        >>> import numpy as np
        >>> sampler = Random(np.zeros(6, dtype=np.int64), batch_size=3)
        >>> sorted(np.concatenate(list(sampler.epoch(0))).tolist())
        [0, 1, 2, 3, 4, 5]
    """

    key = "random"

    def __init__(
        self, labels: Labels, *, batch_size: int, steps: int | None = None, seed: int = 0, rank: int = 0, ranks: int = 1
    ) -> None:
        super().__init__(labels, whole("batch_size", batch_size), steps=steps, seed=seed, rank=rank, ranks=ranks)
        if batch_size > len(self.labels):
            raise ValueError(f"batch_size is {batch_size}; labels has {len(self.labels)} items")
        if batch_size % ranks:
            raise ValueError(f"batch_size is {batch_size}; it must be a multiple of ranks, {ranks}")
        self._last_order: tuple[tuple[int, int], Indices] | None = None

    def _batch_function(self, epoch: int) -> Callable[[int], Indices]:
        per_pass = len(self.labels) // self.batch_size  # batches of one pass over all items

        def full_batch(step: int) -> Indices:
            order = self._order(epoch, step // per_pass)
            start = step % per_pass * self.batch_size
            return order[start : start + self.batch_size].copy()

        return full_batch

    def _order(self, epoch: int, number: int) -> Indices:
        """Return the shuffled positions of a pass; the last ones are cached for the next step."""
        last = self._last_order
        if last is None or last[0] != (epoch, number):
            order = stream(self.seed, "order", epoch, number).permutation(len(self.labels))
            last = self._last_order = ((epoch, number), order)
        return last[1]
