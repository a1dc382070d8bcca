"""Filters by label, name and metadata."""

from __future__ import annotations

import fnmatch
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearfar.search.items import Item, check_keys, value_of
from nearfar.utils.deadline import checked

Where = Mapping[str, Any]
Test = Callable[[Any], bool]

COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<=": operator.le,
    ">=": operator.ge,
    "<": operator.lt,
    ">": operator.gt,
}
LIKE = "~"  # followed by a pattern with * and ?


def select(items: Sequence[Item], where: Where, candidates: Sequence[Item] | None = None) -> NDArray[np.int64]:
    """Return the ids of the items that pass all conditions of a filter, in their order.

    A condition is a value, a list of alternatives, or comparisons as in ``{"year": {">=": 2019, "<": 2022}}``. One with
    a list, as in ``{"label": {"!=": ["jay", "wren"]}}``, must hold for all of its values. An item without the key
    passes no condition on it except "!=".
    """
    if not isinstance(where, Mapping):
        raise TypeError(f"where is a {type(where).__name__}; it must be a mapping such as {{'label': 'jay'}}")
    tests = [(str(key), _test(str(key), wanted)) for key, wanted in where.items()]
    check_keys(items, [key for key, _ in tests])
    passed = [
        item.id
        for item in checked(items if candidates is None else candidates)
        if all(test(value_of(item, key)) for key, test in tests)
    ]
    return np.array(passed, dtype=np.int64)


def exact_labels(where: Where) -> list[str | None] | None:
    """Return the labels that items must have to pass a filter; None if it has no list of them."""
    if not isinstance(where, Mapping) or "label" not in where or isinstance(where["label"], Mapping):
        return None
    return [None if label is None else str(_plain("label", label)) for label in _several(where["label"])]


def parse(text: str) -> tuple[str, Any]:
    """Parse a condition of the command line: ``label=jay``, ``year>=2019``, ``name~garden/*``, ``label!=jay,wren``."""
    at, sign = min(
        ((text.find(sign), sign) for sign in ("!=", "<=", ">=", "==", "<", ">", "~", "=") if sign in text),
        key=lambda place: (place[0], -len(place[1])),
        default=(-1, ""),
    )
    key, value = text[: max(at, 0)].strip(), text[at + len(sign) :].strip()
    if not key or not value:
        raise ValueError(f"where is {text!r}; it must be KEY=VALUE, or have one of != < <= > >= ~ in place of =")
    if sign == LIKE:
        return key, {sign: value}
    words = [_literal(word) for word in (value.split(",") if sign in ("=", "==", "!=") else [value])]
    wanted = words[0] if len(words) == 1 else words
    return key, wanted if sign in ("=", "==") else {sign: wanted}


def combine(conditions: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Combine several conditions into one filter; comparisons of the same key are merged."""
    where: dict[str, Any] = {}
    for key, wanted in conditions:
        if key not in where:
            where[key] = wanted
        elif isinstance(wanted, dict) and isinstance(where[key], dict):
            where[key] = {**where[key], **{sign: _both(where[key], sign, value) for sign, value in wanted.items()}}
        else:
            raise ValueError(f"where has {key!r} twice; separate several values by commas")
    return where


def _both(known: Mapping[str, Any], sign: str, value: Any) -> Any:
    return [*_several(known[sign]), *_several(value)] if sign in known else value


def _several(wanted: Any) -> list[Any]:
    return list(wanted) if isinstance(wanted, (list, tuple, set, frozenset)) else [wanted]


@dataclass(frozen=True)
class NumberText:
    """A number in a spelling that Python would not print: 001 equals the number 1 and the text "001"."""

    number: int | float
    text: str

    def __str__(self) -> str:
        return self.text


def _literal(word: str) -> str | int | float | NumberText:
    for kind in (int, float):
        try:
            number = kind(word)
        except ValueError:
            continue
        return number if str(number) == word else NumberText(number, word)
    return word


def _test(key: str, wanted: Any) -> Test:
    if not isinstance(wanted, Mapping):
        return _among(key, _several(wanted))
    parts = [
        part
        for sign, value in wanted.items()
        for part in _comparisons(key, str(sign), [value] if sign == "==" else _several(value))
    ]
    return lambda value: all(part(value) for part in parts)


def _comparisons(key: str, sign: str, wanted: Sequence[Any]) -> list[Test]:
    if sign not in (*COMPARISONS, LIKE):
        raise ValueError(f"where has {sign!r} for {key!r}; allowed are {', '.join(COMPARISONS)} and {LIKE}")
    if sign in ("==", "!="):
        among = _among(key, wanted)
        return [among if sign == "==" else lambda value: not among(value)]
    return [_comparison(sign, _plain(key, limit)) for limit in wanted]


def _among(key: str, wanted: Sequence[Any]) -> Test:
    """Test for any of several values, however many they are, by one look into a set."""
    # A class named "7" is read as the number 7.
    texts = {str(_plain(key, value)) for value in wanted if value is not None}
    others = {_number(value) for value in wanted if not isinstance(value, str)}

    def test(value: Any) -> bool:
        try:
            return value in (texts if isinstance(value, str) else others)
        except TypeError:  # a list or an object
            return False

    return test


def _comparison(sign: str, wanted: Any) -> Test:
    if sign == LIKE:
        matches = re.compile(fnmatch.translate(str(wanted))).match
        return lambda value: value is not None and matches(str(value)) is not None
    compare, limit = COMPARISONS[sign], _number(wanted)

    def test(value: Any) -> bool:
        try:
            return value is not None and compare(value, limit)
        except TypeError:
            return False

    return test


def _number(wanted: Any) -> Any:
    return wanted.number if isinstance(wanted, NumberText) else wanted


def _plain(key: str, wanted: Any) -> Any:
    if wanted is not None and not isinstance(wanted, (str, int, float, NumberText)):
        raise TypeError(f"where has a {type(wanted).__name__} for {key!r}; allowed are text, numbers and booleans")
    return wanted
