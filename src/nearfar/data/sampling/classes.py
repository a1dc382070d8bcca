"""Samplers that draw classes first and then items of each class."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
        classes: Classes per batch.
        per_class: Items of each class. NRA uses 16 × 8 on CUB and Cars and 32 × 4 on SOP; ranked list loss 60 × 3.

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
    depends_on = (*Sampler.depends_on, "classes", "per_class")
    divided = "classes"
    min_items = 1  # classes with fewer items are never drawn

    def __init__(
        self, labels: Labels, *, classes: int, per_class: int, steps: int | None = None, seed: int = 0
    ) -> None:
        self.classes, self.per_class = whole("classes", classes), whole("per_class", per_class)
        super().__init__(labels, classes * per_class, steps, seed)
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

    def _class_order(self) -> Callable[[np.random.Generator], Indices]:
        """Return a function that draws at least ``self._enough`` classes, in the order in which they are used."""
        return lambda rng: self._eligible[rng.choice(len(self._eligible), self._enough, replace=False)]

    def _batch_function(self, epoch: int) -> Callable[[int], Indices]:
        class_order = self._class_order()

        def draw(step: int) -> Indices:
            rng = stream(self.seed, "batches", epoch, step)
            return self._fill(class_order(rng), rng)

        return draw

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
        classes: Pairs per batch; the papers use 64.

    Reference:
        Sohn, "Improved Deep Metric Learning with Multi-class N-pair Loss Objective", NeurIPS 2016.

    Example:
        >>> sorted(ClassPairs([0, 0, 1, 1, 2], classes=2).batch(epoch=0, step=0).tolist())
        [0, 1, 2, 3]
    """

    key = "pairs"
    min_items = 2

    def __init__(self, labels: Labels, *, classes: int, steps: int | None = None, seed: int = 0) -> None:
        super().__init__(labels, classes=classes, per_class=2, steps=steps, seed=seed)


@register
class HardClasses(ClassBalanced):
    """Draws classes that are similar to each other: the hard negative class mining of the N-pair loss.

    Draws candidate classes at random, takes the first, and then repeatedly takes the candidate that is most similar to
    any class taken before. Classes with one item are never drawn. Until :meth:`update` is called, classes are drawn
    uniformly.

    Args:
        classes: Classes per batch.
        per_class: Items of each class; the paper uses pairs.
        candidates: Classes to choose from; None for 512, or 2 × ``classes`` if that is more. At most all classes.

    Differences:
        The paper embeds one or two images of each candidate before every batch and takes the class that violates the
        triplet constraint most. Here the trainer passes one vector per class, for example once per epoch, and the most
        similar class by cosine is taken.

    Reference:
        Sohn, "Improved Deep Metric Learning with Multi-class N-pair Loss Objective", NeurIPS 2016, section 3.2.

    Example:
        >>> sampler = HardClasses([0, 0, 1, 1, 2, 2], classes=2)
        >>> sampler.update(np.eye(3))
        >>> len(sampler.batch(epoch=0, step=0))
        4
    """

    key = "hard_classes"
    learns = "classes"
    depends_on = (*ClassBalanced.depends_on, "candidates")
    min_items = 2

    def __init__(
        self,
        labels: Labels,
        *,
        classes: int,
        per_class: int = 2,
        candidates: int | None = None,
        steps: int | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(labels, classes=classes, per_class=per_class, steps=steps, seed=seed)
        wanted = max(512, 2 * classes) if candidates is None else whole("candidates", candidates, low=classes)
        self.candidates = min(max(wanted, self._enough), len(self._eligible))

    def update(self, learned: NDArray[Any] | None) -> None:
        """Set the vectors that classes are compared by; an epoch that has started keeps those it started with.

        Args:
            learned: One vector per class, [len(class_labels), d]; row k belongs to ``class_labels[k]``. None removes
                them.
        """
        if learned is not None:
            learned = np.asarray(learned, dtype=np.float32)
            if learned.ndim != 2 or len(learned) != len(self.class_labels):
                raise ValueError(
                    f"means has shape {learned.shape}; needed is [{len(self.class_labels)}, d], one row per class"
                )
            if not np.isfinite(learned).all():
                raise ValueError("means contains NaN or infinity")
            lengths = np.linalg.norm(learned, axis=1, keepdims=True)
            learned = learned / np.maximum(lengths, np.finfo(np.float32).tiny)
        self.learned = learned

    def _class_order(self) -> Callable[[np.random.Generator], Indices]:
        means = self.learned

        def order(rng: np.random.Generator) -> Indices:
            candidates = self._eligible[rng.choice(len(self._eligible), self.candidates, replace=False)]
            if means is None:
                return candidates[: self._enough]
            return candidates[_chain(means[candidates], self._enough)]

        return order


@register
class NeighborClasses(HardClasses):
    """Draws some classes at random and fills the batch with their nearest classes: the sampling of HTL.

    Args:
        classes: Classes per batch.
        per_class: Items of each class.
        anchors: Classes that are drawn at random; the others are their neighbors, the same number for each.

    Reference:
        Ge et al., "Deep Metric Learning with Hierarchical Triplet Loss", ECCV 2018, section 3.2.

    Example:
        >>> sampler = NeighborClasses([0, 0, 1, 1, 2, 2, 3, 3], classes=2, anchors=1)
        >>> sampler.update(np.array([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0], [0.1, 0.9]]))
        >>> sorted(np.unique(sampler.labels[sampler.batch(epoch=0, step=0)]).tolist()) in ([0, 1], [2, 3])
        True
    """

    key = "neighbor_classes"
    depends_on = (*HardClasses.depends_on, "anchors")

    def __init__(
        self,
        labels: Labels,
        *,
        classes: int,
        per_class: int = 2,
        anchors: int = 8,
        steps: int | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(labels, classes=classes, per_class=per_class, steps=steps, seed=seed)
        self.anchors = whole("anchors", anchors)

    def _class_order(self) -> Callable[[np.random.Generator], Indices]:
        means = self.learned

        def order(rng: np.random.Generator) -> Indices:
            drawn = self._eligible[rng.permutation(len(self._eligible))]
            if means is None:
                return drawn[: self._enough]
            anchors = drawn[: self.anchors]
            near = np.argsort(-(means[anchors] @ means[self._eligible].T), axis=1, kind="stable")
            # An anchor is its own nearest class. All anchors, then the nearest class of each, and so on.
            ordered = dict.fromkeys([*anchors.tolist(), *self._eligible[near].T.flatten().tolist()])
            return np.array(list(ordered)[: self._enough], dtype=np.int64)

        return order


def _sorted_by_label(labels: Indices) -> Indices:
    """Return positions sorted by label and, within one label, by position."""
    low, high, count = int(labels.min()), int(labels.max()), len(labels)
    if (high - low + 1) * count >= 2**63:
        return np.argsort(labels, kind="stable")
    # Sorting integers is several times faster than argsort.
    return np.sort((labels - low) * count + np.arange(count)) % count


def _chain(vectors: NDArray[np.float32], number: int) -> Indices:
    """Return row 0, then always the row most similar to any row before it; the first one of ties."""
    similar = vectors @ vectors.T
    np.fill_diagonal(similar, -np.inf)
    chain = np.zeros(number, dtype=np.int64)
    nearest = similar[0].copy()  # similarity of each row to the nearest row of the chain
    nearest[0] = -np.inf
    for i in range(1, number):
        chain[i] = nearest.argmax()
        np.maximum(nearest, similar[chain[i]], out=nearest)
        nearest[chain[: i + 1]] = -np.inf
    return chain
