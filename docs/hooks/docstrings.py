"""Docstrings as the site shows them: formulas and examples keep their lines, and roles of Sphinx become code."""

from __future__ import annotations

import re
from typing import Any

import griffe

from nearfar.losses.registry import with_inherited_settings

FORMULA = re.compile(r"^Formula:\n((?:(?:    .*)?\n?)+?)(?=\S|\Z)", re.MULTILINE)
DOCTEST = re.compile(r"^( *)>>> .*\n(?:\1.*\S.*\n)*", re.MULTILINE)
ROLE = re.compile(r":\w+:`~?([^`]+)`")
DOUBLE = re.compile(r"``([^`]+)``")


class Docstrings(griffe.Extension):
    """Rewrites docstrings before they are parsed."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of an object."""
        if obj.docstring is not None:
            obj.docstring.value = rewritten(obj.docstring.value)

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Add what the base classes of a loss or estimator say about its settings."""
        for package, name in ((pkg[part], name) for part in ("estimators", "losses") for name in pkg[part].exports):
            thing = package[str(name)]
            cls = thing.final_target if thing.is_alias else thing
            if isinstance(cls, griffe.Class) and cls.docstring is not None:
                texts = [base.docstring.value for base in (cls, *cls.mro()) if base.docstring is not None]
                names = [parameter.name for parameter in cls.parameters]
                cls.docstring.value = with_inherited_settings(texts, names)


def rewritten(text: str) -> str:
    """A docstring with formulas and examples in blocks of code, and without roles."""

    def formula(found: re.Match[str]) -> str:
        return "\n".join(["Formula:", "    ```text", *found[1].rstrip().splitlines(), "    ```", "", ""])

    def example(found: re.Match[str]) -> str:
        return f"{found[1]}```pycon\n{found[0]}{found[1]}```\n"

    plain = DOUBLE.sub(r"`\1`", ROLE.sub(r"`\1`", text))
    return DOCTEST.sub(example, FORMULA.sub(formula, f"{plain}\n"))
