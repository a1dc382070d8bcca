"""Labels and metadata of images, read from a table."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

EXTENSIONS = (".csv", ".jsonl")


def read(file: Path) -> tuple[dict[str, str], dict[str, dict[str, Any]]]:
    """Read labels and metadata from a .csv file with a header, or a .jsonl file with one object per line.

    The column "name" is the path of an image relative to the indexed folder. A column "label" is its class; all others
    are metadata. Numbers in a .csv file become numbers; empty cells are left out.
    """
    if file.suffix.lower() not in EXTENSIONS:
        raise ValueError(f"metadata is {str(file)!r}; the file's name must end in {' or '.join(EXTENSIONS)}")
    if not file.is_file():
        raise FileNotFoundError(f"{file} does not exist, or is not a file")
    labels: dict[str, str] = {}
    metadata: dict[str, dict[str, Any]] = {}
    for number, row in _rows(file):
        name = row.pop("name", None)
        if name in (None, ""):
            raise ValueError(f"{file} has no 'name' in line {number}")
        label = row.pop("label", None)
        if label is not None:
            labels[str(name)] = str(label)
        for key, value in row.items():
            try:
                json.dumps(value, allow_nan=False)
            except ValueError:
                raise ValueError(
                    f"{file} has {value} as {key!r} in line {number}; allowed are finite numbers and text"
                ) from None
        metadata[str(name)] = row
    return labels, metadata


def _rows(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        text = file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not UTF-8: {error}") from error
    with io.StringIO(text, newline="") as lines:
        if file.suffix.lower() == ".csv":
            for number, row in enumerate(_csv(file, lines), start=2):
                if None in row:
                    raise ValueError(f"{file} has more columns in line {number} than in its header")
                filled = {key: value for key, value in row.items() if value not in (None, "")}
                yield number, {key: text if key in ("name", "label") else _value(text) for key, text in filled.items()}
            return
        for number, line in enumerate(lines, start=1):
            try:
                value = json.loads(line) if line.strip() else None
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{file} has invalid JSON in line {number}: {error}") from error
            if value is not None:
                if not isinstance(value, dict):
                    raise ValueError(f"{file} has no JSON object in line {number}")
                yield number, value


def _csv(file: Path, lines: TextIO) -> Iterator[dict[Any, Any]]:
    try:
        yield from csv.DictReader(lines)
    except csv.Error as error:
        raise ValueError(f"{file} is not valid CSV: {error}") from error


def _value(text: str) -> str | int | float:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
