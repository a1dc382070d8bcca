"""Who is learned from, who chooses, and who is asked at the end: never the same classes.

>>> import numpy as np
>>> split = halves(np.array([0, 0, 1, 1, 2, 2, 3, 3]))
>>> split.train, split.test["test"]
(array([0, 1, 2, 3]), array([4, 5, 6, 7]))
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from nearfar.data.datasets.base import Dataset, indices
from nearfar.data.store.sources import Ints
from nearfar.utils.validation import few, number, whole

_NOBODY = np.zeros(0, dtype=np.int64)
FEWEST = 2  # classes that validate


@dataclass(frozen=True, eq=False)
class Split:
    """Rows for training, for validation (which may be none) and for the test; no class is in two of them.

    Args:
        labels: [n] of the whole data set.
        train: Rows to learn from, rising.
        validation: Rows to choose with, rising; may be empty.
        test: {"test": rows}, or {"query": rows, "gallery": rows} where queries look through a gallery.
    """

    labels: Ints
    train: Ints
    validation: Ints
    test: Mapping[str, Ints]

    def __post_init__(self) -> None:
        labels = indices("labels", self.labels)
        if set(self.test) not in ({"test"}, {"query", "gallery"}):
            raise ValueError(
                f"test has the parts {', '.join(self.test) or 'none'}; allowed are test, or query and gallery"
            )
        train, validation = indices("train", self.train), indices("validation", self.validation)
        test = {name: indices(name, rows) for name, rows in self.test.items()}
        everything = {"train": train, "validation": validation, **test}
        for name, rows in everything.items():
            if len(rows) == 0 and name != "validation":
                raise ValueError(f"{name} has no rows")
            if len(rows) and (rows[0] < 0 or rows[-1] >= len(labels) or (np.diff(rows) <= 0).any()):
                raise ValueError(f"{name} must be increasing numbers from 0 to {len(labels) - 1}")
        if "query" in test and len(np.intersect1d(test["query"], test["gallery"])):
            raise ValueError(f"query and gallery share row {np.intersect1d(test['query'], test['gallery'])[0]}")
        _check_disjoint(labels, {"train": train, "validation": validation, "test": np.concatenate([*test.values()])})
        for field, value in (("labels", labels), ("train", train), ("validation", validation)):
            object.__setattr__(self, field, value)
        object.__setattr__(self, "test", MappingProxyType(test))

    def __reduce__(self) -> tuple[Any, ...]:
        return Split, (self.labels, self.train, self.validation, dict(self.test))

    def __repr__(self) -> str:
        rows = {"train": self.train, "validation": self.validation, **self.test}
        words = (f"{name} {len(part)} of {len(np.unique(self.labels[part]))} classes" for name, part in rows.items())
        return f"Split({', '.join(words)})"


def halves(labels: Ints) -> Split:
    """The first half of the classes for training, the second for the test.

    Of an odd number of classes the one in the middle is for training.
    """
    labels = indices("labels", labels)
    classes = np.unique(labels)
    if len(classes) < 2:
        raise ValueError(f"labels has {len(classes)} classes; at least 2 are needed to learn from some and test others")
    first = labels < classes[(len(classes) + 1) // 2]
    return Split(labels, np.flatnonzero(first), _NOBODY, {"test": np.flatnonzero(~first)})


def standard(dataset: Dataset) -> Split:
    """The data set's own parts, or halves of its classes where it has none."""
    parts = dataset.parts
    test = {name: parts[name] for name in ("query", "gallery", "test") if name in parts}
    if "train" in parts and test:
        return Split(dataset.labels, parts["train"], parts.get("validation", _NOBODY), test)
    if set(parts) == {"all"}:
        rows = parts["all"]
        split = halves(dataset.labels[rows])
        return Split(dataset.labels, rows[split.train], _NOBODY, {"test": rows[split.test["test"]]})
    raise ValueError(
        f"{dataset.name} has the parts {', '.join(parts) or 'none'}; needed are train and test, "
        f"or train, query and gallery"
    )


def fixed_validation(dataset: Dataset, *, share: float = 0.1, seed: int = 0) -> Split:
    """The standard test, and a random share of the *training* classes for validation.

    At least two classes validate, as one alone would find nothing but itself, and at least one stays for training. A
    validation part that the data set has of its own counts as training classes first.
    """
    share = number("share", share, low=0.0, high=1.0, open_low=True)
    split, classes = _shuffled(dataset, seed)
    if len(classes) <= FEWEST:
        raise ValueError(
            f"{dataset.name} has {len(classes)} training classes; {FEWEST} must validate, and one must be left"
        )
    count = min(max(FEWEST, round(share * len(classes))), len(classes) - 1)
    return _with_validation(split, classes[:count])


def k_fold(dataset: Dataset, folds: int = 10, *, seed: int = 0) -> list[Split]:
    """The standard test, and the *training* classes in folds: each class validates exactly once.

    Folds have at least two classes, as one alone would find nothing but itself, and differ by at most one.

    >>> from nearfar.data import from_arrays
    >>> data = from_arrays(np.eye(16, dtype=np.float32), np.arange(16) // 2)
    >>> [sorted(set(data.labels[split.validation].tolist())) for split in k_fold(data, 2, seed=1)]
    [[0, 1], [2, 3]]
    """
    split, classes = _shuffled(dataset, seed)
    if whole("folds", folds, low=2) * FEWEST > len(classes):
        raise ValueError(
            f"folds is {folds}; {dataset.name} has {len(classes)} training classes, and a fold needs {FEWEST} of them"
        )
    return [_with_validation(split, fold) for fold in np.array_split(classes, folds)]


def query_gallery(labels: Ints, *, share: float = 0.5, seed: int = 0) -> tuple[Ints, Ints]:
    """Rows that ask and rows that are looked through, from the same classes, at random.

    Of a class with n rows about ``share · n`` ask, but at least one asks and one can be found. The only row of a
    class is for the gallery, where it can mislead but not be missed.

    >>> query_gallery(np.array([0, 0, 1, 1, 2]), seed=0)
    (array([1, 3]), array([0, 2, 4]))
    """
    share = number("share", share, low=0.0, high=1.0, open_low=True)
    whole("seed", seed, low=0)
    labels = indices("labels", labels)
    _, codes, counts = np.unique(labels, return_inverse=True, return_counts=True)
    asking = np.clip(np.rint(share * counts).astype(np.int64), 1, np.maximum(counts - 1, 0))
    asking[counts == 1] = 0
    # In random order and then by class, a row's place within its class says whether it asks.
    order = np.lexsort((np.random.default_rng(seed).random(len(labels)), codes))
    place = np.arange(len(labels)) - np.repeat(np.cumsum(counts) - counts, counts)
    asks = np.zeros(len(labels), dtype=bool)
    asks[order] = place < asking[codes[order]]
    if not asks.any():
        raise ValueError("labels has no class with two rows; a query needs another of its class in the gallery")
    return np.flatnonzero(asks), np.flatnonzero(~asks)


def with_gallery(split: Split, *, share: float = 0.5, seed: int = 0) -> Split:
    """The same split with its test rows as queries and gallery."""
    if "test" not in split.test:
        raise ValueError("split has queries and a gallery already")
    rows = split.test["test"]
    query, gallery = query_gallery(split.labels[rows], share=share, seed=seed)
    return Split(split.labels, split.train, split.validation, {"query": rows[query], "gallery": rows[gallery]})


def _shuffled(dataset: Dataset, seed: int) -> tuple[Split, Ints]:
    """The standard split without validation, and its training classes in random order."""
    split = standard(dataset)
    train = np.union1d(split.train, split.validation)
    split = Split(split.labels, train, _NOBODY, split.test)
    classes = np.unique(split.labels[train])
    if len(classes) < 2:
        raise ValueError(f"{dataset.name} has {len(classes)} training classes; validation needs at least 2")
    return split, np.random.default_rng(whole("seed", seed, low=0)).permutation(classes)


def _with_validation(split: Split, classes: Ints) -> Split:
    chosen = np.isin(split.labels[split.train], classes)
    return Split(split.labels, split.train[~chosen], split.train[chosen], split.test)


def _check_disjoint(labels: Ints, parts: Mapping[str, Ints]) -> None:
    seen: dict[str, Ints] = {}
    for name, rows in parts.items():
        classes = np.unique(labels[rows])
        for other, others in seen.items():
            shared = np.intersect1d(classes, others)
            if len(shared):
                raise ValueError(
                    f"{other} and {name} share {len(shared)} classes ({few(shared, 5)}); they must have none in common"
                    ": what is asked for must be new"
                )
        seen[name] = classes
