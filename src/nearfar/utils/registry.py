"""Registries: losses, networks, datasets, samplers and minings by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from nearfar.utils.validation import check_settings, defaults_of, known

T = TypeVar("T", bound=Callable[..., Any])


class Registry(Generic[T]):
    """Classes or functions of one kind by name; ``positional`` are their parameters that are no settings."""

    def __init__(self, kind: str, *positional: str) -> None:
        self.kind, self.positional = kind, positional
        self.entries: dict[str, T] = {}

    def register(self, name: str, entry: T) -> T:
        """Add an entry. A file that is run again replaces its entries; a name of another entry is refused."""
        before, after = (f"{each.__module__}.{each.__qualname__}" for each in (self.entries.get(name, entry), entry))
        if before != after:
            raise ValueError(f"the name {name!r} is taken: {self.kind} {before} has it, so {after} needs another")
        self.entries[name] = entry
        return entry

    def names(self) -> list[str]:
        """Return all names, sorted."""
        return sorted(self.entries)

    def get(self, name: str) -> T:
        """Return the entry of a name."""
        return known(self.kind, name, self.entries)

    def defaults(self, name: str) -> dict[str, Any]:
        """Return the settings of an entry and their defaults (``inspect.Parameter.empty`` if required)."""
        return defaults_of(self.get(name), *self.positional)

    def create(self, name: str, /, *positional: Any, **settings: Any) -> Any:
        """Call an entry, after a check of the settings that suggests the nearest name."""
        check_settings(f"{self.kind} {name}", settings, self.defaults(name))
        return self.get(name)(*positional, **settings)
