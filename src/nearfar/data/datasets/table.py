"""Images listed in a table."""

from __future__ import annotations

import csv
import os
import posixpath
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from nearfar.data.datasets.archives import find_listed, is_image
from nearfar.data.datasets.base import (
    PART_WORDS,
    Dataset,
    Root,
    encode_labels,
    encode_parts,
    is_whole,
    left_out,
    register,
)
from nearfar.data.datasets.frames import box_columns, cut_to_boxes
from nearfar.data.store.sources import Source, is_inside

Array = np.ndarray[Any, np.dtype[Any]]
Table = dict[str, list[Any]]

TABLES = (".csv", ".tsv", ".parquet")
# Usual names of columns, in lower case and with _ between words; the first one that a table has is taken.
USUAL = {
    "path": (
        *("path", "file", "filename", "file_name", "filepath", "file_path", "image", "image_path", "img", "img_path"),
        *("image_file", "image_name", "photo", "picture"),
    ),
    "label": (
        *("label", "class", "category", "target", "class_name", "label_name", "category_name", "identity", "species"),
        *("product", "class_id", "label_id", "category_id", "product_id"),
    ),
    "split": ("split", "part", "subset", "partition", "set", "fold"),
}

# Columns of OpenMetricLearning.
SIDES = ("is_query", "is_gallery")
CORNERS = ("x_1", "y_1", "x_2", "y_2")
LARGEST = 1 << 30  # pixels of a box that contains every image


@register
def table(
    root: Root,
    *,
    path: str | None = None,
    label: str | None = None,
    split: str | None = None,
    images: Root | None = None,
    boxes: bool = True,
    name: str = "table",
) -> Dataset:
    """Your own images, listed in a CSV or Parquet file with columns of paths, labels and optionally parts.

    Columns that are not named are found by their usual names, such as file and class, or by what they contain.
    Rows keep their order, and further columns are kept. Labels are text: 07 and 7 are two classes. Classes are sorted
    by name, or by number if all are whole numbers. Rows without a label, without an image, or with an image that was
    listed before are noted and left out.

    Tables of OpenMetricLearning are read as well. Where the columns is_query and is_gallery are, rows of its split
    "validation" are for the test: a row may be a query, in the gallery, or, like all others, both.

    Layouts:
        A .csv file (commas, semicolons or tabs; the first line names the columns), a .tsv or a .parquet file.
        The columns path, label and split, and those of OpenMetricLearning: is_query, is_gallery, x_1, y_1, x_2, y_2.

    Args:
        root: Path of the table.
        path: Name of the column of paths; None to guess it.
        label: Name of the column of labels; None to guess it.
        split: Name of the column of parts, train, validation, test, query or gallery; "" if there is none, None to
            guess whether there is one.
        images: Folder, zip or tar file that paths are relative to; None for the folder of the table.
        boxes: Whether to cut images to the boxes in the columns x_1, y_1, x_2 and y_2, if there are any; rows without
            numbers are whole images.
        name: Name of the dataset in results.
    """
    file = Path(root)
    content = read_table(file)
    given = {key: column for key, column in (("path", path), ("label", label), ("split", split)) if column}
    check_columns(file, content, given)
    columns = find_columns(file, content, {**given, "split": ""} if split == "" else given)
    path, label, split = columns["path"], columns["label"], columns["split"]
    corners = _corners(file, content) if boxes and all(name in content for name in CORNERS) else None
    folder = Path(images) if images is not None else file.parent
    source, rows, notes = _find_images(file, folder, content[path], content[label], corners)
    classes, labels = encode_labels(np.array([as_text(content[label][row]) for row in rows]))
    words = [as_text(content[split][row]) for row in rows] if split else None
    if words is not None and all(name in content for name in SIDES):
        words = _sides(file, words, *([_is_true(content[name][row]) for row in rows] for name in SIDES))
    extra = {key: as_values(values[row] for row in rows) for key, values in content.items() if key not in (path, label)}
    if corners is not None:
        extra |= {key: np.array(values) for key, values in box_columns(corners[rows]).items()}
    guessed = {key: column for key, column in columns.items() if column and column not in (key, given.get(key))}
    dataset = Dataset(
        name, source, labels, classes, encode_parts(words, len(rows)), extra, tuple(notes), guessed=guessed
    )
    return dataset if corners is None else cut_to_boxes(dataset)


def find_columns(file: Path, content: Table, given: Mapping[str, str]) -> dict[str, str]:
    """Return the columns of paths, labels and parts ("" if there is none): those given, and a guess of the others."""
    columns = dict(given)
    for setting, usual in USUAL.items():
        if setting in columns:
            continue
        free = {"_".join(re.split(r"[\s_-]+", name.lower())): name for name in content if name not in columns.values()}
        names = [free[word] for word in usual if word in free]
        if setting == "split":
            names = [name for name in names if name == "split" or _are_parts(content[name])] or [""]
        if setting == "path" and not names:
            names = [name for name in free.values() if all(is_image(str(value)) for value in content[name])]
        if setting == "label" and not names:  # if there is only one more column
            rest = [name for name in free.values() if not _are_parts(content[name])]
            names = rest if len(rest) == 1 else []
        if not names:
            raise ValueError(
                f"{file} has no column that is known to hold the {setting}; it has {', '.join(content) or 'none'}; "
                f"--columns {setting}=COLUMN, or the setting {setting!r} of the dataset, names it"
            )
        columns[setting] = names[0]
    return columns


def _are_parts(values: Sequence[Any]) -> bool:
    words = {as_text(value).lower() for value in values} - {""}
    return bool(words) and words <= PART_WORDS.keys()


def _corners(file: Path, content: Table) -> Array:
    """Return the boxes of all rows, [n, 4]; that of a row without numbers contains every image."""
    columns = []
    for name, whole in zip(CORNERS, (0, 0, LARGEST, LARGEST), strict=True):
        values = as_values(content[name])
        if values.dtype.kind not in "fiu":
            raise ValueError(f"{file} has text in the column {name!r}; boxes are numbers of pixels")
        columns.append(np.where(np.isnan(values.astype(np.float64)), whole, values))
    return np.stack(columns, axis=1)


def _is_true(value: Any) -> bool:
    return str(value).strip().lower() in ("true", "1", "1.0")


def _sides(file: Path, words: Sequence[str], queries: Sequence[bool], galleries: Sequence[bool]) -> list[str]:
    """Return the part of each row of a table of OpenMetricLearning."""
    both = {
        (query, gallery)
        for word, query, gallery in zip(words, queries, galleries, strict=True)
        if PART_WORDS.get(word.lower()) != "train" and (query or gallery)
    }
    if (True, True) in both and len(both) > 1:
        raise ValueError(
            f"{file} has rows that are both query and gallery, and rows that are one of them; either all or none must "
            "be both"
        )
    parts = {(True, True): "test", (True, False): "query", (False, True): "gallery", (False, False): ""}
    return [
        word if PART_WORDS.get(word.lower()) == "train" else parts[query, gallery]
        for word, query, gallery in zip(words, queries, galleries, strict=True)
    ]


def _find_images(
    file: Path, images: Path, written: Sequence[Any], labels: Sequence[Any], corners: Array | None
) -> tuple[Source, list[int], list[str]]:
    """Return the images that exist and have a label, their rows, and a note for each other row."""
    if not images.exists():
        raise FileNotFoundError(f"images is {images}; it does not exist")
    paths = [relative_path(str(path or ""), images) for path in written]
    for row, path in enumerate(paths):
        if path and not is_inside(path):
            raise ValueError(
                f"{file}: row {row + 1}, {written[row]} is not below {images}; set images to a folder further up"
            )
    source, there = find_listed(images, paths)
    indices = {row: index for index, row in enumerate(there)}
    first: dict[tuple[str, ...], int] = {}  # rows by path and box
    notes: list[str] = []
    for row, path in enumerate(paths):
        image = (path,) if corners is None else (path, *map(str, corners[row]))
        named = f"row {row + 1}, {written[row]}"
        if not path:
            notes.append(left_out(f"row {row + 1}", "no path"))
        elif as_text(labels[row]) == "":
            notes.append(left_out(named, "no label"))
        elif row not in indices:
            notes.append(left_out(named, "missing"))
        elif image in first:
            before = labels[first[image]]
            other = "" if before == labels[row] else f" (there with label {before}, here with {labels[row]})"
            notes.append(left_out(named, f"listed before in row {first[image] + 1}{other}"))
        else:
            first[image] = row
    if not first:
        raise FileNotFoundError(f"{file}: none of {len(paths)} rows has a label and an image below {images}")
    rows = list(first.values())
    return source.take([indices[row] for row in rows]), rows, notes


def relative_path(path: str, images: Path) -> str:
    """Return a path relative to the folder of images."""
    path = path.replace("\\", "/")
    if posixpath.isabs(path):
        path = posixpath.relpath(path, os.path.abspath(images).replace("\\", "/"))
    return posixpath.normpath(path) if path else ""


def as_text(value: Any) -> str:
    """Return a label as text; 3.0, as some tools write whole numbers, becomes 3."""
    if value is None or value != value:
        return ""
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value).strip()


def as_values(values: Any) -> Array:
    """Return a column as integers, as floats (an empty field is NaN), or else as text."""
    column = list(values)
    texts = ["" if value is None else str(value).strip() for value in column]
    if all(is_whole(text) and (text == "0" or not text.lstrip("-").startswith("0")) for text in texts):
        numbers = [int(text) for text in texts]
        if all(abs(value) < 1 << 62 for value in numbers):
            return np.array(numbers, dtype=np.int64)
    try:
        return np.array([float(text) if text else np.nan for text in texts])
    except ValueError:
        return np.array(["" if value is None else str(value) for value in column])


def read_table(file: Path) -> Table:
    """Read the columns of a CSV or Parquet file."""
    if not file.is_file():
        why = "is a folder; a table is needed, such as photos.csv" if file.exists() else "does not exist"
        raise FileNotFoundError(f"{file} {why}")
    return _read_parquet(file) if file.suffix.lower() == ".parquet" else _read_csv(file)


def check_columns(file: Path, content: Table, columns: Mapping[str, str]) -> None:
    """Raise an error unless a table has some columns."""
    for setting, column in columns.items():
        if column not in content:
            raise ValueError(
                f"{file} has no column {column!r}; it has {', '.join(content) or 'none'}; the setting {setting!r} of "
                "the dataset names another one"
            )


def _read_csv(file: Path) -> Table:
    try:
        with open(file, encoding="utf-8-sig", newline="") as stream:
            header = stream.readline()
            stream.seek(0)
            reader = csv.reader(stream, delimiter=max(",;\t", key=header.count))
            rows = [(reader.line_num, row) for row in reader if row]
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{file} cannot be read as a table in UTF-8: {error}") from error
    if not rows:
        raise ValueError(f"{file} is empty; the first line must name the columns")
    names = [name.strip() for name in rows[0][1]]
    if len(set(names)) < len(names):
        raise ValueError(f"{file} has two columns of the same name: {', '.join(names)}")
    for line, row in rows[1:]:
        if len(row) != len(names):
            raise ValueError(f"{file}, line {line}: {len(row)} fields, but {len(names)} columns")
    return {name: [row[at] for _, row in rows[1:]] for at, name in enumerate(names)}


def _read_parquet(file: Path) -> Table:
    try:
        from pyarrow import ArrowInvalid, parquet
    except ImportError as error:
        raise ImportError(f"{file} needs pyarrow; install it with: pip install 'nearfar[parquet]'") from error
    try:
        content = parquet.read_table(file)
    except (ArrowInvalid, OSError) as error:
        raise ValueError(f"{file} cannot be read as a table: {error}") from error
    return {name: content.column(name).to_pylist() for name in content.column_names}
