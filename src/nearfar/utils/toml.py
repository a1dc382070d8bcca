"""Reads TOML files, and TOML values given on a command line."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

# Python's spellings, which are easily mixed up with TOML's.
_PYTHON_WORDS = {"None": "none", "True": True, "False": False}


def read(file: Path, what: str, error: type[ValueError] = ValueError) -> dict[str, Any]:
    """Read a TOML file."""
    if not file.is_file():
        raise FileNotFoundError(f"{file} does not exist; {what} is needed, a TOML file")
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as problem:
        raise error(f"{file} is not valid TOML: {problem}") from None


def parse_value(text: str) -> Any:
    """Parse a value given on a command line: a TOML value, or text where it is none.

    ``True``, ``False`` and ``None`` are accepted for TOML's ``true`` and ``false`` and for "none".
    """
    text = text.strip()
    if text in _PYTHON_WORDS:
        return _PYTHON_WORDS[text]
    try:
        found = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return found["value"] if list(found) == ["value"] else text
