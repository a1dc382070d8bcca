"""Tables written as TOML text."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any


def written(table: Mapping[str, Any]) -> str:
    """A table of tables, and of lists of tables, as text.

    >>> print(written({"loss": {"name": "raw", "alpha": 2.0}, "stages": [{"epochs": 3}]}))
    [loss]
    name = "raw"
    alpha = 2.0
    <BLANKLINE>
    [[stages]]
    epochs = 3
    <BLANKLINE>
    """
    blocks = []
    for name, content in table.items():
        for one in content if isinstance(content, list) else [content]:
            head = f"[[{_key(name)}]]" if isinstance(content, list) else f"[{_key(name)}]"
            blocks.append("\n".join([head, *(f"{_key(key)} = {value(each)}" for key, each in one.items())]) + "\n")
    return "\n".join(blocks)


def value(content: Any) -> str:
    """One value; a table within a section stands on one line."""
    if isinstance(content, bool):
        return str(content).lower()
    if isinstance(content, str):
        # JSON's escapes are TOML's, but for one character that JSON leaves as it is.
        return json.dumps(content, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(content, float):
        return repr(content) if math.isfinite(content) else str(content)
    if isinstance(content, int):
        return str(content)
    if isinstance(content, (list, tuple)):
        return f"[{', '.join(map(value, content))}]"
    if isinstance(content, Mapping):
        return f"{{{', '.join(f'{_key(key)} = {value(each)}' for key, each in content.items())}}}"
    raise TypeError(f"{content!r} is a {type(content).__name__}; a recipe cannot hold that in a file")


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else value(name)
