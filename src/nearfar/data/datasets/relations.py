"""Given pairs and triplets: tables of them, and LFW's lists."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from nearfar.data.datasets.archives import find_listed, open_tree
from nearfar.data.datasets.arrays import as_source, read_arrays
from nearfar.data.datasets.base import PART_WORDS, PARTS, Column, Dataset, ItemRelations, Root, is_whole, register
from nearfar.data.datasets.layouts import match
from nearfar.data.datasets.table import Table, as_text, as_values, check_columns, read_table, relative_path
from nearfar.data.store.sources import Source, is_inside
from nearfar.utils.validation import few, number
from nearfar.utils.vector_files import ENDINGS

WORDS = {"true": "1", "false": "0"}


@register
def pairs(
    root: Root,
    *,
    left: str = "left",
    right: str = "right",
    same: str = "same",
    split: str = "split",
    items: Root | None = None,
    threshold: float = 0.5,
    name: str = "pairs",
) -> Dataset:
    """Your own images or vectors, with pairs of them that are the same or different, in a CSV or Parquet file.

    The sampler "given" draws such pairs, and their evaluation is verification. An item may be in many pairs, but only
    in those of one part; each item is a class of its own. Without a column of parts, all pairs are for training.

    Layouts:
        A table with the columns left, right and same: true or 1 for the same, false or 0 for different, or a score
        between. Items are paths of images, or row numbers of a file of vectors.
        LFW's pairs.txt, pairsDevTrain.txt and pairsDevTest.txt, with the images in the same folder or one inside it.

    Args:
        root: Path of the table or list.
        left: Name of the column of the first items.
        right: Name of the column of the second items.
        same: Name of the column that says whether they are the same, or how similar they are, from 0 to 1.
        split: Name of the optional column of parts: train, validation or test.
        items: Folder, zip or tar file that paths are relative to, or an .npy, .npz, .safetensors or .parquet file of
            vectors; None for the folder of the table.
        threshold: Pairs with at least this score are the same.
        name: Name of the dataset in results.
    """
    file = Path(root)
    if file.suffix == ".txt":
        return _lfw(file, Path(items) if items is not None else file.parent, name)
    content = read_table(file)
    check_columns(file, content, {"left": left, "right": right, "same": same})
    words = [as_text(value).lower() for value in content[same]]
    scores = as_values(WORDS.get(word, word) for word in words)
    if scores.dtype.kind not in "fiu" or not ((scores >= 0) & (scores <= 1)).all():
        raise ValueError(f"{file}: {same} has {few(sorted(set(words)), 5)}; allowed are true, false and 0 to 1")
    return _dataset(name, file, content, (left, right), split, items, scores, number("threshold", threshold))


@register
def triplets(
    root: Root,
    *,
    anchor: str = "anchor",
    positive: str = "positive",
    negative: str = "negative",
    split: str = "split",
    items: Root | None = None,
    name: str = "triplets",
) -> Dataset:
    """Your own images or vectors, with triplets of an anchor, a positive and a negative, in a CSV or Parquet file.

    The sampler "given" draws such triplets. Their evaluation is the share of triplets in the right order, and the
    verification of both of their pairs. As for pairs, an item is in triplets of one part, and a class of its own.

    Layouts:
        A table with the columns anchor, positive and negative: paths of images, or row numbers of a file of vectors.

    Args:
        root: Path of the table.
        anchor: Name of the column of anchors.
        positive: Name of the column of positives.
        negative: Name of the column of negatives.
        split: Name of the optional column of parts: train, validation or test.
        items: Folder, zip or tar file that paths are relative to, or an .npy, .npz, .safetensors or .parquet file of
            vectors; None for the folder of the table.
        name: Name of the dataset in results.
    """
    file = Path(root)
    content, columns = read_table(file), (anchor, positive, negative)
    check_columns(file, content, {"anchor": anchor, "positive": positive, "negative": negative})
    return _dataset(name, file, content, columns, split, items, np.ones(len(content[anchor])), 0.5)


def _dataset(
    name: str,
    file: Path,
    content: Table,
    columns: Sequence[str],
    split: str,
    items: Root | None,
    scores: Column,
    threshold: float,
) -> Dataset:
    written = [[as_text(value) for value in content[column]] for column in columns]
    for column, words in zip(columns, written, strict=True):
        if "" in words:
            raise ValueError(f"{file}, row {words.index('') + 1}: {column} is missing")
    place = Path(items) if items is not None else file.parent
    source, numbers = (_vectors if place.suffix in ENDINGS else _images)(file, place, written)
    parts = [as_text(word).lower() for word in content[split]] if split in content else ["train"] * len(scores)
    unknown = sorted({word for word in parts if PART_WORDS.get(word) not in ("train", "validation", "test")})
    if unknown:
        raise ValueError(f"{file}: {split} has {unknown[0]!r}; allowed are train, validation and test")
    known = np.array([PART_WORDS[word] for word in parts])
    return _with_relations(name, source, ItemRelations(numbers, scores.astype(np.float64), scores >= threshold, known))


def _vectors(file: Path, place: Path, written: Sequence[Sequence[str]]) -> tuple[Source, Column]:
    """Return vectors, and the rows that a table names by number, [p, w]."""
    content = read_arrays(place)
    wrong = [word for words in written for word in words if not is_whole(word)]
    if wrong:
        raise ValueError(f"{file} has {wrong[0]!r} in place of a row number of {place}")
    rows = np.array([[int(word) for word in words] for words in written], dtype=np.int64).T
    if rows.size and not 0 <= rows.min() <= rows.max() < len(content.values):
        raise ValueError(f"{file} has rows from {rows.min()} to {rows.max()}; {place} has {len(content.values)}")
    return as_source(content.values), rows


def _images(file: Path, place: Path, written: Sequence[Sequence[str]]) -> tuple[Source, Column]:
    """Return the images that a table names by path, each once, and their numbers, [p, w]."""
    names = [[relative_path(word, place) for word in words] for words in written]
    first = {path: at for at, path in enumerate(dict.fromkeys(path for words in names for path in words))}
    outside = [path for path in first if not is_inside(path)]
    if outside:
        raise ValueError(f"{file}: {outside[0]} is not below {place}; set items to a folder further up")
    paths = list(first)
    source, there = find_listed(place, paths)
    missing = [paths[at] for at in sorted({*range(len(paths))} - {*there})]
    if missing:
        raise FileNotFoundError(f"{file}: {len(missing):,} of {len(paths):,} images are missing: {few(missing, 3)}")
    return source, np.array([[first[path] for path in words] for words in names], dtype=np.int64).T


def _lfw(file: Path, images: Path, name: str) -> Dataset:
    """Read a list of LFW: "name 1 4" is a pair of one person, and "name 1 other 2" one of two."""
    head, *lines = [line.split() for line in file.read_text(encoding="utf-8").splitlines() if line.strip()] or [[]]
    if not 1 <= len(head) <= 2 or not all(is_whole(word) for word in head) or {len(line) for line in lines} - {3, 4}:
        raise ValueError(f"{file} is no list of LFW: one or two numbers, then lines of 3 or 4 words, are needed")
    persons = [(line[0], line[1], line[-2] if len(line) == 4 else line[0], line[-1]) for line in lines]
    written = [
        [f"{one}/{one}_{int(first):04d}" for one, first, _, _ in persons],
        [f"{other}/{other}_{int(second):04d}" for _, _, other, second in persons],
    ]
    tree = open_tree(images)
    paths = list(dict.fromkeys(path for words in written for path in words))
    matched = match(tree, [f"{path}.jpg" for path in paths])
    if (matched.files < 0).any():
        missing = [path for path, file in zip(paths, matched.files, strict=True) if file < 0]
        raise FileNotFoundError(f"{file}: {len(missing):,} of {len(paths):,} images are missing: {few(missing, 3)}")
    number_of = {path: at for at, path in enumerate(paths)}
    rows = np.array([[number_of[path] for path in words] for words in written], dtype=np.int64).T
    same = np.array([len(line) == 3 for line in lines])
    part = "train" if "train" in file.stem.lower() else "test"
    # The first line of pairs.txt is the number of folds and the pairs of each kind in a fold.
    folds = np.arange(len(lines)) // (2 * int(head[1])) if len(head) == 2 else None
    relations = ItemRelations(rows, same.astype(np.float64), same, np.full(len(lines), part), folds)
    return _with_relations(name, tree.files.take(matched.files), relations)


def _with_relations(name: str, source: Source, relations: ItemRelations) -> Dataset:
    """Return a dataset in which each item is a class of its own, in the part of its relations."""
    ordered = np.sort(relations.rows, axis=1)
    twice = np.flatnonzero((np.diff(ordered, axis=1) == 0).any(axis=1))
    if len(twice):
        raise ValueError(f"{name}: row {twice[0] + 1} names an item twice; members must be different items")
    parts: dict[str, Any] = {}
    for part in PARTS:
        rows = np.unique(relations.rows[relations.parts == part])
        for other, others in parts.items():
            shared = np.intersect1d(rows, others)
            if len(shared):
                raise ValueError(
                    f"{source.name(int(shared[0]))} is in relations of {other} and of {part} ({len(shared):,} items "
                    "are); parts must have no item in common"
                )
        if len(rows):
            parts[part] = rows
    names = tuple(source.name(row) for row in range(len(source)))
    return Dataset(name, source, np.arange(len(names)), names, parts, relations=relations)
