"""Which pictures make a batch: samplers by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np

from nearfar.data.sampling.base import BatchSampler, Indices, Labels, Sampler, checked_labels
from nearfar.data.sampling.class_balanced import Groups, HardClasses, Pairs
from nearfar.data.transforms.random_streams import stream
from nearfar.utils.validation import nearest, refuse_missing, refuse_unknown, whole

__all__ = ["BatchSampler", "Groups", "HardClasses", "Pairs", "Random", "Sampler", "create", "fitting_classes", "names"]


class Random(Sampler):
    """Every picture once in an epoch, in any order; what does not fill a batch waits for the next epoch.

    >>> import numpy as np
    >>> sampler = Random(np.zeros(6, dtype=np.int64), batch_size=3)
    >>> sorted(np.concatenate(list(sampler.epoch(0))).tolist())
    [0, 1, 2, 3, 4, 5]
    """

    key = "random"

    def __init__(
        self,
        labels: Labels,
        *,
        batch_size: int,
        steps: int | None = None,
        seed: int = 0,
        rank: int = 0,
        ranks: int = 1,
    ) -> None:
        super().__init__(labels, whole("batch_size", batch_size), steps=steps, seed=seed, rank=rank, ranks=ranks)
        if batch_size > len(self.labels):
            raise ValueError(f"batch_size is {batch_size}; labels hold {len(self.labels)} pictures")
        if batch_size % ranks:
            raise ValueError(f"batch_size is {batch_size}; it must be a multiple of ranks, {ranks}")
        self._last: tuple[tuple[int, int], Indices] | None = None

    def _drawing(self, epoch: int) -> Callable[[int], Indices]:
        rounds = len(self.labels) // self.batch_size  # batches until all pictures were seen

        def draw(step: int) -> Indices:
            order = self._order(epoch, step // rounds)
            start = step % rounds * self.batch_size
            return order[start : start + self.batch_size].copy()

        return draw

    def _order(self, epoch: int, lap: int) -> Indices:
        """All positions, shuffled; the last ones are kept, as the next step needs them again."""
        last = self._last
        if last is None or last[0] != (epoch, lap):
            order = stream(self.seed, "order", epoch, lap).permutation(len(self.labels))
            last = self._last = ((epoch, lap), order)
        return last[1]


SAMPLERS: dict[str, type[Sampler]] = {sampler.key: sampler for sampler in (Groups, HardClasses, Pairs, Random)}


def names() -> list[str]:
    """The keys of all samplers."""
    return sorted(SAMPLERS)


def create(key: str, labels: Labels, **settings: Any) -> Sampler:
    """A sampler by key: "groups", "pairs", "random" or "hard_classes".

    >>> import numpy as np
    >>> labels = np.repeat(np.arange(5), 4)
    >>> batch = create("groups", labels, classes=3, per_class=2).batch(epoch=0, step=0)
    >>> np.unique(labels[batch], return_counts=True)[1].tolist()
    [2, 2, 2]
    """
    if key not in SAMPLERS:
        raise ValueError(f"sampler is {key!r}{nearest(key, names())}; allowed are {', '.join(names())}")
    parameters = inspect.signature(SAMPLERS[key].__init__).parameters
    allowed = {name: parameter.default for name, parameter in parameters.items() if name not in ("self", "labels")}
    refuse_unknown(key, settings, allowed)
    refuse_missing(key, settings, allowed)
    # Every sampler takes labels and, by name, what was just checked.
    sampler: Callable[..., Sampler] = SAMPLERS[key]
    return sampler(labels, **settings)


def fitting_classes(labels: Labels, batch_size: int, per_class: int, ranks: int = 1) -> int:
    """How many classes fill a batch, ``per_class`` pictures of each, or as many as there are; the same on each rank.

    >>> import numpy as np
    >>> labels = np.array([0, 0, 0, 1, 1, 2])
    >>> fitting_classes(labels, batch_size=64, per_class=2)  # two of class 0, two of class 1
    2
    """
    counts = np.unique(checked_labels(labels), return_counts=True)[1]
    most = int(np.minimum(counts[counts > 1], per_class).sum())
    return max(1, min(whole("batch_size", batch_size), most) // whole("per_class", per_class) // ranks) * ranks
