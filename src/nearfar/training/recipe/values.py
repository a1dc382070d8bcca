"""Values of recipes: do they have the type that a section declares?"""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal

from nearfar.utils.validation import nearest

NOTHING = "none"  # what stands for None in TOML, which has no word for it


def fit(name: str, wanted: Any, value: Any) -> Any:
    """``value`` as the type ``wanted``: lists become tuples, whole numbers floats, and "none" None where that is one.

    >>> fit("training.clip", float | None, 5), fit("training.clip", float | None, "none")
    (5.0, None)
    """
    choices = _choices(wanted)
    if types.NoneType in choices and (value is None or value == NOTHING):
        return None
    for choice in choices:
        fits, found = _as(choice, value)
        if fits:
            return found
    words = [word for choice in choices if typing.get_origin(choice) is Literal for word in typing.get_args(choice)]
    if words and isinstance(value, str):
        raise ValueError(f"{name} is {value!r}{nearest(value, words)}; allowed are {_described(choices)}")
    raise TypeError(f"{name} is {_shown(value)}; needed is {_described(choices)}")


def _choices(wanted: Any) -> tuple[Any, ...]:
    if typing.get_origin(wanted) in (typing.Union, types.UnionType):
        return typing.get_args(wanted)
    return (wanted,)


def _as(wanted: Any, value: Any) -> tuple[bool, Any]:
    """Whether a value fits one type, and what it becomes."""
    origin = typing.get_origin(wanted)
    if origin is Literal:
        return isinstance(value, str) and value in typing.get_args(wanted), value
    if origin is tuple:
        return _as_tuple(typing.get_args(wanted), value)
    if wanted is float:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or math.isnan(value):
            return False, None
        return True, float(value)
    if wanted is int:
        return isinstance(value, int) and not isinstance(value, bool), value
    if origin is not None and issubclass(origin, Mapping):
        plain = isinstance(value, Mapping) and all(isinstance(key, str) for key in value)
        return plain, dict(value) if plain else None
    return isinstance(value, wanted), value


def _as_tuple(kinds: tuple[Any, ...], value: Any) -> tuple[bool, Any]:
    if not isinstance(value, (list, tuple)):
        return False, None
    each = (kinds[0],) * len(value) if kinds[-1] is Ellipsis else kinds
    if len(each) != len(value):
        return False, None
    found = [_as(kind, one) for kind, one in zip(each, value, strict=True)]
    return all(fits for fits, _ in found), tuple(one for _, one in found)


_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text", types.NoneType: f'"{NOTHING}"'}
_PLURALS = {int: "whole numbers", float: "numbers", str: "words"}


def _described(choices: tuple[Any, ...]) -> str:
    """What would fit, in words."""
    words: list[str] = []
    for choice in sorted(choices, key=lambda one: one is types.NoneType):
        origin, inside = typing.get_origin(choice), typing.get_args(choice)
        if origin is Literal:
            words.extend(f'"{word}"' for word in inside)
        elif origin is tuple:
            many = "" if inside[-1] is Ellipsis else f"{len(inside)} "
            words.append(f"a list of {many}{_PLURALS.get(inside[0], 'words')}")
        else:
            words.append(_WORDS.get(choice, "a table"))
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()  # as TOML writes it
    return f"a table ({', '.join(map(str, value)) or 'empty'})" if isinstance(value, Mapping) else repr(value)
