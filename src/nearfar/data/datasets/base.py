"""The dataset class: images or vectors, labels and parts, before anything is decoded; and datasets by name."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any, TypeVar

import numpy as np

from nearfar.data.store.sources import Arrays, Ints, Source, Vectors
from nearfar.utils.registry import Registry
from nearfar.utils.validation import defaults_of, few, refuse_unknown

SHOWN = 8  # entries in an error

PARTS = ("train", "validation", "test", "query", "gallery", "all")
# Names of folders, archives and table entries that denote a part.
PART_WORDS = {
    "train": "train",
    "training": "train",
    "val": "validation",
    "valid": "validation",
    "validation": "validation",
    "test": "test",
    "testing": "test",
    "query": "query",
    "gallery": "gallery",
}
Column = np.ndarray[Any, np.dtype[Any]]


class Note(str):
    """One line about a dataset, with a flag that programs can read."""

    left_out: bool  # whether it says that a file or row of the source is not part of the dataset

    def __new__(cls, text: str, *, left_out: bool = False) -> Note:
        note = super().__new__(cls, text)
        note.left_out = left_out
        return note


def left_out(what: str, why: str) -> Note:
    """Return the note that a file or row was left out."""
    return Note(f"{what}: {why}; left out", left_out=True)


class UnreadableError(OSError):
    """Files or folders of a dataset could not be looked at, so that it is unknown what they contain."""

    def __init__(self, name: str, entries: Sequence[tuple[str, str]], advice: str = "") -> None:
        listed = few([f"{path} ({reason})" for path, reason in entries], SHOWN)
        super().__init__(f"{name}: {len(entries):,} files or folders cannot be read: {listed}{advice}")
        self.entries = tuple(entries)


@dataclass(frozen=True, eq=False)
class ItemRelations:
    """Given pairs or triplets of the items of a dataset."""

    rows: Ints  # rows of the dataset, int64: [p, 2] for pairs; [p, 3] for triplets, of anchor, positive and negative
    scores: Column  # how similar the members of each pair are, from 0 to 1, [p]; 1 for triplets
    same: Column  # whether the members of each pair are the same, [p]
    parts: Column  # part of each, [p]
    folds: Ints | None = None  # fold of each in cross-validation, [p]; None: ten folds

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def width(self) -> int:
        """2 for pairs, 3 for triplets."""
        return int(self.rows.shape[1])

    def take(self, which: Column) -> ItemRelations:
        """Return some of them."""
        folds = None if self.folds is None else self.folds[which]
        return ItemRelations(self.rows[which], self.scores[which], self.same[which], self.parts[which], folds)

    def among(self, rows: Ints) -> ItemRelations:
        """Return those between some rows of the dataset, with positions in these rows instead of rows."""
        kept = self.take(np.flatnonzero(np.isin(self.rows, rows).all(axis=1)))
        return replace(kept, rows=np.searchsorted(rows, kept.rows))


@dataclass(frozen=True, eq=False)
class Dataset:
    """Images or vectors, their classes, and the parts they belong to.

    Args:
        name: Name of the dataset.
        source: Where the images are; see ``nearfar.data.store.sources``.
        labels: Class of each item, 0 … C − 1, int64 [n]. Classes are numbered in the order of the protocol.
        classes: Names of the classes, by number.
        parts: Sorted, disjoint indices: "train" and "test", or "train", "query" and "gallery", or "all".
        columns: Further columns, each [n].
        notes: Differences from the published dataset and files that were left out, one line each.
        unreadable: Paths of files and folders that could not be looked at, each with the reason.
        relations: Given pairs or triplets in place of classes; None if there are none.
        guessed: Settings that were guessed from the contents, such as the columns of a table.

    Example:
        >>> from nearfar.data.store.sources import Vectors
        >>> vectors = Vectors(np.eye(4, dtype=np.float32))
        >>> data = Dataset("four", vectors, np.array([0, 0, 1, 1]), ("jay", "wren"), {"all": np.arange(4)})
        >>> len(data), data.num_classes
        (4, 2)
    """

    name: str
    source: Source
    labels: Ints
    classes: tuple[str, ...]
    parts: Mapping[str, Ints]
    columns: Mapping[str, Column] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    unreadable: tuple[tuple[str, str], ...] = ()
    relations: ItemRelations | None = None
    guessed: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        labels = indices("labels", self.labels)
        if len(labels) != len(self.source):
            raise ValueError(f"labels has {len(labels)} rows; needed are {len(self.source)}, one for each item")
        if len(labels) and not (labels.min() >= 0 and labels.max() < len(self.classes)):
            raise ValueError(
                f"labels go from {labels.min()} to {labels.max()}; allowed are 0 to {len(self.classes) - 1}, "
                f"as there are {len(self.classes)} classes"
            )
        if len(set(self.classes)) < len(self.classes):
            twice = next(name for name in self.classes if self.classes.count(name) > 1)
            raise ValueError(f"two classes have the name {twice!r}")
        for name in self.parts:
            if name not in PARTS:
                raise ValueError(f"parts has {name!r}; allowed are {', '.join(PARTS)}")
        parts = {name: increasing(f"parts[{name!r}]", part, len(labels)) for name, part in self.parts.items()}
        for (name, part), (other, others) in combinations(parts.items(), 2):
            if len(shared := np.intersect1d(part, others)):
                raise ValueError(f"parts[{other!r}] and parts[{name!r}] share row {shared[0]}")
        for name, column in self.columns.items():
            if column.shape != labels.shape:
                raise ValueError(f"columns[{name!r}] has shape {list(column.shape)}; needed is [{len(labels)}]")
        for name, value in (
            ("labels", labels),
            ("classes", tuple(self.classes)),
            ("parts", parts),
            ("columns", dict(self.columns)),
            ("notes", tuple(self.notes)),
        ):
            object.__setattr__(self, name, value)

    def __len__(self) -> int:
        return len(self.labels)

    def __repr__(self) -> str:
        parts = ", ".join(f"{name} {len(part)}" for name, part in self.parts.items())
        return f"Dataset({self.name!r}: {len(self)} of {self.num_classes} classes; {parts}; {len(self.notes)} notes)"

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        return len(self.classes)

    @property
    def left_out(self) -> list[str]:
        """The notes about files and rows of the source that are not part of the dataset."""
        return [note for note in self.notes if isinstance(note, Note) and note.left_out]

    @property
    def guess(self) -> str:
        """The settings that were guessed, in a line; "" if there are none."""
        told = ", ".join(f"{key} is {value!r}" for key, value in self.guessed.items())
        return told and f"{self.name}: guessed that {told}"

    @property
    def is_vectors(self) -> bool:
        """Whether the items are vectors."""
        return isinstance(self.source, Vectors)

    @property
    def is_encoded(self) -> bool:
        """Whether the items are image files that have to be decoded."""
        return not isinstance(self.source, Arrays)


def indices(name: str, array: Column) -> Ints:
    """Return whole numbers [n] as a read-only int64 copy."""
    if not isinstance(array, np.ndarray) or array.ndim != 1:
        shape = list(array.shape) if isinstance(array, np.ndarray) else type(array).__name__
        raise ValueError(f"{name} is {shape}; a NumPy array of shape [n] is needed")
    if array.dtype.kind not in "iu" and array.size:
        raise TypeError(f"{name} is of {array.dtype}; whole numbers are needed")
    copy = array.astype(np.int64)
    copy.flags.writeable = False
    return copy


def increasing(name: str, array: Column, count: int) -> Ints:
    """Return increasing row numbers below ``count`` as a read-only int64 copy."""
    rows = indices(name, array)
    if len(rows) and (rows[0] < 0 or rows[-1] >= count or (np.diff(rows) <= 0).any()):
        raise ValueError(f"{name} must be increasing numbers from 0 to {count - 1}")
    return rows


def encode_labels(values: Column) -> tuple[tuple[str, ...], Ints]:
    """Return the names of the classes and the class number of each value.

    Classes are sorted by number if all are whole numbers, and by name otherwise.
    """
    unique, codes = np.unique(values if values.dtype.kind in "iu" else values.astype(str), return_inverse=True)
    names = [str(name) for name in unique]
    order = list(range(len(names)))
    if all(is_whole(name) for name in names):
        order.sort(key=lambda at: int(names[at]))
    place = np.empty(len(names), dtype=np.int64)
    place[order] = np.arange(len(names))
    return tuple(names[at] for at in order), place[codes.reshape(-1)]


def encode_parts(words: Sequence[str] | Column | None, count: int) -> dict[str, Ints]:
    """Return the rows of each part."""
    if words is None:
        return {"all": np.arange(count)}
    if len(words) != count:
        raise ValueError(f"split has {len(words)} rows; needed are {count}")
    rows: dict[str, list[int]] = {}
    for row, word in enumerate(words):
        word = str(word).strip().lower()
        if word and word not in PART_WORDS:
            raise ValueError(f"split has {word!r} in row {row}; allowed are {', '.join(PART_WORDS)}")
        if word:
            rows.setdefault(PART_WORDS[word], []).append(row)
    if not rows:
        return {"all": np.arange(count)}
    return {part: np.array(rows[part], dtype=np.int64) for part in PARTS if part in rows}


def is_whole(word: str) -> bool:
    """Return whether text is a decimal integer."""
    digits = word.removeprefix("-")
    return digits.isascii() and digits.isdecimal()


Opener = TypeVar("Opener", bound=Callable[..., Dataset])
Root = str | os.PathLike[str]
_OPENERS: Registry[Callable[..., Dataset]] = Registry("dataset", "root")
names = _OPENERS.names
"""Return the names of all datasets, sorted."""
get = _OPENERS.get
"""Return the function that opens a dataset."""
settings_of = _OPENERS.defaults
"""Return the settings of a dataset and their defaults (``inspect.Parameter.empty`` if required)."""


def register(opener: Opener) -> Opener:
    """Register a function that opens a dataset, under the function's name. Used as a decorator.

    Args:
        opener: The function. If the dataset is on disk, its first parameter is ``root``; all others are keywords.

    Example:
        >>> @register
        ... def squares(*, count: int = 4) -> Dataset:
        ...     from nearfar.data import from_arrays
        ...     return from_arrays(np.eye(count), np.arange(count) // 2, name="squares")
        >>> len(open("squares", count=6))
        6
        >>> del _OPENERS.entries["squares"]
    """
    _OPENERS.register(opener.__name__, opener)
    return opener


def open(name: str, /, root: Any = None, **settings: Any) -> Dataset:
    """Open a dataset by name.

    Args:
        name: One of :func:`names`.
        root: Path of the dataset: a folder, an archive or a list of archives. Bundled and generated datasets have none.
        settings: Settings of the dataset, see :func:`describe`.

    Example:
        >>> open("digits")
        Dataset('digits': 1797 of 10 classes; train 901, test 896; 0 notes)
    """
    allowed, needs_root = settings_of(name), takes_root(name)
    refuse_unknown(name, settings, allowed)
    if needs_root is None and root is not None:
        raise TypeError(f"root is {root!r}; {name} takes none")
    if needs_root and root is None:
        raise TypeError(f"{name} needs root, the path of the dataset")
    dataset: Dataset = _OPENERS.create(name, *(() if root is None else (root,)), **settings)
    return dataset


def takes_root(name: str) -> bool | None:
    """Return True if a dataset needs a root, False if it is optional, and None if there is none."""
    defaults = defaults_of(get(name))
    return defaults["root"] is inspect.Parameter.empty if "root" in defaults else None


def summary(name: str) -> str:
    """Return the first line of a dataset's description.

    Args:
        name: Name of the dataset.
    """
    return describe(name).partition("\n")[0]


def describe(name: str) -> str:
    """Return the description of a dataset: where to get it, the layouts that are recognized, and its settings.

    Args:
        name: Name of the dataset.
    """
    return inspect.cleandoc(get(name).__doc__ or "").replace("\nArgs:\n", "\nSettings:\n")


def problems(dataset: Dataset) -> list[str]:
    """Return the notes of a dataset and what would cause trouble in training or evaluation. No image is decoded.

    Args:
        dataset: The dataset.

    Example:
        >>> problems(open("digits"))
        []
    """
    trouble = list(dataset.notes)
    counts = np.bincount(dataset.labels, minlength=dataset.num_classes)
    for label in np.flatnonzero(counts == 0):
        trouble.append(f"class {dataset.classes[label]} has no images")
    lonely = [dataset.classes[label] for label in np.flatnonzero(counts == 1)]
    if lonely:
        names = few(lonely, 10)
        trouble.append(f"{len(lonely)} classes have a single image, which has no match in its class: {names}")
    inside = np.zeros(len(dataset), dtype=bool)
    for name, rows in dataset.parts.items():
        inside[rows] = True
        if not len(rows):
            trouble.append(f"part {name} has no images")
    if not inside.all():
        trouble.append(f"{np.count_nonzero(~inside)} images are in no part")
    return trouble
