"""Validation of settings where they are stored: ``self.alpha = positive("alpha", alpha)``."""

from __future__ import annotations

import difflib
import functools
import inspect
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import islice
from numbers import Integral, Real
from typing import Any, TypeVar

T = TypeVar("T")


def number(name: str, value: float, *, low: float = -math.inf, high: float = math.inf, open_low: bool = False) -> float:
    """Validate a finite number in [low, high], or in (low, high] if ``open_low``; NumPy numbers are accepted."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} is {value!r}; a number is needed")
    inside = (low < value if open_low else low <= value) and value <= high
    if not (inside and math.isfinite(value)):
        left = f"{'>' if open_low else '≥'} {low}" if math.isfinite(low) else ""
        right = f"≤ {high}" if math.isfinite(high) else ""
        allowed = " and ".join(part for part in (left, right) if part) or "finite"
        raise ValueError(f"{name} is {value!r}; it must be {allowed}")
    return float(value)


def positive(name: str, value: float) -> float:
    """Validate a finite number > 0."""
    return number(name, value, low=0.0, open_low=True)


def non_negative(name: str, value: float) -> float:
    """Validate a finite number ≥ 0."""
    return number(name, value, low=0.0)


def whole(name: str, value: int, *, low: int = 1, high: int | None = None) -> int:
    """Validate a whole number ≥ ``low`` and, if given, ≤ ``high``."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} is {value!r}; a whole number is needed")
    if value < low or (high is not None and value > high):
        raise ValueError(f"{name} is {value!r}; it must be ≥ {low}" + ("" if high is None else f" and ≤ {high}"))
    return int(value)


def one_of(name: str, value: str, allowed: tuple[str, ...]) -> str:
    """Validate that a string is one of the allowed ones."""
    if value not in allowed:
        raise ValueError(f"{name} is {value!r}; allowed are {', '.join(allowed)}")
    return value


def nearest(word: str, allowed: Iterable[str], prefix: str = "") -> str:
    """What was probably meant, to stand behind a wrong word in an error; empty where nothing comes close.

    ``prefix`` is where the allowed words stand, as in "loss." of a recipe.

    >>> f"loss is 'tripelt'{nearest('tripelt', ['triplet', 'raw'])}"
    "loss is 'tripelt' (did you mean 'triplet'?)"
    """
    close = difflib.get_close_matches(str(word), list(allowed), n=1)
    return f" (did you mean {prefix + close[0]!r}?)" if close else ""


def few(words: Collection[object], most: int) -> str:
    """The first of some words, for a message.

    >>> few(["a", "b"], 2), few(range(9), 2)
    ('a, b', '0, 1, …')
    """
    return ", ".join(map(str, islice(words, most))) + (", …" if len(words) > most else "")


def known(kind: str, name: str, table: Mapping[str, T]) -> T:
    """The entry of a table, or an error that lists all names."""
    if name not in table:
        names = sorted(table)
        raise ValueError(f"{kind} is {name!r}{nearest(name, names)}; allowed are {', '.join(names)}")
    return table[name]


def refuse_unknown(owner: str, given: Iterable[str], allowed: Collection[str]) -> None:
    """That whoever is called ``owner`` has all settings that are given."""
    for name in given:
        if name not in allowed:
            raise TypeError(
                f"{owner} has no setting {name!r}{nearest(name, allowed)}; it has {', '.join(allowed) or 'none'}"
            )


def defaults_of(function: Callable[..., Any], *without: str) -> dict[str, Any]:
    """The parameters of a function and their defaults (``inspect.Parameter.empty`` if there is none)."""
    parameters = inspect.signature(function).parameters
    return {name: parameter.default for name, parameter in parameters.items() if name not in without}


def check_settings(owner: str, given: Collection[str], defaults: Mapping[str, object]) -> None:
    """That ``owner`` has all settings that are given, and that all settings without a default are given."""
    refuse_unknown(owner, given, defaults)
    missing = [name for name, value in defaults.items() if value is inspect.Parameter.empty and name not in given]
    if missing:
        raise TypeError(f"{owner} needs {' and '.join(missing)}")


def check_constructor(cls: type) -> None:
    """Make the constructor of a class suggest the nearest name when it gets a setting that it does not have.

    Call it from ``__init_subclass__``. The signature stays as it is.

    >>> class Base:
    ...     def __init_subclass__(cls):
    ...         check_constructor(cls)
    >>> class Circle(Base):
    ...     def __init__(self, *, radius=1.0):
    ...         self.radius = radius
    >>> Circle(raduis=2.0)
    Traceback (most recent call last):
    TypeError: Circle has no setting 'raduis' (did you mean 'radius'?); it has radius
    """
    original: Any = vars(cls).get("__init__")
    if original is None:
        return
    _, *parameters = inspect.signature(original).parameters.values()
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return
    allowed = [parameter.name for parameter in parameters]

    @functools.wraps(original)
    def constructor(self: object, *arguments: Any, **settings: Any) -> None:
        refuse_unknown(type(self).__name__, settings, allowed)
        original(self, *arguments, **settings)

    cls.__init__ = constructor  # type: ignore[misc]


def listed(problems: Collection[str]) -> str:
    """Return problems as the message of one error: one problem as it is, several with a line for each."""
    lines = [f"{len(problems)} problems:", *(f"  {line}" for line in problems)]
    return "\n".join(lines) if len(problems) > 1 else next(iter(problems))
