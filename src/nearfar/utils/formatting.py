"""Numbers, percentages, durations and commands as text, the same on the terminal and on every page."""

from __future__ import annotations

import math
import shlex

MISSING = "–"


def command(*words: object) -> str:
    """A command of nearfar that can be copied into a shell, also with spaces in paths, and uses the same plugins.

    >>> command("train", "my photos.toml")
    "nearfar train 'my photos.toml'"
    """
    from nearfar.utils.plugins import used

    plugins = (word for file in used() for word in ("--use", file))
    return shlex.join(("nearfar", *map(str, words), *map(str, plugins)))


def number(value: float | None, digits: int | None = None) -> str:
    """A number with thousands separators, or a dash if there is none.

    >>> number(1234.5), number(0.00012345), number(1234.5, 1), number(None)
    ('1,234', '0.000123', '1,234.5', '–')
    """
    if value is None or math.isnan(value):
        return MISSING
    if digits is not None:
        return f"{value:,.{digits}f}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def percent(value: float | None, digits: int = 1, *, unit: bool = True) -> str:
    """A share of 1 in percent, or a dash if there is none.

    >>> percent(0.1234), percent(0.1234, 2, unit=False), percent(None)
    ('12.3 %', '12.34', '–')
    """
    text = number(None if value is None else 100 * value, digits)
    return f"{text} %" if unit and text != MISSING else text


def signed(value: float, digits: int = 1) -> str:
    """A number with its sign.

    >>> signed(1.26), signed(-0.5), signed(-0.01)
    ('+1.3', '−0.5', '+0.0')
    """
    return f"{round(value, digits) + 0.0:+.{digits}f}".replace("-", "−")


def interval(low: float | None, high: float | None, digits: int = 1) -> str:
    """Two shares of 1 in percent, without the sign.

    >>> interval(0.5, 0.625), interval(None, None)
    ('50.0 – 62.5', '–')
    """
    if low is None or high is None:
        return MISSING
    return f"{percent(low, digits, unit=False)} – {percent(high, digits, unit=False)}"


def duration(seconds: float) -> str:
    """A duration in its two largest units.

    >>> duration(3.24), duration(75), duration(7300)
    ('3.2 s', '1 min 15 s', '2 h 01 min')
    """
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def plural(count: int, noun: str, ending: str = "s") -> str:
    """A count with its noun.

    >>> plural(1, "run"), plural(2300, "run")
    ('1 run', '2,300 runs')
    """
    return f"{count:,} {noun}{'' if count == 1 else ending}"
