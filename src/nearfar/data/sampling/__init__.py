"""Batch samplers: which items of a dataset make a batch.

Example:
    >>> import numpy as np
    >>> from nearfar.data import sampling
    >>> sampling.names()  # doctest: +ELLIPSIS
    ['given', 'groups', 'hard_classes', 'hard_triplets', 'importance', 'neighbor_classes', 'pairs', 'random', ...]
    >>> labels = np.repeat(np.arange(5), 4)
    >>> sampler = sampling.create("groups", labels, classes=3, per_class=2)
    >>> np.unique(labels[sampler.batch(epoch=0, step=0)], return_counts=True)[1].tolist()
    [2, 2, 2]
"""

from nearfar.data.sampling.base import BatchSampler, Independent, Sampler, create, fitting_classes, names
from nearfar.data.sampling.classes import ClassBalanced, ClassPairs, HardClasses, NeighborClasses
from nearfar.data.sampling.items import Given, HardTriplets, Importance, Random, SmartTriplets, hard_items

__all__ = [
    "BatchSampler", "ClassBalanced", "ClassPairs", "Given", "HardClasses", "HardTriplets", "Importance",
    "Independent", "NeighborClasses", "Random", "Sampler", "SmartTriplets", "create", "fitting_classes", "hard_items",
    "names",
]  # fmt: skip
