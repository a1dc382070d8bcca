"""Which items are wanted: filters on label, name and metadata."""

from __future__ import annotations

import fnmatch
import operator
from collections.abc import Callable, Mapping, Sequence
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

    Parameters
        where   by field or key of the metadata: a value, a list of which any will do, or comparisons, as in
                ``{"label": ["jay", "wren"], "year": {">=": 2019, "<": 2022}, "name": {"~": "garden/*"}}``.

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
    """A filter from a command line: ``label=jay``, ``year>=2019``, ``name~garden/*``, ``label=jay,wren``.

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
    if sign in ("=", "=="):
        words = [_literal(word) for word in value.split(",")]
        return key, words[0] if len(words) == 1 else words
    return key, {sign: value if sign == LIKE else _literal(value)}


def together(filters: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Several filters as one mapping; comparisons of one key are joined.

    >>> together([parse("year>=2019"), parse("year<2022")])
    {'year': {'>=': 2019, '<': 2022}}
    """
    found: dict[str, Any] = {}
    for key, wanted in filters:
        if key not in found:
            found[key] = wanted
        elif isinstance(wanted, dict) and isinstance(found[key], dict):
            found[key] = {**found[key], **wanted}
        else:
            raise ValueError(f"--where names {key!r} twice; several values are separated by commas")
    return found


def _literal(word: str) -> str | int | float:
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            continue
    return word


def _test(key: str, wanted: Any) -> Test:
    if isinstance(wanted, Mapping):
        parts = [_comparison(key, str(sign), value) for sign, value in wanted.items()]
        return lambda value: all(part(value) for part in parts)
    if isinstance(wanted, (list, tuple, set, frozenset)):
        allowed = [_plain(key, each) for each in wanted]
        return lambda value: any(_equal(value, each) for each in allowed)
    plain = _plain(key, wanted)
    return lambda value: _equal(value, plain)


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
    compare = COMPARISONS[sign]

    def test(value: Any) -> bool:
        try:
            return value is not None and compare(value, wanted)
        except TypeError:
            return False

    return test


def _equal(value: Any, wanted: Any) -> bool:
    # A class may be called "7", and a command line says 7.
    return bool(value == wanted) or (isinstance(value, str) and not isinstance(wanted, str) and value == str(wanted))


def _plain(key: str, wanted: Any) -> Any:
    if wanted is not None and not isinstance(wanted, (str, int, float)):
        raise TypeError(f"where has a {type(wanted).__name__} for {key!r}; needed are text, numbers or truth values")
    return wanted
