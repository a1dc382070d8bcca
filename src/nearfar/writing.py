"""Files that are there whole or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def whole_file(file: Path) -> Iterator[Path]:
    """A draft to write beside ``file``; it takes its place when the block ends well and goes away otherwise."""
    draft = file.with_name(f".{file.name}.{os.getpid()}")
    if file.is_dir():
        raise IsADirectoryError(f"{file} is a folder; needed is the name of a file")
    if not file.absolute().parent.is_dir():
        raise FileNotFoundError(f"{file} cannot be written: there is no folder {file.absolute().parent}")
    try:
        draft.touch()
        mode = draft.stat().st_mode
        yield draft
        os.chmod(draft, mode)  # some that write make files for their owner alone
        with open(draft, "rb+") as written:
            os.fsync(written.fileno())
        os.replace(draft, file)
    finally:
        draft.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """See that the names in a folder are on disk."""
    if os.name == "nt":  # where folders cannot be opened
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_text(file: Path, text: str) -> None:
    """Write text in UTF-8."""
    with whole_file(file) as draft:
        draft.write_text(text, encoding="utf-8")


def write_json(file: Path, value: Any) -> None:
    """Write a value as indented JSON; NaN is refused, as JSON has none."""
    write_text(file, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")
