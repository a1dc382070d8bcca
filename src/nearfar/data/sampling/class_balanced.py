"""Samplers that draw classes first and then pictures of them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearfar.data.sampling.base import Indices, Labels, Sampler
from nearfar.data.transforms.random_streams import stream
from nearfar.utils.validation import whole


class _Grouped(Sampler):
    """Batches of ``classes`` × ``per_class``, class by class. Where one has too few pictures, more classes fill up."""

    fewest = 1  # pictures of a class that is drawn at all

    def __init__(
        self,
        labels: Labels,
        classes: int,
        per_class: int,
        *,
        steps: int | None,
        seed: int,
        rank: int,
        ranks: int,
    ) -> None:
        self.classes, self.per_class = whole("classes", classes), whole("per_class", per_class)
        super().__init__(labels, classes * per_class, steps=steps, seed=seed, rank=rank, ranks=ranks)
        if classes % ranks:
            raise ValueError(f"classes is {classes}; it must be a multiple of ranks, {ranks}")
        # Positions sorted by class: those of class k are members[first[k] : first[k] + counts[k]].
        members = _by_label(self.labels)
        in_order = self.labels[members]
        first = np.flatnonzero(np.r_[True, in_order[1:] != in_order[:-1]])
        self.class_labels = in_order[first]  # row k of what belongs to classes belongs to this label
        self._members, self._first, self._counts = members, first, np.diff(np.r_[first, len(members)])
        self._drawn = np.flatnonzero(self._counts >= self.fewest)
        takes = np.sort(np.minimum(self._counts[self._drawn], self.per_class)).cumsum()
        if len(takes) == 0 or takes[-1] < self.batch_size:
            most = 0 if len(takes) == 0 else int(takes[-1])
            kind = "classes" if self.fewest == 1 else f"classes of {self.fewest} or more pictures"
            raise ValueError(
                f"labels hold {len(takes)} {kind}, enough for a batch of {most} with at most {per_class} of each; "
                f"{classes} × {per_class} needs {self.batch_size}"
            )
        # So many classes fill a batch even if they are the smallest.
        self._enough = int(np.searchsorted(takes, self.batch_size)) + 1

    def settings(self) -> dict[str, Any]:
        return {**super().settings(), "classes": self.classes, "per_class": self.per_class}

    @abstractmethod
    def _ordering(self) -> Callable[[np.random.Generator], Indices]:
        """What draws enough classes, the most wanted first."""

    def _drawing(self, epoch: int) -> Callable[[int], Indices]:
        ordering = self._ordering()

        def draw(step: int) -> Indices:
            rng = stream(self.seed, "batches", epoch, step)
            return self._fill(ordering(rng), rng)

        return draw

    def _fill(self, order: Indices, rng: np.random.Generator) -> Indices:
        """``per_class`` pictures of each class, all different, or as many as it has, until the batch is full."""
        counts = self._counts[order]
        takes = np.minimum(counts, self.per_class)
        number = int(np.searchsorted(takes.cumsum(), self.batch_size)) + 1
        order, counts, takes = order[:number], counts[:number], takes[:number]
        # Robert Floyd's way to draw distinct numbers, for all classes at once: of 0 to j one is drawn, and where
        # it was drawn before, j itself is new for certain.
        places = np.empty((number, self.per_class), dtype=np.int64)
        for i in range(self.per_class):
            j = np.maximum(counts - takes + i, 0)
            drawn = rng.integers(0, j + 1)
            seen = (places[:, :i] == drawn[:, None]).any(axis=1)
            places[:, i] = np.where(seen, j, drawn)
        chosen = places[np.arange(self.per_class) < takes[:, None]]  # of a small class, all and nothing beyond
        batch: Indices = self._members[np.repeat(self._first[order], takes) + chosen][: self.batch_size]
        return batch


class Groups(_Grouped):
    """n-group sampling: some classes, each as likely as another, and as many pictures of each.

    In the rare case that a class has too few pictures more classes are added until the batch is full; of the last one
    there may then be fewer. Batches are drawn one like the other: an epoch is a number of them, and does not promise
    every picture once.

    Args:
        classes, per_class: 16 × 8 in NRA on CUB and Cars, 32 × 4 on SOP; 60 × 3 in the ranked list loss.

    Reference:
        Schall et al., Deep Metric Learning using Similarities from Nonlinear Rank Approximations, 2019, section III.

    >>> labels = np.array([0, 0, 0, 1, 2, 2])
    >>> sorted(labels[Groups(labels, classes=2, per_class=3).batch(0, 0)].tolist())  # 2 × 3 takes all three classes
    [0, 0, 0, 1, 2, 2]
    """

    key = "groups"

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
        super().__init__(labels, classes, per_class, steps=steps, seed=seed, rank=rank, ranks=ranks)

    def _ordering(self) -> Callable[[np.random.Generator], Indices]:
        return lambda rng: self._drawn[rng.choice(len(self._drawn), self._enough, replace=False)]


class Pairs(Groups):
    """Two pictures of each of some classes, for the N-pair loss; classes of one picture are left out.

    Args:
        classes: Pairs in a batch, 64 in the papers.

    Reference:
        Sohn, Improved Deep Metric Learning with Multi-class N-pair Loss Objective, NeurIPS 2016.
    """

    key = "pairs"
    fewest = 2

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


class HardClasses(_Grouped):
    """Classes that are mistaken for each other: N-pair's hard negative class mining.

    Of some classes drawn at random one is taken, and then, again and again, the class that is most similar to one
    that was taken before. Classes of one picture are left out. Until :meth:`update` has been called, all classes are
    equally hard.

    Args:
        classes, per_class: Pairs, as in the paper, unless told.
        candidates: Classes to choose among; unless told 512, or 2 × ``classes`` if that is more; all if there
            are not so many.

    Differences:
        The paper embeds one or two pictures of each candidate before every batch and asks which class violates the
        triplet constraint most. Here the trainer gives a vector for each class when it has them, say once an
        epoch, and the most similar one (by cosine) violates it most.

    Reference:
        Sohn, Improved Deep Metric Learning with Multi-class N-pair Loss Objective, NeurIPS 2016, section 3.2.
    """

    key = "hard_classes"
    fewest = 2

    def __init__(
        self,
        labels: Labels,
        *,
        classes: int,
        per_class: int = 2,
        candidates: int | None = None,
        steps: int | None = None,
        seed: int = 0,
        rank: int = 0,
        ranks: int = 1,
    ) -> None:
        super().__init__(labels, classes, per_class, steps=steps, seed=seed, rank=rank, ranks=ranks)
        wanted = max(512, 2 * classes) if candidates is None else whole("candidates", candidates, low=classes)
        self.candidates = min(max(wanted, self._enough), len(self._drawn))
        self._means: NDArray[np.float32] | None = None

    def settings(self) -> dict[str, Any]:
        return {**super().settings(), "candidates": self.candidates}

    def update(self, means: NDArray[Any] | None) -> None:
        """Give a vector for each class, [len(class_labels), d]: row k belongs to the label ``class_labels[k]``.

        An epoch under way keeps those it began with, so the time for this is between two epochs.
        """
        if means is None:
            self._means = None
            return
        means = np.asarray(means, dtype=np.float32)
        if means.ndim != 2 or len(means) != len(self.class_labels):
            raise ValueError(f"means has shape {means.shape}; needed is [{len(self.class_labels)}, d], one row a class")
        if not np.isfinite(means).all():
            raise ValueError("means contains NaN or infinity")
        lengths = np.linalg.norm(means, axis=1, keepdims=True)
        self._means = means / np.maximum(lengths, np.finfo(np.float32).tiny)

    def state(self, epoch: int, step: int) -> dict[str, Any]:
        """As for other samplers, and ``means``, an array or None."""
        return {**super().state(epoch, step), "means": self._means}

    def restore(self, state: Mapping[str, Any]) -> tuple[int, int]:
        place = super().restore(state)
        self.update(state.get("means"))
        return place

    def _ordering(self) -> Callable[[np.random.Generator], Indices]:
        means = self._means

        def order(rng: np.random.Generator) -> Indices:
            candidates = self._drawn[rng.choice(len(self._drawn), self.candidates, replace=False)]
            if means is None:
                return candidates[: self._enough]
            return candidates[_chain(means[candidates], self._enough)]

        return order


def _by_label(labels: Indices) -> Indices:
    """Positions sorted by label and, within one, by themselves."""
    low, high, count = int(labels.min()), int(labels.max()), len(labels)
    if (high - low + 1) * count >= 2**63:
        return np.argsort(labels, kind="stable")
    # Sorting plain numbers is several times as fast as sorting places of them.
    return np.sort((labels - low) * count + np.arange(count)) % count


def _chain(vectors: NDArray[np.float32], number: int) -> Indices:
    """The first row and then always the one that is most similar to any row before; of equals the earliest."""
    similar = vectors @ vectors.T
    np.fill_diagonal(similar, -np.inf)
    chain = np.zeros(number, dtype=np.int64)
    nearest = similar[0].copy()  # of each row to those in the chain
    nearest[0] = -np.inf
    for i in range(1, number):
        chain[i] = nearest.argmax()
        np.maximum(nearest, similar[chain[i]], out=nearest)
        nearest[chain[: i + 1]] = -np.inf
    return chain
