"""What is known of pictures beside their pixels, from a table."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ENDINGS = (".csv", ".jsonl")


def read(file: Path) -> tuple[dict[str, str], dict[str, dict[str, Any]]]:
    """Labels and metadata by name, from a .csv file with a heading or a .jsonl file with an object a line.

    The column "name" says which picture a line is about, as a path below the indexed folder. A column "label" is its
    class; all others are metadata. Numbers in a .csv file become numbers; what is empty is left out.
    """
    if file.suffix.lower() not in ENDINGS:
        raise ValueError(f"metadata is {str(file)!r}; the file's name must end in {' or '.join(ENDINGS)}")
    if not file.is_file():
        raise FileNotFoundError(f"{file} is not there, or no file")
    labels: dict[str, str] = {}
    metadata: dict[str, dict[str, Any]] = {}
    for number, row in _rows(file):
        name = row.pop("name", None)
        if name in (None, ""):
            raise ValueError(f"{file} has no 'name' in line {number}: which picture is it about?")
        label = row.pop("label", None)
        if label is not None:
            labels[str(name)] = str(label)
        for key, value in row.items():
            try:
                json.dumps(value, allow_nan=False)
            except ValueError:
                raise ValueError(
                    f"{file} has {value} as {key!r} in line {number}; needed is a finite number, a word, or nothing"
                ) from None
        metadata[str(name)] = row
    return labels, metadata


def _rows(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    with open(file, encoding="utf-8-sig", newline="") as lines:
        if file.suffix.lower() == ".csv":
            for number, row in enumerate(csv.DictReader(lines), start=2):
                if None in row:
                    raise ValueError(f"{file} has more columns in line {number} than in its heading")
                words = {"name", "label"}
                yield (
                    number,
                    {
                        key: text if key in words else _value(text)
                        for key, text in row.items()
                        if text not in (None, "")
                    },
                )
            return
        for number, line in enumerate(lines, start=1):
            try:
                value = json.loads(line) if line.strip() else None
            except ValueError as error:
                raise ValueError(f"{file} has no JSON in line {number}: {error}") from error
            if value is not None:
                if not isinstance(value, dict):
                    raise ValueError(f"{file} has no JSON object in line {number}")
                yield number, value


def _value(text: str) -> str | int | float:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
