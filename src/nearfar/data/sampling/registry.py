"""Samplers by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from nearfar.data.sampling.base import Labels, Sampler, checked_labels
from nearfar.data.sampling.class_balanced import ClassBalanced, Pairs
from nearfar.data.sampling.hard_classes import HardClasses
from nearfar.data.sampling.neighbors import HardTriplets, Importance, NeighborClasses, SmartTriplets
from nearfar.data.sampling.random import Random
from nearfar.utils.validation import check_settings, defaults_of, known, whole

SAMPLERS: dict[str, type[Sampler]] = {
    sampler.key: sampler
    for sampler in (
        ClassBalanced,
        HardClasses,
        HardTriplets,
        Importance,
        NeighborClasses,
        Pairs,
        Random,
        SmartTriplets,
    )
}


def names() -> list[str]:
    """Return the names of all samplers."""
    return sorted(SAMPLERS)


def create(name: str, labels: Labels, **settings: Any) -> Sampler:
    """Create a sampler by name.

    Args:
        name: "groups" (class-balanced), "pairs", "random", "hard_classes", "neighbor_classes", "importance",
            "hard_triplets" or "smart_triplets".
        labels: Integer labels [n], one per item.
        settings: Keyword arguments of the sampler.

    Example:
        >>> import numpy as np
        >>> labels = np.repeat(np.arange(5), 4)
        >>> batch = create("groups", labels, classes=3, per_class=2).batch(epoch=0, step=0)
        >>> np.unique(labels[batch], return_counts=True)[1].tolist()
        [2, 2, 2]
    """
    # Every sampler takes labels and the keyword arguments that are checked here.
    sampler: Callable[..., Sampler] = known("sampler", name, SAMPLERS)
    check_settings(name, settings, defaults_of(sampler, "labels"))
    return sampler(labels, **settings)


def fitting_classes(labels: Labels, batch_size: int, per_class: int, ranks: int = 1) -> int:
    """Return the number of classes that fill a batch with ``per_class`` items each, or as many as there are.

    Args:
        labels: Integer labels [n], one per item.
        batch_size: Items per batch, over all ranks.
        per_class: Items of each class.
        ranks: The result is a multiple of this.

    Example:
        >>> import numpy as np
        >>> labels = np.array([0, 0, 0, 1, 1, 2])
        >>> fitting_classes(labels, batch_size=64, per_class=2)  # two of class 0, two of class 1
        2
    """
    counts = np.unique(checked_labels(labels), return_counts=True)[1]
    most = int(np.minimum(counts[counts > 1], per_class).sum())
    return max(1, min(whole("batch_size", batch_size), most) // whole("per_class", per_class) // ranks) * ranks
