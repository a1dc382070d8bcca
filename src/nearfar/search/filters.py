"""Filters by label, name and metadata."""

from __future__ import annotations

import fnmatch
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearfar.search.items import Item, check_keys, value_of

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

    An item without the key passes no condition on it except "!=".

    Args:
        items: The items.
        where: For each field or key of the metadata: a value, a list of alternatives, or comparisons, as in
            ``{"label": ["jay", "wren"], "year": {">=": 2019, "<": 2022}, "name": {"~": "garden/*"}}``. A comparison
            with a list, as in ``{"label": {"!=": ["jay", "wren"]}}``, must hold for all of its values.
        candidates: The items that can pass, if that is known; all others are not checked.

    Example:
        >>> items = [Item(0, "a.jpg", "jay", metadata={"year": 2019}), Item(1, "b.jpg", "wren")]
        >>> select(items, {"label": ["jay", "wren"], "year": {">=": 2000}}).tolist()
        [0]
    """
    if not isinstance(where, Mapping):
        raise TypeError(f"where is a {type(where).__name__}; it must be a mapping such as {{'label': 'jay'}}")
    tests = [(str(key), _test(str(key), wanted)) for key, wanted in where.items()]
    check_keys(items, [key for key, _ in tests])
    passed = [
        item.id
        for item in (items if candidates is None else candidates)
        if all(test(value_of(item, key)) for key, test in tests)
    ]
    return np.array(passed, dtype=np.int64)


def exact_labels(where: Where) -> list[str | None] | None:
    """Return the labels that items must have to pass a filter; None if it has no list of them.

    Args:
        where: The filter.

    Example:
        >>> exact_labels({"label": ["jay", 7], "year": 2019}), exact_labels({"label": {"!=": "jay"}})
        (['jay', '7'], None)
    """
    if not isinstance(where, Mapping) or "label" not in where or isinstance(where["label"], Mapping):
        return None
    return [None if each is None else str(_plain("label", each)) for each in _several(where["label"])]


def parse(text: str) -> tuple[str, Any]:
    """Parse a condition of the command line: ``label=jay``, ``year>=2019``, ``name~garden/*``, ``label!=jay,wren``.

    Args:
        text: The condition.

    Returns:
        A key and a condition for ``select``.

    Example:
        >>> parse("year>=2019"), parse("label=jay,wren")
        (('year', {'>=': 2019}), ('label', ['jay', 'wren']))
    """
    at, sign = min(
        ((text.find(sign), sign) for sign in ("!=", "<=", ">=", "==", "<", ">", "~", "=") if sign in text),
        key=lambda found: (found[0], -len(found[1])),
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
    """Combine several conditions into one filter; comparisons of the same key are merged.

    Args:
        conditions: Results of ``parse``.

    Example:
        >>> combine([parse("year>=2019"), parse("year<2022"), parse("label!=jay"), parse("label!=wren")])
        {'year': {'>=': 2019, '<': 2022}, 'label': {'!=': ['jay', 'wren']}}
    """
    found: dict[str, Any] = {}
    for key, wanted in conditions:
        if key not in found:
            found[key] = wanted
        elif isinstance(wanted, dict) and isinstance(found[key], dict):
            found[key] = {**found[key], **{sign: _both(found[key], sign, value) for sign, value in wanted.items()}}
        else:
            raise ValueError(f"where has {key!r} twice; separate several values by commas")
    return found


def _both(known: Mapping[str, Any], sign: str, value: Any) -> Any:
    return [*_several(known[sign]), *_several(value)] if sign in known else value


def _several(wanted: Any) -> list[Any]:
    return list(wanted) if isinstance(wanted, (list, tuple, set, frozenset)) else [wanted]


@dataclass(frozen=True)
class NumberText:
    """A number in a spelling that Python would not print: 001 equals the number 1 and the text "001".

    Args:
        number: Its value.
        text: Its spelling.
    """

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
    if isinstance(wanted, Mapping):
        pairs = [(str(sign), value) for sign, value in wanted.items()]
        parts = [
            _comparison(key, sign, one)
            for sign, value in pairs
            for one in ([value] if sign == "==" else _several(value))
        ]
        return lambda value: all(part(value) for part in parts)
    allowed = [_plain(key, each) for each in _several(wanted)]
    return lambda value: any(_equal(value, each) for each in allowed)


def _comparison(key: str, sign: str, wanted: Any) -> Test:
    wanted = _plain(key, wanted)
    if sign == LIKE:
        return lambda value: value is not None and fnmatch.fnmatchcase(str(value), str(wanted))
    if sign == "==":
        return lambda value: _equal(value, wanted)
    if sign == "!=":
        return lambda value: not _equal(value, wanted)
    if sign not in COMPARISONS:
        raise ValueError(f"where has {sign!r} for {key!r}; allowed are {', '.join(COMPARISONS)} and {LIKE}")
    compare, limit = COMPARISONS[sign], wanted.number if isinstance(wanted, NumberText) else wanted

    def test(value: Any) -> bool:
        try:
            return value is not None and compare(value, limit)
        except TypeError:
            return False

    return test


def _equal(value: Any, wanted: Any) -> bool:
    if isinstance(value, str):
        return (
            value == str(wanted) and wanted is not None
        )  # a class may be named "7", which the command line reads as 7
    return bool(value == (wanted.number if isinstance(wanted, NumberText) else wanted))


def _plain(key: str, wanted: Any) -> Any:
    if wanted is not None and not isinstance(wanted, (str, int, float, NumberText)):
        raise TypeError(f"where has a {type(wanted).__name__} for {key!r}; allowed are text, numbers and booleans")
    return wanted
