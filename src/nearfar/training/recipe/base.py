"""What all sections of a recipe share: fields that are checked against their types."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, ClassVar, get_type_hints

from nearfar.training.recipe.values import fit
from nearfar.utils.validation import positive, whole


class Section:
    """A table of a recipe; ``section`` is its name."""

    section: ClassVar[str] = ""

    def __post_init__(self) -> None:
        for name, wanted in types_of(type(self)).items():
            object.__setattr__(self, name, fit(self._name(name), wanted, getattr(self, name)))
        self._check()

    def _check(self) -> None:
        """Values out of range."""

    def _name(self, key: str) -> str:
        return f"{self.section}.{key}"

    def _whole(self, key: str, low: int = 1) -> None:
        value = getattr(self, key)
        if value is not None:
            whole(self._name(key), value, low=low)

    def _positive(self, key: str) -> None:
        value = getattr(self, key)
        if value is not None:
            positive(self._name(key), value)


def types_of(section: type[Section]) -> dict[str, Any]:
    """The fields of a section and their types."""
    hints = get_type_hints(section)
    return {one.name: hints[one.name] for one in fields(section)}  # type: ignore[arg-type]
