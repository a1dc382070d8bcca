"""What a recipe reads: data set, split, pictures, and labels that training can use."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nearfar import data
from nearfar.data import Dataset, Split, Store, splits
from nearfar.data.datasets.registry import takes_root
from nearfar.training.recipe.schema import Recipe
from nearfar.utils.paths import expanded
from nearfar.utils.progress import Watch

Places = NDArray[np.int64]
Vectors = NDArray[np.float32]


def open_data(recipe: Recipe) -> Dataset:
    """The data set of a recipe."""
    section = recipe.data
    if section.root is None and takes_root(section.name):
        raise ValueError(
            f"data.root is missing; {section.name} needs the place where it lies: --data ROOT, or root in [data]"
        )
    places = [section.root] if isinstance(section.root, str) else section.root
    roots = [str(expanded(place)) for place in places or ()]
    root = roots[0] if len(roots) == 1 else roots or None
    return data.open(section.name, root, **section.settings)


def split_of(recipe: Recipe, dataset: Dataset) -> Split:
    """Which classes train, validate and test."""
    rule = recipe.split
    if rule.name == "standard":
        return splits.standard(dataset)
    if rule.name == "fixed_validation":
        return splits.fixed_validation(dataset, share=rule.share, seed=rule.seed)
    return splits.k_fold(dataset, rule.folds, seed=rule.seed)[rule.fold]


def store_of(recipe: Recipe, dataset: Dataset, cache: str | Path | None, watch: Watch | None) -> Store | Vectors:
    if dataset.is_vectors:
        array: Vectors = dataset.source.array  # type: ignore[attr-defined]
        return array
    from nearfar.data.store.prepare import prepare

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


def labels_of(dataset: Dataset, store: Store | Vectors, rows: Mapping[str, Places]) -> tuple[Places, int]:
    """Labels by place, training classes first, and how many of these there are."""
    given = dataset.labels[store.rows] if isinstance(store, Store) else dataset.labels
    trained = np.unique(given[rows["train"]])
    order = np.concatenate([trained, np.setdiff1d(np.arange(dataset.num_classes), trained)])
    number = np.empty(dataset.num_classes, dtype=np.int64)
    number[order] = np.arange(dataset.num_classes)
    return number[given], len(trained)


def check_measured(recipe: Recipe, dataset: Dataset, rows: Mapping[str, Places], labels: Places) -> None:
    """Refuse parts that cannot be measured, before anything is trained."""
    measured = {"train": recipe.evaluation.train_recall, "validation": True}
    for part, places in rows.items():
        if part == "gallery" or not len(places) or not measured.get(part, recipe.evaluation.test):
            continue
        own = labels[places]
        held = labels[rows["gallery"]] if part == "query" else own
        classes, counts = np.unique(held, return_counts=True)
        where = f"the {'gallery' if part == 'query' else f'{part} part'} of {dataset.name}"
        if len(classes) < splits.MIN_CLASSES:
            hint = '; split.name = "fixed_validation" takes validation classes from those that train'
            raise ValueError(
                f"{where} is one class, which finds nothing but itself{hint if part == 'validation' else ''}"
            )
        if not np.isin(own, held).any():
            raise ValueError(f"{where} has no class of the queries, so that nothing can be found")
        if part != "query" and counts.max() < 2:
            raise ValueError(f"{where} has a single picture of each class, which finds nothing of its class")


def fingerprint_of(source: str, rows: Mapping[str, Places], labels: Places) -> str:
    """Of pictures, which have a fingerprint of their own, labels and split."""
    digest = hashlib.sha256(source.encode())
    digest.update(labels.astype("<i8").tobytes())
    for name, part in sorted(rows.items()):
        digest.update(f"{name} {len(part)} ".encode() + part.astype("<i8").tobytes())
    return digest.hexdigest()
