"""Samplers that draw classes first and then items of each class."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from nearfar.data.sampling.base import Indices, Labels, Sampler, register
from nearfar.data.transforms.random_streams import stream
from nearfar.utils.validation import whole


@register
class ClassBalanced(Sampler):
    """Draws classes uniformly and the same number of items of each (n-group sampling).

    If a class has fewer than ``per_class`` items, further classes are added until the batch is full; the last one may
    then contribute fewer items. Batches are independent draws: an epoch is a number of batches and does not visit every
    item once.

    Args:
        labels: Integer labels [n], one per item.
        classes: Classes per batch.
        per_class: Items of each class. NRA uses 16 × 8 on CUB and Cars and 32 × 4 on SOP; ranked list loss 60 × 3.
        steps: Batches per epoch; None for n // batch_size.
        seed: Seed of all random draws.
        rank: Which share of each batch this sampler returns.
        ranks: Number of shares; ``classes`` must be a multiple of it.

    Reference:
        Schall et al., "Deep Metric Learning using Similarities from Nonlinear Rank Approximations", MMSP 2019,
        section III.

    Example:
        >>> labels = np.array([0, 0, 0, 1, 2, 2])
        >>> sampler = ClassBalanced(labels, classes=2, per_class=3)
        >>> sorted(labels[sampler.batch(epoch=0, step=0)].tolist())  # small classes: all three are needed
        [0, 0, 0, 1, 2, 2]
    """

    key = "groups"
    min_items = 1  # classes with fewer items are never drawn

    def __init__(
        self,
        labels: Labels,
        *,
        classes: int,
        per_class: int,
        steps: int | None = None,
        seed: int = 0,
        rank: int = 0,
        ranks: int = 1,
    ) -> None:
        self.classes, self.per_class = whole("classes", classes), whole("per_class", per_class)
        super().__init__(labels, classes * per_class, steps=steps, seed=seed, rank=rank, ranks=ranks)
        if classes % ranks:
            raise ValueError(f"classes is {classes}; it must be a multiple of ranks, {ranks}")
        # Positions sorted by class: those of class k are members[first[k] : first[k] + counts[k]].
        members = _sorted_by_label(self.labels)
        in_order = self.labels[members]
        first = np.flatnonzero(np.r_[True, in_order[1:] != in_order[:-1]])
        self.class_labels = in_order[first]  # label of class k
        self._members, self._first, self._counts = members, first, np.diff(np.r_[first, len(members)])
        self._eligible = np.flatnonzero(self._counts >= self.min_items)
        takes = np.sort(np.minimum(self._counts[self._eligible], self.per_class)).cumsum()
        if len(takes) == 0 or takes[-1] < self.batch_size:
            most = 0 if len(takes) == 0 else int(takes[-1])
            kind = "classes" if self.min_items == 1 else f"classes with {self.min_items} or more items"
            raise ValueError(
                f"labels has {len(takes)} {kind}, enough for a batch of {most} with at most {per_class} of each; "
                f"{classes} × {per_class} needs {self.batch_size}"
            )
        # This many classes fill a batch even if they are the smallest ones.
        self._enough = int(np.searchsorted(takes, self.batch_size)) + 1

    def settings(self) -> dict[str, Any]:
        return {**super().settings(), "classes": self.classes, "per_class": self.per_class}

    def _class_order(self) -> Callable[[np.random.Generator], Indices]:
        """Return a function that draws at least ``self._enough`` classes, in the order in which they are used."""
        return lambda rng: self._eligible[rng.choice(len(self._eligible), self._enough, replace=False)]

    def _batch_function(self, epoch: int) -> Callable[[int], Indices]:
        class_order = self._class_order()

        def full_batch(step: int) -> Indices:
            rng = stream(self.seed, "batches", epoch, step)
            return self._fill(class_order(rng), rng)

        return full_batch

    def _fill(self, order: Indices, rng: np.random.Generator) -> Indices:
        """Draw ``per_class`` distinct items of each class, or all it has, until the batch is full."""
        counts = self._counts[order]
        takes = np.minimum(counts, self.per_class)
        number = int(np.searchsorted(takes.cumsum(), self.batch_size)) + 1
        order, counts, takes = order[:number], counts[:number], takes[:number]
        # Robert Floyd's algorithm for distinct random numbers, for all classes at once: draw from 0 to j, and take j
        # itself if that number was drawn before.
        places = np.empty((number, self.per_class), dtype=np.int64)
        for i in range(self.per_class):
            j = np.maximum(counts - takes + i, 0)
            drawn = rng.integers(0, j + 1)
            seen = (places[:, :i] == drawn[:, None]).any(axis=1)
            places[:, i] = np.where(seen, j, drawn)
        chosen = places[np.arange(self.per_class) < takes[:, None]]  # drop the surplus columns of small classes
        batch: Indices = self._members[np.repeat(self._first[order], takes) + chosen][: self.batch_size]
        return batch


@register
class ClassPairs(ClassBalanced):
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
        >>> sorted(ClassPairs([0, 0, 1, 1, 2], classes=2).batch(epoch=0, step=0).tolist())
        [0, 1, 2, 3]
    """

    key = "pairs"
    min_items = 2

    def __init__(
        self, labels: Labels, *, classes: int, steps: int | None = None, seed: int = 0, rank: int = 0, ranks: int = 1
    ) -> None:
        super().__init__(labels, classes=classes, per_class=2, steps=steps, seed=seed, rank=rank, ranks=ranks)


def _sorted_by_label(labels: Indices) -> Indices:
    """Return positions sorted by label and, within one label, by position."""
    low, high, count = int(labels.min()), int(labels.max()), len(labels)
    if (high - low + 1) * count >= 2**63:
        return np.argsort(labels, kind="stable")
    # Sorting integers is several times faster than argsort.
    return np.sort((labels - low) * count + np.arange(count)) % count
