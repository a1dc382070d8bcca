"""Datasets by name."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from nearfar.data.datasets.base import Dataset
from nearfar.utils.validation import check_settings, defaults_of, few, known, refuse_unknown

Opener = TypeVar("Opener", bound=Callable[..., Dataset])
Root = str | os.PathLike[str]
_OPENERS: dict[str, Callable[..., Dataset]] = {}


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
        >>> del _OPENERS["squares"]
    """
    name = opener.__name__
    if _OPENERS.get(name, opener).__module__ != opener.__module__:
        raise ValueError(f"two datasets have the name {name!r}")
    _OPENERS[name] = opener
    return opener


def names() -> list[str]:
    """Return the names of all datasets."""
    return sorted(_OPENERS)


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
    check_settings(name, settings, allowed)
    return _OPENERS[name](**settings) if root is None else _OPENERS[name](root, **settings)


def settings_of(name: str) -> dict[str, Any]:
    """Return the settings of a dataset and their defaults (``inspect.Parameter.empty`` if required)."""
    return defaults_of(get(name), "root")


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
    found = list(dataset.notes)
    counts = np.bincount(dataset.labels, minlength=dataset.num_classes)
    for label in np.flatnonzero(counts == 0):
        found.append(f"class {dataset.classes[label]} has no images")
    lonely = [dataset.classes[label] for label in np.flatnonzero(counts == 1)]
    if lonely:
        some = few(lonely, 10)
        found.append(f"{len(lonely)} classes have a single image, which has no match in its class: {some}")
    inside = np.zeros(len(dataset), dtype=bool)
    for name, rows in dataset.parts.items():
        inside[rows] = True
        if not len(rows):
            found.append(f"part {name} has no images")
    if not inside.all():
        found.append(f"{np.count_nonzero(~inside)} images are in no part")
    return found


def get(name: str) -> Callable[..., Dataset]:
    """Return the function that opens a dataset."""
    return known("dataset", name, _OPENERS)
