"""Losses by name."""

from __future__ import annotations

import inspect
import textwrap
from typing import Any, TypeVar

from nearfar.losses.base import Loss
from nearfar.utils.validation import nearest, refuse_missing, refuse_unknown

L = TypeVar("L", bound=type[Loss])
_LOSSES: dict[str, type[Loss]] = {}


def register(loss: L) -> L:
    """Class decorator: make a loss known by its ``key``."""
    if _LOSSES.get(loss.key, loss).__qualname__ != loss.__qualname__:
        raise ValueError(f"two losses have the key {loss.key!r}: {_LOSSES[loss.key].__name__} and {loss.__name__}")
    _LOSSES[loss.key] = loss
    return loss


def names() -> list[str]:
    """The keys of all losses."""
    return sorted(_LOSSES)


def get(key: str) -> type[Loss]:
    """The class behind a key."""
    if key not in _LOSSES:
        raise ValueError(f"loss is {key!r}{nearest(key, names())}; allowed are {', '.join(names())}")
    return _LOSSES[key]


def create(key: str, **settings: Any) -> Loss:
    """A loss by key.

    >>> create("raw", alpha=3.0).alpha
    3.0
    """
    loss = get(key)
    allowed = defaults(key)
    refuse_unknown(key, settings, allowed)
    refuse_missing(key, settings, allowed)
    return loss(**settings)


def defaults(key: str) -> dict[str, Any]:
    """The settings of a loss and their defaults (``inspect.Parameter.empty`` where one must be given)."""
    parameters = inspect.signature(get(key).__init__).parameters
    return {name: parameter.default for name, parameter in parameters.items() if name != "self"}


def describe(key: str) -> str:
    """Meaning, formula, settings, differences and reference of a loss, as text."""
    loss = get(key)
    settings = ", ".join(
        name if default is inspect.Parameter.empty else f"{name}={default!r}" for name, default in defaults(key).items()
    )
    text = inspect.cleandoc(loss.__doc__ or "")
    return f"{loss.__name__}({settings})\n\n{textwrap.indent(text, '  ')}\n\n  Paper: {loss.source}\n"


def summary(key: str) -> str:
    """The first line of a loss's description."""
    return inspect.cleandoc(get(key).__doc__ or "").partition("\n")[0]
