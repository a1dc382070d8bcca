"""Batches of given pairs or triplets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from nearfar.data.sampling.base import Indices, Labels, Sampler, register
from nearfar.data.sampling.items import Random
from nearfar.utils.validation import whole


@register
class Given(Sampler):
    """Draws given pairs or triplets, every one once per epoch; the incomplete last batch is dropped.

    A batch holds the first members of all drawn pairs, then the second members, and so on. An item that is in several
    of the pairs is in the batch several times.

    Args:
        labels: Integer labels [n], one per item.
        relations: Positions in ``labels`` of the members of each pair, [p, 2], or triplet, [p, 3].
        batch_size: Items per batch: a multiple of 2 for pairs, of 3 for triplets.
        steps: Batches per epoch; None for as many as show every relation once.
        seed: Seed of all random draws.
        rank: Must be 0: given relations are not shared among processes.
        ranks: Must be 1.

    Example:
        >>> sampler = Given([0, 1, 2, 3], relations=np.array([[0, 1], [2, 3]]), batch_size=4)
        >>> drawn = sampler.drawn(epoch=0, step=0)
        >>> sampler.batch(epoch=0, step=0).tolist() == [*(2 * drawn), *(2 * drawn + 1)]
        True
    """

    key = "given"

    def __init__(
        self,
        labels: Labels,
        *,
        relations: Indices,
        batch_size: int,
        steps: int | None = None,
        seed: int = 0,
        rank: int = 0,
        ranks: int = 1,
    ) -> None:
        if ranks > 1:
            raise ValueError(f"ranks is {ranks}; given pairs and triplets are trained by a single process")
        self.relations = np.asarray(relations, dtype=np.int64)
        width = self.relations.shape[1]
        if whole("batch_size", batch_size) % width or not 0 < batch_size // width <= len(self.relations):
            raise ValueError(
                f"batch_size is {batch_size}; it must be a multiple of {width}, and hold at most the "
                f"{len(self.relations):,} given ones"
            )
        order = np.arange(len(self.relations))
        self._order = Random(order, batch_size=batch_size // width, steps=steps, seed=seed)
        super().__init__(labels, batch_size, steps=self._order.steps, seed=seed, rank=rank, ranks=ranks)

    def drawn(self, epoch: int, step: int) -> Indices:
        """Return the numbers of the pairs or triplets of a batch.

        Args:
            epoch: Epoch, from 0.
            step: Step within the epoch, from 0.
        """
        return self._order.batch(epoch, step)

    def _batch_function(self, epoch: int) -> Callable[[int], Indices]:
        draw = self._order.batch_function(epoch)
        return lambda step: self.relations[draw(step)].T.reshape(-1)

    def settings(self) -> dict[str, Any]:
        return {**super().settings(), "relations": self.relations.tobytes()}
