"""Changes to a recipe before it is read: ``--set loss.alpha=32``."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from nearfar.training.recipe.schema import SECTIONS
from nearfar.utils.toml import parse_value

Overrides = Mapping[str, Any] | Sequence[str]


def parse_override(text: str) -> tuple[str, Any]:
    """Parse ``SECTION.KEY=VALUE`` with a TOML value; what is not TOML is text.

    Args:
        text: What was given with ``--set``.

    Returns:
        The key and the value.

    Example:
        >>> parse_override("loss.alpha=32"), parse_override("evaluation.ks=[1, 10]"), parse_override("loss.name=raw")
        (('loss.alpha', 32), ('evaluation.ks', [1, 10]), ('loss.name', 'raw'))
    """
    key, equals, value = text.partition("=")
    key, value = key.strip(), value.strip()
    if not equals or not all(key.split(".")) or "." not in key or not value:
        raise ValueError(f"--set is {text!r}; SECTION.KEY=VALUE is needed, as in loss.alpha=32")
    return key, parse_value(value)


def apply(table: Mapping[str, Any], overrides: Overrides) -> dict[str, Any]:
    """Change the tables of a recipe.

    Args:
        table: The tables, which stay as they are.
        overrides: As for :func:`~nearfar.training.recipe.files.load`.

    Returns:
        A changed copy.
    """
    changed: dict[str, Any] = copy.deepcopy(dict(table))
    for path, value in _paths(overrides):
        if path[-1] == "name" and len(path) > 1:
            _forget(changed, path, value)
        place: Any = changed
        for key in path[:-1]:
            place = _inside(place, key, path)
        place[_number(place, path[-1], path) if isinstance(place, list) else path[-1]] = value
    return changed


def _paths(overrides: Overrides) -> list[tuple[list[str], Any]]:
    """Keys and values, names first: settings of an old name are dropped before new ones are set."""
    if isinstance(overrides, str):
        overrides = [overrides]
    pairs = overrides.items() if isinstance(overrides, Mapping) else map(parse_override, overrides)
    found: list[tuple[list[str], Any]] = []
    for key, value in pairs:
        if isinstance(value, Mapping) and "." not in key:
            found += [([key, str(inner)], one) for inner, one in value.items()]
        else:
            found.append((key.split("."), value))
    return sorted(found, key=lambda pair: pair[0][-1] != "name")


def _forget(table: dict[str, Any], path: list[str], name: Any) -> None:
    """Drop the keys that belong to the old name of a section that gets another."""
    section: Any = table
    for key in path[:-1]:
        section = _inside(section, key, path)
    if not isinstance(section, dict) or section.get("name") == name:
        return
    kind = SECTIONS.get(path[0])
    if path[-2] == "loss":
        lost = [key for key in section if key != "name"]
    elif kind is not None and kind.keys:
        lost = [key for key in section if isinstance(name, str) and kind.is_foreign(name, key)]
    elif path == ["data", "name"]:
        lost = ["root", "settings"]
    else:
        lost = ["settings"] if path == ["network", "name"] else []
    for key in lost:
        section.pop(key, None)


def _inside(place: Any, key: str, path: list[str]) -> Any:
    """The table under a key, created if there is none; stages are found by number."""
    if isinstance(place, list):
        return place[_number(place, key, path)]
    inner = place.setdefault(key, {})
    if not isinstance(inner, (dict, list)):
        raise TypeError(f"{'.'.join(path)} cannot be set: {key} is {inner!r} and not a table")
    return inner


def _number(place: list[Any], key: str, path: list[str]) -> int:
    if not key.isdecimal() or int(key) >= len(place):
        raise ValueError(
            f"{'.'.join(path)} cannot be set: {path[0]} has the numbers 0 to {len(place) - 1}, and no {key!r}"
        )
    return int(key)
