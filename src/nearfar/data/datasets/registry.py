"""Data sets by name."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from nearfar.data.datasets.base import Dataset
from nearfar.utils.validation import few, nearest, refuse_missing, refuse_unknown

Opener = TypeVar("Opener", bound=Callable[..., Dataset])
Root = str | os.PathLike[str]
_OPENERS: dict[str, Callable[..., Dataset]] = {}


def register(opener: Opener) -> Opener:
    """Function decorator: make a data set known by the function's name.

    A data set that lies on disk takes ``root`` first; everything else is a keyword.
    """
    name = opener.__name__
    if _OPENERS.get(name, opener).__module__ != opener.__module__:
        raise ValueError(f"two data sets have the name {name!r}")
    _OPENERS[name] = opener
    return opener


def names() -> list[str]:
    """The names of all data sets."""
    return sorted(_OPENERS)


def open(name: str, /, root: Any = None, **settings: Any) -> Dataset:
    """A data set by name.

    Args:
        name: One of :func:`names`.
        root: Where it lies: a folder, an archive, or a list of archives. Made-up and bundled ones have none.
        settings: See :func:`describe`.

    >>> open("digits")
    Dataset('digits': 1797 of 10 classes; train 901, test 896; 0 notes)
    """
    allowed = settings_of(name)
    needs_root = takes_root(name)
    refuse_unknown(name, settings, allowed)
    if needs_root is None and root is not None:
        raise TypeError(f"root is {root!r}; {name} takes none")
    if needs_root and root is None:
        raise TypeError(f"{name} needs root, the place where it lies")
    refuse_missing(name, settings, allowed)
    return _OPENERS[name](**settings) if root is None else _OPENERS[name](root, **settings)


def settings_of(name: str) -> dict[str, Any]:
    """The settings of a data set and their defaults (``inspect.Parameter.empty`` where one must be given)."""
    parameters = inspect.signature(get(name)).parameters
    return {key: parameter.default for key, parameter in parameters.items() if key != "root"}


def takes_root(name: str) -> bool | None:
    """Whether a data set needs a root; None where it takes none."""
    parameter = inspect.signature(get(name)).parameters.get("root")
    return None if parameter is None else parameter.default is inspect.Parameter.empty


def summary(name: str) -> str:
    """The first line of a data set's description."""
    return describe(name).partition("\n")[0]


def describe(name: str) -> str:
    """What a data set is, the layouts it is recognised in, and its settings, as text."""
    return inspect.cleandoc(get(name).__doc__ or "")


def problems(dataset: Dataset) -> list[str]:
    """What is strange about a data set: its notes, and what would trouble training or evaluation. Nothing is decoded.

    >>> problems(open("digits"))
    []
    """
    found = list(dataset.notes)
    counts = np.bincount(dataset.labels, minlength=dataset.num_classes)
    for label in np.flatnonzero(counts == 0):
        found.append(f"class {dataset.classes[label]} has no pictures")
    lonely = [dataset.classes[label] for label in np.flatnonzero(counts == 1)]
    if lonely:
        some = few(lonely, 10)
        found.append(f"{len(lonely)} classes have a single picture, which finds nothing of its class: {some}")
    inside = np.zeros(len(dataset), dtype=bool)
    for name, rows in dataset.parts.items():
        inside[rows] = True
        if not len(rows):
            found.append(f"part {name} has no pictures")
    if not inside.all():
        found.append(f"{np.count_nonzero(~inside)} pictures are in no part")
    return found


def get(name: str) -> Callable[..., Dataset]:
    """The function behind a name."""
    if name not in _OPENERS:
        raise ValueError(f"data set is {name!r}{nearest(name, names())}; allowed are {', '.join(names())}")
    return _OPENERS[name]
