"""Hard negative class mining."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearfar.data.sampling.base import Indices, Labels, register
from nearfar.data.sampling.class_balanced import ClassBalanced
from nearfar.utils.validation import whole


@register
class HardClasses(ClassBalanced):
    """Draws classes that are similar to each other: the hard negative class mining of the N-pair loss.

    Draws candidate classes at random, takes the first, and then repeatedly takes the candidate that is most similar to
    any class taken before. Classes with one item are never drawn. Until :meth:`update` is called, classes are drawn
    uniformly.

    Args:
        labels: Integer labels [n], one per item.
        classes: Classes per batch.
        per_class: Items of each class; the paper uses pairs.
        candidates: Classes to choose from; None for 512, or 2 × ``classes`` if that is more. At most all classes.
        steps: Batches per epoch; None for n // batch_size.
        seed: Seed of all random draws.
        rank: Which share of each batch this sampler returns.
        ranks: Number of shares; ``classes`` must be a multiple of it.

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
        rank: int = 0,
        ranks: int = 1,
    ) -> None:
        super().__init__(labels, classes=classes, per_class=per_class, steps=steps, seed=seed, rank=rank, ranks=ranks)
        wanted = max(512, 2 * classes) if candidates is None else whole("candidates", candidates, low=classes)
        self.candidates = min(max(wanted, self._enough), len(self._eligible))
        self._means: NDArray[np.float32] | None = None

    def settings(self) -> dict[str, Any]:
        return {**super().settings(), "candidates": self.candidates}

    def update(self, means: NDArray[Any] | None) -> None:
        """Set the vectors that classes are compared by.

        An epoch that has started keeps the vectors it started with, so call this between epochs.

        Args:
            means: One vector per class, [len(class_labels), d]; row k belongs to ``class_labels[k]``. None removes
                them.
        """
        if means is None:
            self._means = None
            return
        means = np.asarray(means, dtype=np.float32)
        if means.ndim != 2 or len(means) != len(self.class_labels):
            raise ValueError(
                f"means has shape {means.shape}; needed is [{len(self.class_labels)}, d], one row per class"
            )
        if not np.isfinite(means).all():
            raise ValueError("means contains NaN or infinity")
        lengths = np.linalg.norm(means, axis=1, keepdims=True)
        self._means = means / np.maximum(lengths, np.finfo(np.float32).tiny)

    def state(self, epoch: int, step: int) -> dict[str, Any]:
        """Return the state of :meth:`Sampler.state` and ``means``, an array or None."""
        return {**super().state(epoch, step), "means": self._means}

    def restore(self, state: Mapping[str, Any]) -> tuple[int, int]:
        position = super().restore(state)
        self.update(state.get("means"))
        return position

    def _class_order(self) -> Callable[[np.random.Generator], Indices]:
        means = self._means

        def order(rng: np.random.Generator) -> Indices:
            candidates = self._eligible[rng.choice(len(self._eligible), self.candidates, replace=False)]
            if means is None:
                return candidates[: self._enough]
            return candidates[_chain(means[candidates], self._enough)]

        return order


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
