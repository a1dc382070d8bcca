"""What stands on a command line as text, as values."""

from __future__ import annotations

import ast
from typing import Any


def whole_numbers(option: str, text: str) -> list[int]:
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        raise ValueError(f"{option} is {text!r}; needed are whole numbers separated by commas") from None


def setting(text: str) -> tuple[str, Any]:
    """``alpha=4`` as name and value; what is no Python literal is text."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise ValueError(f"--set is {text!r}; needed is NAME=VALUE")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value
