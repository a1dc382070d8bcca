"""Datasets of Hugging Face's library ``datasets``, which need not be installed to read this."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from nearfar.data.datasets.arrays import from_arrays
from nearfar.data.datasets.base import Dataset
from nearfar.utils.validation import few

INPUTS = ("image", "img", "picture", "embedding", "embeddings", "vector", "features", "X")  # names of columns
LABELS = ("label", "labels", "class", "y")


def is_huggingface(data: Any) -> bool:
    """Return whether data is a dataset of Hugging Face, or a table of several by name."""
    several = list(data.values()) if isinstance(data, Mapping) else [data]
    return bool(several) and all(hasattr(one, "features") and hasattr(one, "column_names") for one in several)


def from_huggingface(data: Any) -> Dataset:
    """Create a dataset from one of Hugging Face, or from several parts of one.

    The images, or vectors, and the labels are the columns of these types (``Image``, ``ClassLabel``), or of the usual
    names.

    Args:
        data: A ``datasets.Dataset``, or a ``datasets.DatasetDict`` whose keys are train, test and so on.
    """
    parts = dict(data) if isinstance(data, Mapping) else {"": data}
    X: list[Any] = []
    y: list[Any] = []
    split: list[str] = []
    for part, rows in parts.items():
        inputs = _column(rows, "Image", INPUTS, "images or vectors")
        label = _column(rows, "ClassLabel", LABELS, "labels")
        names = getattr(rows.features[label], "names", None)
        X += [_undecoded(value) for value in rows[inputs]]
        y += [value if names is None else names[value] for value in rows[label]]
        split += [part] * (len(y) - len(split))
    return from_arrays(X, np.array(y), split=split if any(split) else None)


def _column(rows: Any, kind: str, names: tuple[str, ...], what: str) -> str:
    """Return the column of a type or, if none has it, of one of the usual names."""
    typed = [name for name, feature in rows.features.items() if type(feature).__name__ == kind]
    found = typed or [name for name in names if name in rows.column_names]
    if len(found) != 1:
        raise ValueError(
            f"data has the columns {few(rows.column_names, 12)}, and {len(found)} of them may hold the {what}; pass "
            'two columns instead: data=(dataset["image"], dataset["label"])'
        )
    return str(found[0])


def _undecoded(value: Any) -> Any:
    """Return the bytes or the path of an image that was not decoded, and anything else as it is."""
    if isinstance(value, Mapping) and {"bytes", "path"} <= value.keys():
        return value["path"] if value["bytes"] is None else value["bytes"]
    return value
