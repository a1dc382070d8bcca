"""What a recipe reads: data set, split, pictures, and labels that training can use."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nearfar import data
from nearfar.data import DataSet, Split, Store, splits
from nearfar.data.registry import takes_root
from nearfar.progress import Watch
from nearfar.training.recipe import Recipe

Places = NDArray[np.int64]
Vectors = NDArray[np.float32]


def open_data(recipe: Recipe) -> DataSet:
    """The data set of a recipe."""
    section = recipe.data
    if section.root is None and takes_root(section.name):
        raise ValueError(
            f"data.root is missing; {section.name} needs the place where it lies: --data ROOT, or root in [data]"
        )
    places = [section.root] if isinstance(section.root, str) else section.root
    roots = [os.path.expandvars(os.path.expanduser(place)) for place in places or ()]
    root = roots[0] if len(roots) == 1 else roots or None
    return data.open(section.name, root, **section.settings)


def split_of(recipe: Recipe, dataset: DataSet) -> Split:
    """Which classes train, validate and test."""
    rule = recipe.split
    if rule.kind == "standard":
        split = splits.standard(dataset)
        if len(split.validation) and len(np.unique(split.labels[split.validation])) < splits.FEWEST:
            raise ValueError(
                f"the validation part of {dataset.name} is one class, which finds nothing but itself; "
                'split.kind = "fixed_validation" takes validation classes from those that train'
            )
        return split
    if rule.kind == "fixed_validation":
        return splits.fixed_validation(dataset, share=rule.share, seed=rule.seed)
    return splits.k_fold(dataset, rule.folds, seed=rule.seed)[rule.fold]


def store_of(recipe: Recipe, dataset: DataSet, cache: str | Path | None, watch: Watch | None) -> Store | Vectors:
    if dataset.is_vectors:
        array: Vectors = dataset.source.array  # type: ignore[attr-defined]
        return array
    from nearfar.data.preparing import prepare

    section = recipe.data
    return prepare(
        dataset,
        cache=cache,
        side=section.side,
        aspect=section.aspect,
        channels=section.channels,
        on_error=section.on_error,
        progress=watch("decoding") if watch is not None else None,
    )


def rows_of(split: Split, store: Store | Vectors) -> dict[str, Places]:
    parts = {"train": split.train, "validation": split.validation, **split.test}
    rows = {name: store.places(part) if isinstance(store, Store) else part for name, part in parts.items()}
    for name, part in rows.items():
        if not len(part) and len(parts[name]):
            raise ValueError(f"none of the {len(parts[name])} files of the part {name} gave a picture")
    return rows


def labels_of(dataset: DataSet, store: Store | Vectors, rows: Mapping[str, Places]) -> tuple[Places, int]:
    """Labels by place, training classes first, and how many of these there are."""
    given = dataset.labels[store.rows] if isinstance(store, Store) else dataset.labels
    trained = np.unique(given[rows["train"]])
    order = np.concatenate([trained, np.setdiff1d(np.arange(dataset.num_classes), trained)])
    number = np.empty(dataset.num_classes, dtype=np.int64)
    number[order] = np.arange(dataset.num_classes)
    return number[given], len(trained)


def fingerprint_of(dataset: DataSet, rows: Mapping[str, Places], labels: Places) -> str:
    digest = hashlib.sha256(dataset.source.fingerprint().encode())
    digest.update(labels.astype("<i8").tobytes())
    for name, part in sorted(rows.items()):
        digest.update(f"{name} {len(part)} ".encode() + part.astype("<i8").tobytes())
    return digest.hexdigest()
