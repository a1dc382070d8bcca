"""The registry of losses: creation by name, and descriptions from the docstrings."""

from __future__ import annotations

import inspect
import textwrap
from typing import Any

from nearfar.losses.base import LOSSES, Loss
from nearfar.losses.pml import LOSSES as PML_LOSSES
from nearfar.losses.pml import refuse_foreign
from nearfar.utils.validation import defaults_of

names = LOSSES.names
"""Return the keys of all losses, sorted."""


def get(key: str) -> type[Loss]:
    """Return the class of a key.

    Args:
        key: Name of the loss, such as "multi_similarity".

    Example:
        >>> get("raw").__name__
        'Raw'
    """
    if key in PML_LOSSES:
        raise ValueError(f"loss is {key!r}, a class of pytorch-metric-learning; nearfar has {PML_LOSSES[key]}")
    return LOSSES.get(key)


def create(key: str, **settings: Any) -> Loss:
    """Create a loss by its key.

    Args:
        key: Name of the loss, such as "multi_similarity".
        **settings: Arguments of its constructor.

    Raises:
        ValueError: If there is no such loss, or a value is not allowed.
        TypeError: If the loss has no such setting, or a setting without default is missing.

    Example:
        >>> create("raw", alpha=3.0).alpha
        3.0
    """
    allowed = defaults(key)
    if settings:
        refuse_foreign(key, settings, allowed)
    loss: Loss = LOSSES.create(key, **settings)
    return loss


def defaults(key: str) -> dict[str, Any]:
    """Return the settings of a loss and their defaults (``inspect.Parameter.empty`` if there is none).

    Args:
        key: Name of the loss.

    Example:
        >>> defaults("circle")
        {'margin': 0.4, 'scale': 80.0, 'mining': 'all'}
    """
    return defaults_of(get(key))


def describe(key: str) -> str:
    """Return the signature of a loss and its documentation: formula, settings, differences, reference, example.

    Args:
        key: Name of the loss.
    """
    loss = get(key)
    settings = ", ".join(
        name if default is inspect.Parameter.empty else f"{name}={default!r}" for name, default in defaults(key).items()
    )
    text = inspect.cleandoc(loss.__doc__ or "").replace("``", "")
    return f"{loss.__name__}({settings})\n\n{textwrap.indent(text, '  ')}\n"


def summary(key: str) -> str:
    """Return the first line of the documentation of a loss.

    Args:
        key: Name of the loss.
    """
    return inspect.cleandoc(get(key).__doc__ or "").partition("\n")[0]
