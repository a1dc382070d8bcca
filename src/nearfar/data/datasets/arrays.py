"""Vectors or images in memory, or in a file of arrays."""

from __future__ import annotations

import csv
import os
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor

from nearfar.data.datasets.base import Dataset, Root, encode_labels, encode_parts, left_out, register
from nearfar.data.store.sources import Arrays, Files, Images, Source, Vectors
from nearfar.utils.atomic import whole_file
from nearfar.utils.tensors import as_array, as_vectors, check_finite, check_values
from nearfar.utils.validation import few
from nearfar.utils.vector_files import has, read, read_details

Array = np.ndarray[Any, np.dtype[Any]]

# Names of columns of Hugging Face, and of files in a run folder.
INPUTS = ("image", "img", "picture", "embedding", "embeddings", "vector", "features", "X")
LABELS = ("label", "labels", "class", "y")
FILES = ARRAYS, TABLE, IMAGES = "data.npz", "data.csv", "data.zip"


@register
def arrays(
    root: Root | None = None,
    *,
    X: Any = None,
    y: Any = None,
    split: Sequence[str] | Array | None = None,
    name: str = "arrays",
) -> Dataset:
    """Vectors [n, d] or images [n, h, w] or [n, h, w, 3] from memory or a file of arrays.

    Vectors are converted to float32; images must be uint8. Labels are integers or text; classes are sorted by them.
    Rows of a file that ``nearfar embed`` wrote without a class are noted and left out.

    Layouts:
        An .npz, .safetensors or .parquet file with X and y, or embeddings and labels, as ``nearfar embed`` writes them;
        optionally with split, names and classes. A vector is a list in a Parquet file.

    Args:
        root: The file, in place of the other arguments.
        X: Vectors or images; see ``from_arrays``.
        y: Label of each row.
        split: Part of each row: train, validation, test, query or gallery; None if there are no parts.
        name: Name of the dataset in results.

    Example:
        >>> arrays(X=np.eye(4), y=["jay", "jay", "wren", "wren"])
        Dataset('arrays': 4 of 2 classes; all 4; 0 notes)
    """
    if root is None:
        if X is None or y is None:
            raise TypeError("arrays needs X and y, or root, a file that contains them")
        return from_arrays(X, y, split=split, name=name)
    if X is not None or y is not None:
        raise TypeError("root and X or y were given; pass either a file or arrays")
    content = read_arrays(Path(root))
    if content.labels is None:
        raise ValueError(f"{root} cannot be used as arrays: it has no y and no labels")
    targets = np.array(["" if label is None else label for label in content.labels])
    kept = np.flatnonzero([label is not None for label in content.labels])
    if not len(kept):
        raise ValueError(f"{root} cannot be used as arrays: none of its {len(targets):,} rows has a class")
    words = content.split if split is None else np.asarray(split)
    classes, labels = encode_labels(targets[kept])
    notes = [left_out(f"row {row}", "no class") for row in np.setdiff1d(np.arange(len(targets)), kept)]
    return Dataset(
        name,
        _source(content.values if len(kept) == len(targets) else content.values[kept]),
        labels,
        classes,
        encode_parts(None if words is None else words[kept], len(kept)),
        {} if content.names is None else {"name": content.names[kept]},
        tuple(notes),
    )


def from_arrays(X: Any, y: Any, *, split: Sequence[str] | Array | None = None, name: str = "arrays") -> Dataset:
    """Create a dataset from vectors or images in memory, or from the paths of image files.

    Args:
        X: Vectors [n, d], converted to float32: an array, a tensor, a list or a DataFrame. Or images: uint8 [n, h, w]
            or [n, h, w, 3], or a list or Series of Pillow images, of uint8 arrays, or of paths.
        y: Label of each row, integers or text: an array, a tensor, a list or a Series.
        split: Part of each row: train, validation, test, query or gallery; None if there are no parts.
        name: Name of the dataset in results.

    Example:
        >>> data = from_arrays(np.zeros((6, 8, 8), dtype=np.uint8), np.array([7, 7, 7, 3, 3, 3]))
        >>> data.classes, data.labels
        (('3', '7'), array([1, 1, 1, 0, 0, 0]))
    """
    source, targets = as_source(X), _as_numpy("y", y)
    if targets.ndim != 1 or len(targets) != len(source):
        raise ValueError(f"y has shape {list(targets.shape)}; needed is [{len(source)}], one label for each row of X")
    if targets.dtype.kind not in "iuUO" or (targets.dtype.kind == "O" and not all(isinstance(w, str) for w in targets)):
        raise TypeError(f"y is of {targets.dtype}; whole numbers or text are needed")
    classes, labels = encode_labels(targets)
    return Dataset(name, source, labels, classes, encode_parts(as_array("split", split), len(labels)))


def as_source(X: Any) -> Source:
    """Convert vectors, images or paths, as ``from_arrays`` takes them, to a source."""
    if isinstance(X, (str, bytes, os.PathLike)) or not hasattr(X, "__len__"):
        raise TypeError(f"X is a {type(X).__name__}; an array, a tensor, a list or a DataFrame is needed")
    values = as_array("X", X)
    if isinstance(values, Tensor) or (isinstance(values, np.ndarray) and values.dtype.kind != "O"):
        values = _as_numpy("X", values)
        return _files(values.tolist()) if values.dtype.kind == "U" else _source(values)
    items = list(values)
    if items and all(isinstance(item, (str, os.PathLike)) for item in items):
        return _files(items)
    pixels = [_as_numpy("X", item) for item in items if isinstance(item, (Tensor, np.ndarray))]
    if len(pixels) == len(items) and len({item.shape for item in pixels}) == 1:
        return _source(np.stack(pixels))
    if items and all(isinstance(item, (bytes, Image.Image, np.ndarray)) for item in items):
        return Images(items)
    return _source(_as_numpy("X", items))


def _files(paths: Sequence[str | os.PathLike[str]]) -> Files:
    """Return a source of files below the folder that contains all of them."""
    absolute = [os.path.abspath(path) for path in paths]
    missing = [path for path, place in zip(paths, absolute, strict=True) if not os.path.isfile(place)]
    if missing:
        raise FileNotFoundError(f"X has {os.fspath(missing[0])!r}; {len(missing):,} of its files do not exist")
    root = os.path.commonpath([os.path.dirname(path) for path in absolute])
    return Files(root, [Path(path).relative_to(root).as_posix() for path in absolute])


def _source(values: Array) -> Arrays:
    if values.dtype == np.uint8 and values.ndim == 4 and values.shape[3] == 1:
        values = values[..., 0]
    if values.ndim != 2:
        try:
            return Arrays(values)
        except ValueError as error:
            raise ValueError(f"X: {error}; vectors are [n, d]") from error
    if values.dtype.kind in "iu":
        values = values.astype(np.float32)
    check_finite("X", as_vectors("X", values))
    return Vectors(values if values.dtype == np.float32 else values.astype(np.float32))


def _as_numpy(name: str, value: Any) -> Array:
    value = as_array(name, value)
    if isinstance(value, (Tensor, np.ndarray)):
        check_values(name, value)
        return value.detach().cpu().numpy() if isinstance(value, Tensor) else value
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return np.asarray(value)
    raise TypeError(f"{name} is a {type(value).__name__}; an array, a tensor, a list or a column of pandas is needed")


@dataclass(frozen=True)
class ArrayFile:
    """Contents of a file of arrays."""

    values: Array  # vectors [n, d], or images
    labels: list[str | None] | None  # class of each row, None for a row without one; None if the file has no labels
    names: Array | None  # name of each row, if there are names
    split: Array | None  # part of each row, if there are parts


def read_arrays(file: Path) -> ArrayFile:
    """Read vectors or images, and what is known of each, from an .npy, .npz, .safetensors or .parquet file."""
    if not file.is_file():
        raise FileNotFoundError(f"{file} does not exist; a file of arrays is needed")
    values = _as_numpy("X", read(file, "embeddings", shared=has(file, "labels")))
    about = read_details(file)
    labels: list[str | None] | None = None
    if has(file, "labels"):
        codes, classes = _as_numpy("labels", read(file, "labels", shared=True)).tolist(), about.get("classes")
        # With names of classes, labels are their numbers, and −1 means none.
        labels = [str(code) if classes is None else None if code < 0 else str(classes[code]) for code in codes]
    for name, column in (("labels", labels), ("names", about.get("names")), ("split", about.get("split"))):
        if column is not None and len(column) != len(values):
            raise ValueError(f"{file} has {len(column)} {name} for {len(values)} rows")
    return ArrayFile(values, labels, about.get("names"), about.get("split"))


# --- data in memory, written to files that recipes can name -----------------------------------------------------------


def as_dataset(data: Any) -> Dataset:
    """Convert what ``nearfar.train`` takes as data to a dataset."""
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


# --- datasets of Hugging Face, whose library need not be installed ----------------------------------------------------


def is_huggingface(data: Any) -> bool:
    """Return whether data is a dataset of Hugging Face, or a table of several by name."""
    several = list(data.values()) if isinstance(data, Mapping) else [data]
    return bool(several) and all(hasattr(one, "features") and hasattr(one, "column_names") for one in several)


def from_huggingface(data: Any) -> Dataset:
    """Create a dataset from one of Hugging Face, or from several parts of one.

    The images, or vectors, and the labels are the columns of these types (``Image``, ``ClassLabel``), or of the usual
    names.
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
    candidates = typed or [name for name in names if name in rows.column_names]
    if len(candidates) != 1:
        raise ValueError(
            f"data has the columns {few(rows.column_names, 12)}, and {len(candidates)} of them may hold the {what}; "
            'pass two columns instead: data=(dataset["image"], dataset["label"])'
        )
    return str(candidates[0])


def _undecoded(value: Any) -> Any:
    """Return the bytes or the path of an image that was not decoded, and anything else as it is."""
    if isinstance(value, Mapping) and {"bytes", "path"} <= value.keys():
        return value["path"] if value["bytes"] is None else value["bytes"]
    return value
