"""The registry of losses: creation by name, and descriptions from the docstrings."""

import inspect
import re
import textwrap
from collections.abc import Iterable, Sequence
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


ARGS = re.compile(r"^Args:\n(?:    .*\n)+", re.MULTILINE)
SETTING = re.compile(r"^    (\w+): .*\n(?:        .*\n)*", re.MULTILINE)


def with_inherited_settings(texts: Sequence[str], names: Iterable[str]) -> str:
    """The docstring of a class, the first, with what only those of its base classes say about its settings."""
    known: dict[str, str] = {}
    for text in texts:
        for section in ARGS.findall(f"{text}\n"):
            known = {setting[1]: setting[0] for setting in SETTING.finditer(section)} | known
    args = "".join(["Args:\n", *(known[name] for name in names if name in known)])
    first = f"{texts[0]}\n"
    if ARGS.search(first):
        return ARGS.sub(lambda _: args, first)
    return re.sub(r"^(?=Differences:|Reference:)", lambda _: f"{args}\n", first, count=1, flags=re.MULTILINE)


def describe(key: str) -> str:
    """Return the signature of a loss and its documentation: formula, settings, differences, reference, example.

    Args:
        key: Name of the loss.
    """
    loss = get(key)
    settings = ", ".join(
        name if default is inspect.Parameter.empty else f"{name}={default!r}" for name, default in defaults(key).items()
    )
    texts = [inspect.cleandoc(base.__doc__) for base in loss.__mro__ if issubclass(base, Loss) and base.__doc__]
    text = with_inherited_settings(texts, defaults(key)).rstrip().replace("``", "")
    return f"{loss.__name__}({settings})\n\n{textwrap.indent(text, '  ')}\n"


def summary(key: str) -> str:
    """Return the first line of the documentation of a loss.

    Args:
        key: Name of the loss.
    """
    return inspect.cleandoc(get(key).__doc__ or "").partition("\n")[0]
