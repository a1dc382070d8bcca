"""Packages that import their modules and names when they are first used."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping
from importlib import import_module
from typing import Any


def lazy(package: str, modules: Collection[str], names: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a package with some modules, and with names of which the module is given."""

    def get(name: str) -> Any:
        if name in modules:
            return import_module(f"{package}.{name}")
        if name not in names:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(f"{package}.{names[name]}"), name)
        setattr(sys.modules[package], name, value)
        return value

    return get
