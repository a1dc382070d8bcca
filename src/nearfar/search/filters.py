"""Which items are wanted: filters on label, name and metadata."""

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
LIKE = "~"  # a pattern with * and ?


def select(items: Sequence[Item], where: Where) -> NDArray[np.int64]:
    """The ids of the items that pass all filters, in their order.

    Args:
        where: By field or key of the metadata: a value, a list of which any will do, or comparisons, as in
            ``{"label": ["jay", "wren"], "year": {">=": 2019, "<": 2022}, "name": {"~": "garden/*"}}``. A list for
            a comparison, as in ``{"label": {"!=": ["jay", "wren"]}}``, means that it holds for all of them.

    An item without the key passes no filter on it, but for "!=".

    >>> items = [Item(0, "a.jpg", "jay", metadata={"year": 2019}), Item(1, "b.jpg", "wren")]
    >>> select(items, {"label": ["jay", "wren"], "year": {">=": 2000}}).tolist()
    [0]
    """
    if not isinstance(where, Mapping):
        raise TypeError(f"where is a {type(where).__name__}; needed is a mapping such as {{'label': 'jay'}}")
    tests = [(str(key), _test(str(key), wanted)) for key, wanted in where.items()]
    check_keys(items, [key for key, _ in tests])
    passed = [item.id for item in items if all(test(value_of(item, key)) for key, test in tests)]
    return np.array(passed, dtype=np.int64)


def parse(text: str) -> tuple[str, Any]:
    """A filter from a command line: ``label=jay``, ``year>=2019``, ``name~garden/*``, ``label!=jay,wren``.

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
        raise ValueError(f"--where is {text!r}; needed is KEY=VALUE, or with one of != < <= > >= ~ between them")
    if sign == LIKE:
        return key, {sign: value}
    words = [_literal(word) for word in (value.split(",") if sign in ("=", "==", "!=") else [value])]
    wanted = words[0] if len(words) == 1 else words
    return key, wanted if sign in ("=", "==") else {sign: wanted}


def together(filters: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Several filters as one mapping; comparisons of one key are joined.

    >>> together([parse("year>=2019"), parse("year<2022"), parse("label!=jay"), parse("label!=wren")])
    {'year': {'>=': 2019, '<': 2022}, 'label': {'!=': ['jay', 'wren']}}
    """
    found: dict[str, Any] = {}
    for key, wanted in filters:
        if key not in found:
            found[key] = wanted
        elif isinstance(wanted, dict) and isinstance(found[key], dict):
            found[key] = {**found[key], **{sign: _both(found[key], sign, value) for sign, value in wanted.items()}}
        else:
            raise ValueError(f"--where names {key!r} twice; several values are separated by commas")
    return found


def _both(known: Mapping[str, Any], sign: str, value: Any) -> Any:
    return [*_several(known[sign]), *_several(value)] if sign in known else value


def _several(wanted: Any) -> list[Any]:
    return list(wanted) if isinstance(wanted, (list, tuple, set, frozenset)) else [wanted]


@dataclass(frozen=True)
class Spelled:
    """A number that is written as Python would not: 001 is 1 among numbers, and "001" among words."""

    number: int | float
    text: str

    def __str__(self) -> str:
        return self.text


def _literal(word: str) -> str | int | float | Spelled:
    for kind in (int, float):
        try:
            number = kind(word)
        except ValueError:
            continue
        return number if str(number) == word else Spelled(number, word)
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
    compare, limit = COMPARISONS[sign], wanted.number if isinstance(wanted, Spelled) else wanted

    def test(value: Any) -> bool:
        try:
            return value is not None and compare(value, limit)
        except TypeError:
            return False

    return test


def _equal(value: Any, wanted: Any) -> bool:
    if isinstance(value, str):
        return value == str(wanted) and wanted is not None  # a class may be called "7", and a command line says 7
    return bool(value == (wanted.number if isinstance(wanted, Spelled) else wanted))


def _plain(key: str, wanted: Any) -> Any:
    if wanted is not None and not isinstance(wanted, (str, int, float, Spelled)):
        raise TypeError(f"where has a {type(wanted).__name__} for {key!r}; needed are text, numbers or truth values")
    return wanted
