"""Parsers of values that several commands take as text."""

from __future__ import annotations

from typing import Any

from nearfar.utils.shipped import parse_value


def whole_numbers(option: str, text: str) -> list[int]:
    """Parse whole numbers separated by commas."""
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        raise ValueError(f"{option} is {text!r}; whole numbers separated by commas are needed") from None


def setting(text: str) -> tuple[str, Any]:
    """Parse ``NAME=VALUE`` with a TOML value; "none" is None."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise ValueError(f"--set is {text!r}; NAME=VALUE is needed")
    found = parse_value(value)
    return name.strip(), None if found == "none" else found
