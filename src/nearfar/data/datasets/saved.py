"""Datasets in memory, written to files that recipes can name."""

from __future__ import annotations

import csv
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from nearfar.data.datasets.arrays import from_arrays
from nearfar.data.datasets.base import Dataset
from nearfar.data.datasets.huggingface import from_huggingface, is_huggingface
from nearfar.data.store.sources import Arrays, Files
from nearfar.utils.atomic import whole_file

FILES = ARRAYS, TABLE, IMAGES = "data.npz", "data.csv", "data.zip"


def as_dataset(data: Any) -> Dataset:
    """Convert what ``nearfar.train`` takes as data to a dataset.

    Args:
        data: (X, y) or (X, y, split), see ``nearfar.data.from_arrays``; or a dataset of Hugging Face, or several of
            them by the name of their part.

    Example:
        >>> as_dataset((np.eye(4), ["jay", "jay", "wren", "wren"]))
        Dataset('arrays': 4 of 2 classes; all 4; 0 notes)
    """
    if is_huggingface(data):
        return from_huggingface(data)
    if not isinstance(data, (tuple, list)) or len(data) not in (2, 3):
        raise TypeError(
            f"data is a {type(data).__name__}; needed is (X, y), (X, y, split), a dataset of Hugging Face, or a table "
            "with keys of [data]"
        )
    X, y, *split = data
    return from_arrays(X, y, split=split[0] if split else None)


def save_dataset(dataset: Dataset, folder: Path) -> dict[str, Any]:
    """Write a dataset to a folder.

    Vectors and images of one size become data.npz; other images data.csv, with the paths of their files, or with those
    in data.zip if there are none.

    Args:
        dataset: A dataset that ``from_arrays`` made.
        folder: An existing folder.

    Returns:
        The keys "name", "root" and "settings" of the section [data] of a recipe that opens the files.
    """
    source, labels = dataset.source, np.array(dataset.classes)[dataset.labels]
    split = np.full(len(labels), "", dtype="U10")
    for part, rows in dataset.parts.items():
        split[rows] = "" if part == "all" else part
    folder = folder.absolute()
    if isinstance(source, Arrays):
        with whole_file(folder / ARRAYS) as draft, open(draft, "wb") as out:
            np.savez(out, X=source.array, y=labels, split=split)
        return {"name": "arrays", "root": str(folder / ARRAYS), "settings": {}}
    names = [source.name(row) for row in range(len(source))]
    images = source.root if isinstance(source, Files) else folder / IMAGES
    if not isinstance(source, Files):
        names = [f"{name}.png" for name in names]
        with whole_file(images) as draft, zipfile.ZipFile(draft, "w") as archive:
            for row, name in enumerate(names):
                archive.writestr(name, source.read(row))
    with whole_file(folder / TABLE) as draft, open(draft, "w", encoding="utf-8", newline="") as out:
        csv.writer(out).writerows([("path", "label", "split"), *zip(names, labels, split, strict=True)])
    return {"name": "table", "root": str(folder / TABLE), "settings": {"images": str(images), "name": dataset.name}}
