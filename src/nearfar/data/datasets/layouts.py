"""Layouts that several data sets share: one folder for each class, and lists of files."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, NoReturn

import numpy as np

from nearfar.data.datasets.base import Dataset, left_out
from nearfar.data.datasets.tree import PART_WORDS, Tree
from nearfar.data.store.sources import Ints
from nearfar.utils.validation import few

Roots = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


class Row(NamedTuple):
    """A picture, by its number in the tree; its class; and the part whose folder it lies in, if any."""

    file: int
    group: str
    part: str | None


@dataclass(frozen=True)
class Published:
    """How much was published: (pictures, classes) of each part, and pictures of each class where that is known."""

    parts: Mapping[str, tuple[int, int]]
    per_class: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Grouped:
    """Pictures by class folder, and a line for each picture that is in none."""

    rows: tuple[Row, ...]
    notes: tuple[str, ...]

    @property
    def parts(self) -> set[str]:
        return {row.part for row in self.rows if row.part}


def class_folders(tree: Tree) -> Grouped:
    """One folder for each class, maybe below train/ and test/, maybe all in a folder (or folders) around everything.

    Folders inside a class folder belong to the class.
    """
    paths = [(index, tree.names[index].split("/")) for index in tree.pictures]
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
        raise ValueError(f"{tree.root} has train and test folders, and others with pictures beside them: {others}")
    rows, notes = [], []
    for index, path in paths:
        part = words[path[depth]] if in_parts and len(path) > depth + 1 else None
        start = depth + in_parts
        if len(path) > start + 1:
            rows.append(Row(index, path[start], part))
        else:
            notes.append(left_out(tree.names[index], "in no class folder"))
    return Grouped(tuple(rows), tuple(notes))


class Match(NamedTuple):
    """Where the listed pictures are (−1: nowhere), and the pictures beside them that are not listed."""

    places: Ints
    extra: tuple[str, ...]


def match(tree: Tree, listed: Sequence[str], folder: str = "") -> Match:
    """Find listed paths in a tree, below whichever folder holds most of them.

    Endings may differ, as copies are often of another format. But masks of the same names may lie in a folder beside,
    so equal endings count first, and then the name of the folder where the pictures should be.
    """
    exact = {tree.names[index]: index for index in tree.pictures}
    stems = {_stem(name): index for name, index in exact.items()}
    same, hits = _below(exact, set(listed)), _below(stems, {_stem(path) for path in listed})
    base = max(sorted(hits), key=lambda below: (same[below], below.endswith(folder), hits[below]), default="")
    places = [exact.get(base + path, stems.get(base + _stem(path), -1)) for path in listed]
    folders = {(base + path).rpartition("/")[0] for path in listed}
    used = set(places)
    extra = [name for name, index in exact.items() if index not in used and name.rpartition("/")[0] in folders]
    return Match(np.array(places, dtype=np.int64), tuple(extra))


def _below(names: Iterable[str], wanted: set[str]) -> Counter[str]:
    """How many of the wanted paths each folder holds."""
    found: Counter[str] = Counter()
    for name in names:
        start = 0
        while True:
            if name[start:] in wanted:
                found[name[:start]] += 1
            start = name.find("/", start) + 1
            if not start:
                break
    return found


def _stem(path: str) -> str:
    return path.rpartition(".")[0] or path


def from_list(
    name: str,
    tree: Tree,
    listing: str,
    paths: Sequence[str],
    groups: Sequence[int],
    parts: Sequence[str],
    *,
    classes: Mapping[int, str],
    columns: Mapping[str, Sequence[object]],
    published: Published,
    folder: str = "",
) -> Dataset:
    """A data set from a list of its pictures; what is listed and not there is noted, and so is what is not listed."""
    notes = list(tree.remarks)
    first: dict[str, int] = {}
    for row, path in enumerate(paths):
        if path in first:
            notes.append(f"{path}: listed twice in {listing}; the first line counts")
        else:
            first[path] = row
    keep = list(first.values())
    found = match(tree, [paths[row] for row in keep], folder)
    notes += [
        f"{paths[row]}: listed in {listing}, but not there"
        for row, at in zip(keep, found.places, strict=True)
        if at < 0
    ]
    notes += [left_out(path, f"not listed in {listing}") for path in found.extra]
    there = [(row, int(at)) for row, at in zip(keep, found.places, strict=True) if at >= 0]
    if not there:
        raise FileNotFoundError(
            f"{name}: {listing} lists {len(paths)} pictures, but none is below {tree.root}; the first is {paths[0]}"
            if paths
            else f"{name}: {listing} in {tree.root} lists no pictures"
        )
    return assemble(
        name,
        tree,
        [at for _, at in there],
        [groups[row] for row, _ in there],
        [parts[row] for row, _ in there],
        classes=classes,
        columns={key: np.array([column[row] for row, _ in there]) for key, column in columns.items()},
        published=published,
        notes=notes,
    )


def assemble(
    name: str,
    tree: Tree,
    places: Sequence[int],
    groups: Sequence[int],
    parts: Sequence[str],
    *,
    classes: Mapping[int, str],
    columns: Mapping[str, np.ndarray[tuple[int], np.dtype[np.generic]]] | None = None,
    published: Published | None = None,
    notes: Iterable[str] = (),
) -> Dataset:
    """Rows sorted by class, and classes by their numbers in the protocol; classes without pictures have no number."""
    order = sorted(range(len(places)), key=lambda row: (groups[row], tree.names[places[row]]))
    numbers = sorted(set(groups))
    label = {number: at for at, number in enumerate(numbers)}
    labels = np.array([label[groups[row]] for row in order], dtype=np.int64)
    words = np.array([parts[row] for row in order])
    known = {part: np.flatnonzero(words == part) for part in _in_order(parts)}
    return Dataset(
        name=name,
        source=tree.files.take([places[row] for row in order]),
        labels=labels,
        classes=tuple(classes[number] for number in numbers),
        parts=known,
        columns={key: column[order] for key, column in (columns or {}).items()},
        notes=(*notes, *(_differences(groups, parts, classes, published) if published else ())),
    )


def _in_order(parts: Iterable[str]) -> list[str]:
    order = ("train", "validation", "test", "query", "gallery", "all")
    return sorted(set(parts), key=order.index)


def _differences(
    groups: Sequence[int], parts: Sequence[str], classes: Mapping[int, str], published: Published
) -> list[str]:
    notes = []
    for part, right in published.parts.items():
        inside = [group for group, word in zip(groups, parts, strict=True) if word == part]
        for have, needed, what in zip((len(inside), len(set(inside))), right, ("pictures", "classes"), strict=True):
            if have != needed:
                notes.append(f"{part} has {have:,} {what}; published are {needed:,}")
    counts = Counter(groups)
    for group in sorted(counts.keys() | published.per_class) if published.per_class else ():
        needed = published.per_class.get(group, 0)
        if counts[group] != needed:
            notes.append(f"class {classes.get(group, group)} has {counts[group]} pictures; published are {needed}")
    return notes


def refuse(name: str, tree: Tree, looked_for: str) -> NoReturn:
    """Nothing that is known: say where was looked, for what, and what there is."""
    top = sorted({path.split("/")[0] + ("/" if "/" in path else "") for path in tree.names})
    raise FileNotFoundError(
        f"{name} is not recognised in {tree.root}; looked for {looked_for}; there is {few(top, 8) or 'nothing'}"
    )


def lines(tree: Tree, index: int, fields: int, *, skip: int = 0) -> list[list[str]]:
    """The lines of a list, cut at blanks into this many fields; the last takes the rest."""
    rows = []
    for number, line in enumerate(tree.text(index).splitlines(), start=1):
        if number <= skip or not line.strip():
            continue
        row = line.split(maxsplit=fields - 1)
        if len(row) < fields:
            raise ValueError(f"{tree.names[index]} in {tree.root}, line {number}: {line!r} has not {fields} fields")
        rows.append([field.strip() for field in row])
    return rows


def number(tree: Tree, index: int, word: str) -> int:
    """A whole number of a list."""
    if not word.isdecimal():
        raise ValueError(f"{tree.names[index]} in {tree.root} has {word!r} where a whole number should be")
    return int(word)
