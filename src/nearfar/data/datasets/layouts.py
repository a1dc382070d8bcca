"""Layouts that several datasets share: one folder per class, and lists of files."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

import numpy as np

from nearfar.data.datasets.archives import Tree
from nearfar.data.datasets.base import PART_WORDS, PARTS, Dataset, left_out
from nearfar.data.store.sources import Ints
from nearfar.utils.validation import few

Array = np.ndarray[Any, np.dtype[Any]]
Roots = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


class ClassFile(NamedTuple):
    """An image in a class folder."""

    file: int  # index of the file in the tree
    group: str  # name of the class folder
    part: str | None  # part whose folder contains the class folder, if any
    folders: tuple[str, ...] = ()  # the class folder and those below it that contain the image


@dataclass(frozen=True)
class Spec:
    """What is known of a dataset before it is opened."""

    name: str
    looked_for: str
    parts: Mapping[str, tuple[int, int]] = field(default_factory=dict)  # published numbers of images and of classes
    trained: int = 0  # classes up to this number are training classes

    def part(self, number: int) -> str:
        """Return the part of a class."""
        return "train" if number <= self.trained else "test"


@dataclass(frozen=True)
class ClassFolders:
    """Images by class folder."""

    rows: tuple[ClassFile, ...]  # images in class folders
    notes: tuple[str, ...]  # a line for each image that is in no class folder

    @property
    def parts(self) -> set[str]:
        """Parts that have a folder."""
        return {row.part for row in self.rows if row.part}


def class_folders(tree: Tree) -> ClassFolders:
    """Find one folder per class, optionally below train/ and test/, optionally inside further folders.

    Folders inside a class folder belong to the class.
    """
    paths = [(index, tree.names[index].split("/")) for index in tree.images]
    depth = 0
    while True:
        heads = {path[depth] for _, path in paths if len(path) > depth + 1}
        deep = any(len(path) > depth + 2 for _, path in paths)
        if len(heads) != 1 or not deep or next(iter(heads)).lower() in PART_WORDS:
            break
        depth += 1
    words = {head: PART_WORDS.get(head.lower()) for head in heads}
    in_parts = bool(heads) and deep and all(words.values())
    if {"train", "test"} <= set(words.values()) and not in_parts and deep:
        others = ", ".join(sorted(head for head, word in words.items() if word is None))
        raise ValueError(
            f"{tree.root} has train and test folders, and other folders with images next to them: {others}"
        )
    rows, notes = [], []
    for index, path in paths:
        part = words[path[depth]] if in_parts and len(path) > depth + 1 else None
        start = depth + in_parts
        if len(path) > start + 1:
            rows.append(ClassFile(index, path[start], part, tuple(path[start:-1])))
        else:
            notes.append(left_out(tree.names[index], "not in a class folder"))
    return ClassFolders(tuple(rows), tuple(notes))


class Match(NamedTuple):
    """Files that a list names."""

    files: Ints  # index of each listed file in the tree; −1 if it is missing
    extra: tuple[str, ...]  # images in the same folders that are not listed


def match(tree: Tree, listed: Sequence[str], folder: str = "") -> Match:
    """Find listed paths in a tree, below the folder that contains most of them.

    Extensions may differ, as copies often have another format. As masks of the same names may be in a neighboring
    folder, folders with equal extensions are preferred, then folders of the expected name.
    """
    exact = {tree.names[index]: index for index in tree.images}
    stems = {_stem(name): index for name, index in exact.items()}
    same, hits = _below(exact, set(listed)), _below(stems, {_stem(path) for path in listed})
    base = max(sorted(hits), key=lambda below: (same[below], below.endswith(folder), hits[below]), default="")
    files = [exact.get(base + path, stems.get(base + _stem(path), -1)) for path in listed]
    folders = {(base + path).rpartition("/")[0] for path in listed}
    used = set(files)
    extra = [name for name, index in exact.items() if index not in used and name.rpartition("/")[0] in folders]
    return Match(np.array(files, dtype=np.int64), tuple(extra))


def _below(names: Iterable[str], wanted: set[str]) -> Counter[str]:
    """Count how many of the wanted paths each folder contains."""
    counts: Counter[str] = Counter()
    for name in names:
        starts = [0, *(at + 1 for at, letter in enumerate(name) if letter == "/")]
        counts.update(name[:start] for start in starts if name[start:] in wanted)
    return counts


def _stem(path: str) -> str:
    return path.rpartition(".")[0] or path


def from_list(
    spec: Spec,
    tree: Tree,
    listing: str,
    items: Sequence[tuple[str, int, str, str]],
    *,
    columns: Mapping[str, Sequence[object]] | None = None,
    folder: str = "",
) -> Dataset:
    """Create a dataset from a list of its images; missing and unlisted images are noted.

    An item has the path of an image, the number and the name of its class, and its part; each of ``columns`` has a
    value for it. The images are expected in ``folder``.
    """
    notes = list(tree.remarks)
    first: dict[str, int] = {}
    for row, (path, *_) in enumerate(items):
        if first.setdefault(path, row) != row:
            notes.append(f"{path}: listed twice in {listing}; the first line counts")
    matched = match(tree, list(first), folder)
    files = dict(zip(first.values(), matched.files.tolist(), strict=True))
    notes += [f"{items[row][0]}: listed in {listing}, but missing" for row, file in files.items() if file < 0]
    notes += [left_out(path, f"not listed in {listing}") for path in matched.extra]
    there = {row: file for row, file in files.items() if file >= 0}
    if not there:
        raise FileNotFoundError(
            f"{spec.name}: {listing} lists {len(items)} images, but none is below {tree.root}; "
            f"the first is {items[0][0]}"
            if items
            else f"{spec.name}: {listing} in {tree.root} lists no images"
        )
    return assemble(
        spec,
        tree,
        [(file, *items[row][1:]) for row, file in there.items()],
        columns={key: np.array([column[row] for row in there]) for key, column in (columns or {}).items()},
        notes=notes,
    )


def from_folders(
    spec: Spec,
    tree: Tree,
    folders: ClassFolders,
    numbers: Mapping[str, int],
    part: Callable[[ClassFile], str],
    *,
    columns: Mapping[str, Array] | None = None,
    notes: Iterable[str] = (),
) -> Dataset:
    """Create a dataset from class folders, given the number of each class and the part of each image."""
    items = [(row.file, numbers[row.group], row.group, part(row)) for row in folders.rows]
    return assemble(spec, tree, items, columns=columns, notes=[*tree.remarks, *folders.notes, *notes])


def assemble(
    spec: Spec,
    tree: Tree,
    items: Sequence[tuple[int, int, str, str]],
    *,
    columns: Mapping[str, Array] | None = None,
    notes: Iterable[str] = (),
) -> Dataset:
    """Create a dataset sorted by class number and path; classes without images get no label.

    An item has the index of a file in the tree, the number and the name of its class, and its part.
    """
    order = sorted(range(len(items)), key=lambda row: (items[row][1], tree.names[items[row][0]]))
    files, numbers, names, parts = zip(*(items[row] for row in order), strict=True)
    classes = dict(zip(numbers, names, strict=True))
    label = {number: at for at, number in enumerate(classes)}
    words = np.array(parts)
    return Dataset(
        name=spec.name,
        source=tree.files.take(files),
        labels=np.array([label[number] for number in numbers], dtype=np.int64),
        classes=tuple(classes.values()),
        parts={part: np.flatnonzero(words == part) for part in sorted(set(parts), key=PARTS.index)},
        columns={key: column[order] for key, column in (columns or {}).items()},
        notes=(*notes, *_differences(numbers, parts, spec)),
        unreadable=tree.unreadable,
    )


def _differences(numbers: Sequence[int], parts: Sequence[str], spec: Spec) -> list[str]:
    notes = []
    for part, published in spec.parts.items():
        inside = [number for number, word in zip(numbers, parts, strict=True) if word == part]
        for count, right, kind in zip((len(inside), len(set(inside))), published, ("images", "classes"), strict=True):
            if count != right:
                notes.append(f"{part} has {count:,} {kind}; published are {right:,}")
    return notes


def refuse(spec: Spec, tree: Tree, more: str = "") -> NoReturn:
    """Raise the error that a dataset was not recognized."""
    tree.check_readable()
    top = sorted({path.split("/")[0] + ("/" if "/" in path else "") for path in tree.names})
    raise FileNotFoundError(
        f"{spec.name} was not recognized in {tree.root}; looked for {spec.looked_for}{more}; "
        f"found {few(top, 8) or 'nothing'}"
    )


def lines(tree: Tree, index: int, fields: int, *, skip: int = 0) -> list[list[str]]:
    """Return the lines of a list, split at whitespace; the last field takes the rest of the line."""
    rows = []
    for number, line in enumerate(tree.text(index).splitlines(), start=1):
        if number <= skip or not line.strip():
            continue
        row = line.split(maxsplit=fields - 1)
        if len(row) < fields:
            raise ValueError(
                f"{tree.names[index]} in {tree.root}, line {number}: {line!r} has fewer than {fields} fields"
            )
        rows.append([field.strip() for field in row])
    return rows


def number(tree: Tree, index: int, word: str) -> int:
    """Parse a whole number of a list."""
    if not word.isdecimal():
        raise ValueError(f"{tree.names[index]} in {tree.root} has {word!r} in place of a whole number")
    return int(word)
