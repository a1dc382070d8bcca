"""TOML files: reading them and values of them, and the recipes, grids and spaces that come with nearfar."""

from __future__ import annotations

import tomllib
from itertools import takewhile
from pathlib import Path
from typing import Any

import nearfar
from nearfar.utils.validation import known, nearest

FOLDERS = {"recipe": "", "grid": "grids", "space": "spaces"}
# Python's spellings, which are easily mixed up with TOML's.
_PYTHON_WORDS = {"None": "none", "True": True, "False": False}


def folder(kind: str) -> Path:
    """The folder of the recipes, grids or spaces: in the installed package, or in the checkout it is imported from."""
    package = Path(nearfar.__file__).parent
    recipes = package / "recipes"
    return (recipes if recipes.is_dir() else package.parents[1] / "recipes") / known("kind", kind, FOLDERS)


def names(kind: str) -> list[str]:
    """The names of all recipes, grids or spaces: paths below their folder, without ".toml"; the shallow ones first."""
    top = folder(kind)
    paths = (file.relative_to(top).with_suffix("").as_posix() for file in top.rglob("*.toml"))
    shipped = (path for path in paths if not path.startswith(("grids/", "spaces/")))
    return sorted(shipped, key=lambda path: (path.count("/"), path))


def find(given: str | Path, kind: str) -> Path:
    """The file that is given by its path or, if there is none, by the name of one that comes with nearfar."""
    file, shipped = Path(given), names(kind)
    if file.is_file():
        return file
    if file.as_posix() in shipped:
        return folder(kind) / f"{file.as_posix()}.toml"
    name = file.with_suffix("").as_posix().removeprefix("recipes/").removeprefix(f"{FOLDERS[kind]}/")
    raise FileNotFoundError(
        f"{given} does not exist{nearest(name, shipped)}; a {kind} is needed: a TOML file, or a name that "
        f"`nearfar recipe list {kind}` shows"
    )


def summary(name: str, kind: str) -> str:
    """The first sentence of the comment that a file begins with."""
    lines = find(name, kind).read_text(encoding="utf-8").splitlines()
    comment = takewhile(lambda line: line.startswith("# "), (line for line in lines if not line.startswith("#:")))
    return " ".join(line[2:].strip() for line in comment).partition(". ")[0].rstrip(".") + "."


def read(file: Path, what: str, error: type[ValueError] = ValueError) -> dict[str, Any]:
    """Read a TOML file."""
    if not file.is_file():
        raise FileNotFoundError(f"{file} does not exist; {what} is needed, a TOML file")
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as problem:
        raise error(f"{file} is not valid TOML: {problem}") from None


def parse_value(text: str) -> Any:
    """Parse a value given on a command line: a TOML value, or text where it is none.

    ``True``, ``False`` and ``None`` are accepted for TOML's ``true`` and ``false`` and for "none".
    """
    text = text.strip()
    if text in _PYTHON_WORDS:
        return _PYTHON_WORDS[text]
    try:
        table = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return table["value"] if list(table) == ["value"] else text
