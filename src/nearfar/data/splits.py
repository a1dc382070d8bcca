"""Splits into training, validation and test classes, which do not overlap unless a closed set is asked for.

Example:
    >>> import numpy as np
    >>> split = halves(np.array([0, 0, 1, 1, 2, 2, 3, 3]))
    >>> split.train, split.test["test"]
    (array([0, 1, 2, 3]), array([4, 5, 6, 7]))
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from nearfar.data.datasets.base import Dataset, increasing, indices
from nearfar.data.store.sources import Ints
from nearfar.utils.validation import few, number, whole

_NO_ROWS = np.zeros(0, dtype=np.int64)
MIN_CLASSES = 2  # for validation; a class alone is always retrieved correctly


@dataclass(frozen=True, eq=False)
class Split:
    """Rows for training, validation and testing; no class is in two of them, and in a closed set no row.

    Args:
        labels: Labels of the whole dataset, [n].
        train: Training rows, increasing.
        validation: Validation rows, increasing; may be empty.
        test: {"test": rows}, or {"query": rows, "gallery": rows} if queries search a separate gallery; empty if
            nothing is tested.
        closed: Whether training and test share their classes, with different rows.

    Example:
        >>> Split(np.array([0, 1]), np.array([0]), np.array([], dtype=np.int64), {"test": np.array([1])})
        Split(train 1 of 1 classes, validation 0 of 0 classes, test 1 of 1 classes)
    """

    labels: Ints
    train: Ints
    validation: Ints
    test: Mapping[str, Ints]
    closed: bool = False

    def __post_init__(self) -> None:
        labels = indices("labels", self.labels)
        if set(self.test) not in (set(), {"test"}, {"query", "gallery"}):
            raise ValueError(
                f"test has the parts {', '.join(self.test) or 'none'}; allowed are test, or query and gallery"
            )
        train = increasing("train", self.train, len(labels))
        validation = increasing("validation", self.validation, len(labels))
        test = {name: increasing(name, rows, len(labels)) for name, rows in self.test.items()}
        for name, rows in {"train": train, **test}.items():
            if len(rows) == 0:
                raise ValueError(f"{name} has no rows")
        if "query" in test and len(np.intersect1d(test["query"], test["gallery"])):
            raise ValueError(f"query and gallery share row {np.intersect1d(test['query'], test['gallery'])[0]}")
        parts = {"train": train, "validation": validation, "test": np.concatenate([_NO_ROWS, *test.values()])}
        for (name, rows), (other, others) in combinations(parts.items(), 2):
            shared = np.intersect1d(rows, others) if self.closed else np.intersect1d(labels[rows], labels[others])
            if len(shared):
                word, words = ("row", "rows") if self.closed else ("class", "classes")
                raise ValueError(
                    f"{name} and {other} share {len(shared)} {words} ({few(shared, 5)}); parts of a split must have "
                    f"no {word} in common"
                )
        for field, value in (("labels", labels), ("train", train), ("validation", validation), ("test", test)):
            object.__setattr__(self, field, value)

    def __repr__(self) -> str:
        rows = {"train": self.train, "validation": self.validation, **self.test}
        words = (f"{name} {len(part)} of {len(np.unique(self.labels[part]))} classes" for name, part in rows.items())
        return f"Split({', '.join(words)})"


def halves(labels: Ints) -> Split:
    """Use the first half of the classes for training and the second for testing.

    Of an odd number of classes the one in the middle is for training.
    """
    labels = indices("labels", labels)
    classes = np.unique(labels)
    if len(classes) < 2:
        raise ValueError(f"labels has {len(classes)} classes; 2 are needed, one to train and one to test")
    first = labels < classes[(len(classes) + 1) // 2]
    return Split(labels, np.flatnonzero(first), _NO_ROWS, {"test": np.flatnonzero(~first)})


def standard(dataset: Dataset) -> Split:
    """Use the parts of the dataset, or halves of its classes if it has none."""
    parts = dataset.parts
    test = {name: parts[name] for name in ("query", "gallery", "test") if name in parts}
    if "train" in parts and test:
        return Split(dataset.labels, parts["train"], parts.get("validation", _NO_ROWS), test)
    if set(parts) == {"all"}:
        rows = parts["all"]
        split = halves(dataset.labels[rows])
        return Split(dataset.labels, rows[split.train], _NO_ROWS, {"test": rows[split.test["test"]]})
    raise ValueError(
        f"{dataset.name} has the parts {', '.join(parts) or 'none'}; needed are train and test, "
        f"or train, query and gallery"
    )


def train_only(dataset: Dataset) -> Split:
    """Use all classes for training, except those of a validation part, and test nothing."""
    parts = dataset.parts
    train = parts["all"] if "all" in parts else parts.get("train", _NO_ROWS)
    return Split(dataset.labels, train, parts.get("validation", _NO_ROWS), {})


def everything(dataset: Dataset) -> Split:
    """Use all classes of all parts for training, and test nothing."""
    return Split(dataset.labels, np.arange(len(dataset)), _NO_ROWS, {})


def fixed_validation(dataset: Dataset, *, share: float = 0.1, seed: int = 0) -> Split:
    """Use the standard test part, and a random share of the *training* classes for validation.

    At least two classes are for validation and at least one stays for training. A validation part of the dataset is
    added to the training classes first.
    """
    share = number("share", share, low=0.0, high=1.0, open_low=True)
    split, classes = _shuffled(dataset, seed)
    if len(classes) <= MIN_CLASSES:
        raise ValueError(
            f"{dataset.name} has {len(classes)} training classes; validation needs {MIN_CLASSES} and training one"
        )
    count = min(max(MIN_CLASSES, round(share * len(classes))), len(classes) - 1)
    return _with_validation(split, classes[:count])


def k_fold(dataset: Dataset, folds: int = 10, *, seed: int = 0) -> list[Split]:
    """Use the standard test part, and each fold of the *training* classes once for validation.

    Folds have at least two classes, and their sizes differ by at most one.
    """
    split, classes = _shuffled(dataset, seed)
    if whole("folds", folds, low=2) * MIN_CLASSES > len(classes):
        raise ValueError(
            f"folds is {folds}; {dataset.name} has {len(classes)} training classes; a fold needs {MIN_CLASSES}"
        )
    return [_with_validation(split, fold) for fold in np.array_split(classes, folds)]


def closed_set(dataset: Dataset, *, share: float = 0.5, seed: int = 0) -> Split:
    """Train and test on the same classes, with different images of them.

    Uses the split that the dataset was published with, its column "official"; without one, a random share of the images
    of each class is for testing.
    """
    official = dataset.columns.get("official")
    if official is not None and {"train", "test"} <= set(official.tolist()):
        train, test = (np.flatnonzero(official == part) for part in ("train", "test"))
    else:
        test, train = query_gallery(dataset.labels, share=share, seed=seed)
    return Split(dataset.labels, train, _NO_ROWS, {"test": test}, closed=True)


def query_gallery(labels: Ints, *, share: float = 0.5, seed: int = 0) -> tuple[Ints, Ints]:
    """Divide the rows of each class at random into queries and gallery.

    About ``share · n`` of the n rows of a class are queries, but at least one is a query and one is in the gallery. The
    only row of a class is in the gallery.
    """
    share = number("share", share, low=0.0, high=1.0, open_low=True)
    whole("seed", seed, low=0)
    labels = indices("labels", labels)
    _, codes, counts = np.unique(labels, return_inverse=True, return_counts=True)
    queries = np.clip(np.rint(share * counts).astype(np.int64), 1, np.maximum(counts - 1, 0))
    queries[counts == 1] = 0
    # Sorted by class and then at random, the first rows of each class are queries.
    order = np.lexsort((np.random.default_rng(seed).random(len(labels)), codes))
    place = np.arange(len(labels)) - np.repeat(np.cumsum(counts) - counts, counts)
    is_query = np.zeros(len(labels), dtype=bool)
    is_query[order] = place < queries[codes[order]]
    if not is_query.any():
        raise ValueError("labels has no class with two rows; a query needs another of its class in the gallery")
    return np.flatnonzero(is_query), np.flatnonzero(~is_query)


def with_gallery(split: Split, *, share: float = 0.5, seed: int = 0) -> Split:
    """Divide the test rows of a split into queries and gallery."""
    if "test" not in split.test:
        raise ValueError("split has queries and a gallery already")
    rows = split.test["test"]
    query, gallery = query_gallery(split.labels[rows], share=share, seed=seed)
    return Split(split.labels, split.train, split.validation, {"query": rows[query], "gallery": rows[gallery]})


def _shuffled(dataset: Dataset, seed: int) -> tuple[Split, Ints]:
    """Return the standard split without validation, and its training classes in random order."""
    split = standard(dataset)
    train = np.union1d(split.train, split.validation)
    split = Split(split.labels, train, _NO_ROWS, split.test)
    classes = np.unique(split.labels[train])
    if len(classes) < 2:
        raise ValueError(f"{dataset.name} has {len(classes)} training classes; validation needs at least 2")
    return split, np.random.default_rng(whole("seed", seed, low=0)).permutation(classes)


def _with_validation(split: Split, classes: Ints) -> Split:
    chosen = np.isin(split.labels[split.train], classes)
    return Split(split.labels, split.train[~chosen], split.train[chosen], split.test)
