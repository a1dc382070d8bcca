"""Recipes in files: strict TOML in, complete TOML out.

Example:
    >>> recipe = load({
    ...     "sampler": {"classes": 4, "per_class": 8},
    ...     "network": {"name": "mlp", "dim": 16},
    ...     "loss": {"name": "raw", "alpha": 3.0},
    ...     "optimizer": {"lr": 1e-3},
    ...     "training": {"epochs": 5},
    ... }, overrides=["loss.alpha=4", "training.epochs=6"])
    >>> recipe.loss.settings["alpha"], recipe.training.epochs
    (4, 6)
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w

from nearfar.training.recipe import checks
from nearfar.training.recipe.schema import NONE, SECTIONS, WRAPPERS, LossSection, Recipe, Section
from nearfar.utils import shipped
from nearfar.utils.shipped import parse_value, read
from nearfar.utils.validation import listed

NAME = "recipe.toml"


class RecipeError(ValueError):
    """A recipe with problems; the message names the file and has a line for each problem.

    Args:
        message: All problems, or the only one.
        problems: One line each.
    """

    def __init__(self, message: str, problems: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.problems = problems or (message,)


def load(recipe: str | Path | Mapping[str, Any] | Recipe, *, overrides: Overrides = ()) -> Recipe:
    """Read a recipe from a TOML file, by name, from a run folder, or from a table of tables.

    Args:
        recipe: The file, the name of a recipe that comes with nearfar, a run folder, or the tables of such a file.
        overrides: What to change: "loss.alpha=32" as on a command line, or {"loss.alpha": 32}, or
            {"loss": {"alpha": 32}}. A section that gets another name loses the keys of the old one.

    A file may say ``base = "other.toml"``, a file beside it or the name of a recipe that comes with nearfar: it then
    holds what differs. Several bases, ``base = ["a.toml", "b.toml"]``, are read one over the other.

    Returns:
        The recipe, with the defaults of everything that is not given.

    Raises:
        RecipeError: If the recipe has problems; all of them are named.
        FileNotFoundError: If there is no such file.
    """
    if isinstance(recipe, Recipe) and not overrides:
        return recipe  # it was checked when it was read
    where, table = _table(recipe)
    try:
        return from_dict(apply(table, overrides))
    except RecipeError as error:
        raise RecipeError(f"{where}{error}", error.problems) from None
    except (TypeError, ValueError) as error:
        raise RecipeError(f"{where}{error}") from None


def from_dict(table: Mapping[str, Any]) -> Recipe:
    """Read a recipe from the tables of a file."""
    recipe, problems = checks.read(Recipe, table, owner=checks.RECIPE)
    if recipe is None:
        raise RecipeError(listed(problems), tuple(problems))
    return recipe


def to_dict(recipe: Recipe) -> dict[str, Any]:
    """A complete recipe as plain tables, with the defaults: what :func:`from_dict` reads."""
    table: dict[str, Any] = {name: section_tables(getattr(recipe, name)) for name in SECTIONS}
    if recipe.stages:
        table["stages"] = [section_tables(stage) for stage in recipe.stages]
    return table


def to_toml(recipe: Recipe) -> str:
    """A complete recipe as TOML text."""
    return tomli_w.dumps(_without_none(to_dict(recipe)))


def difference(old: Recipe, new: Recipe) -> list[str]:
    """Where two recipes differ, such as "optimizer.lr: 0.001 → 0.01"."""
    return _difference(to_dict(old), to_dict(new))


def changes(file: str | Path, overrides: Overrides = ()) -> list[str]:
    """What a recipe and its overrides change of the recipe's base, or of the recipe itself if it has no base."""
    path = shipped.find(file, "recipe")
    table = inherited(path)
    bases = inherited(path, only_bases=True)
    return _difference(bases or table, apply(table, overrides))


def _difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    before, after = flat(old), flat(new)
    keys = list(dict.fromkeys([*before, *after]))
    gone = "not set"
    return [
        f"{key}: {before.get(key, gone)} → {after.get(key, gone)}" for key in keys if before.get(key) != after.get(key)
    ]


def _table(recipe: str | Path | Mapping[str, Any] | Recipe) -> tuple[str, Mapping[str, Any]]:
    """The file for errors, and the tables of a recipe."""
    if isinstance(recipe, Recipe):
        return "", to_dict(recipe)
    if isinstance(recipe, Mapping):
        return "", recipe
    file = Path(recipe)
    run = file / NAME
    if run.is_file() or (file.is_dir() and file.as_posix() not in shipped.names("recipe")):
        return f"{run}: ", read(run, "a recipe", RecipeError)
    file = shipped.find(file, "recipe")
    return f"{file}: ", inherited(file)


def inherited(file: Path, heirs: tuple[Path, ...] = (), only_bases: bool = False) -> dict[str, Any]:
    """The tables of a file over those of its ``base``, or those of its bases alone."""
    table = read(file, "a recipe", RecipeError)
    base = table.pop("base", ())
    names = [base] if isinstance(base, str) else base
    if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
        raise RecipeError(f"{file}: base is {base!r}; the file or name of a recipe is needed, or a list of them")
    complete: dict[str, Any] = {}
    for name in names:
        beside = file.parent / name
        parent = (beside if beside.is_file() else shipped.find(Path(name), "recipe")).resolve()
        if parent in (*heirs, file.resolve()):
            raise RecipeError(f"{file}: base is {name!r}, which has this recipe as its own base")
        complete = apply(complete, inherited(parent, (*heirs, file.resolve())))
    return complete if only_bases else apply(complete, table)


def section_tables(section: Section) -> dict[str, Any]:
    """The keys of a section that belong to its name, with plain values."""
    if isinstance(section, LossSection):
        given = {key: getattr(section, key) for key in WRAPPERS}
        given["plus"] = tuple(section_tables(each) for each in section.plus)
        added = {key: value for key, value in given.items() if value != LossSection.model_fields[key].default}
        lists = {key: list(value) for key, value in added.items() if isinstance(value, tuple)}
        return {"name": section.name, **section.settings, **added, **lists}
    name = getattr(section, "name", "")
    table: dict[str, Any] = {}
    for key, field in type(section).model_fields.items():
        value = getattr(section, key)
        if section.is_foreign(name, key) or (value is None and field.default is None) or value == {}:
            continue
        if isinstance(value, LossSection):
            value = section_tables(value)
        table[key] = NONE if value is None else list(value) if isinstance(value, tuple) else value
    return table


def _without_none(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_none(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_none(each) for each in value]
    return NONE if value is None else value


def flat(tables: Mapping[str, Any], joint: str = ".") -> dict[str, Any]:
    """Flatten tables to keys with dots. Lists of tables are numbered.

    >>> flat({"network": {"dim": 512}, "stages": [{"epochs": 2}], "ks": [1, 2]})
    {'network.dim': 512, 'stages.0.epochs': 2, 'ks': [1, 2]}
    """
    values: dict[str, Any] = {}
    for key, value in tables.items():
        if isinstance(value, list) and value and all(isinstance(table, Mapping) for table in value):
            value = {str(number): table for number, table in enumerate(value)}
        if isinstance(value, Mapping):
            values |= {f"{key}{joint}{inner}": setting for inner, setting in flat(value, joint).items()}
        else:
            values[str(key)] = value
    return values


Overrides = Mapping[str, Any] | Sequence[str]


def parse_override(text: str) -> tuple[str, Any]:
    """Parse ``SECTION.KEY=VALUE`` with a TOML value; what is not TOML is text."""
    key, equals, value = text.partition("=")
    key, value = key.strip(), value.strip()
    if not equals or not all(key.split(".")) or "." not in key or not value:
        raise ValueError(f"--set is {text!r}; SECTION.KEY=VALUE is needed, as in loss.alpha=32")
    return key, parse_value(value)


def apply(table: Mapping[str, Any], overrides: Overrides) -> dict[str, Any]:
    """Change the tables of a recipe."""
    changed: dict[str, Any] = copy.deepcopy(dict(table))
    paths = _paths(overrides)
    for path, value in paths:
        if path[-1] == "name" and len(path) > 1:
            _forget(changed, path, value)
        place: Any = changed
        for key in path[:-1]:
            place = _inside(place, key, path)
        place[_number(place, path[-1], path) if isinstance(place, list) else path[-1]] = value
    keys = {".".join(path) for path, _ in paths}
    sampler = changed.get("sampler")
    if isinstance(sampler, dict) and sampler.get("name", "groups") == "groups":  # one of two keys sets the size
        for key, replaced in (("classes", "batch_size"), ("batch_size", "classes")):
            if f"sampler.{key}" in keys and f"sampler.{replaced}" not in keys:
                sampler.pop(replaced, None)
    return changed


def _paths(overrides: Overrides) -> list[tuple[list[str], Any]]:
    """Keys and values, names first: settings of an old name are dropped before new ones are set."""
    if isinstance(overrides, str):
        overrides = [overrides]
    pairs = overrides.items() if isinstance(overrides, Mapping) else map(parse_override, overrides)
    found: list[tuple[list[str], Any]] = []
    for key, value in pairs:
        if isinstance(value, Mapping) and "." not in key:
            found += [([key, str(inner)], one) for inner, one in value.items()]
        else:
            found.append((key.split("."), value))
    return sorted(found, key=lambda pair: pair[0][-1] != "name")


def _forget(table: dict[str, Any], path: list[str], name: Any) -> None:
    """Drop the keys that belong to the old name of a section that gets another."""
    section: Any = table
    for key in path[:-1]:
        section = _inside(section, key, path)
    if not isinstance(section, dict) or section.get("name") == name:
        return
    kind = SECTIONS.get(path[0])
    if path[-2] == "loss":
        lost = [key for key in section if key not in ("name", *WRAPPERS)]
    elif kind is not None and kind.keys:
        lost = [key for key in section if isinstance(name, str) and kind.is_foreign(name, key)]
    elif path == ["data", "name"]:
        lost = ["root", "settings"]
    else:
        lost = ["settings"] if path == ["network", "name"] else []
    for key in lost:
        section.pop(key, None)


def _inside(place: Any, key: str, path: list[str]) -> Any:
    """The table under a key, created if there is none; stages are found by number."""
    if isinstance(place, list):
        return place[_number(place, key, path)]
    inner = place.setdefault(key, {})
    if not isinstance(inner, (dict, list)):
        raise TypeError(f"{'.'.join(path)} cannot be set: {key} is {inner!r} and not a table")
    return inner


def _number(place: list[Any], key: str, path: list[str]) -> int:
    if not key.isdecimal() or int(key) >= len(place):
        raise ValueError(
            f"{'.'.join(path)} cannot be set: {path[0]} has the numbers 0 to {len(place) - 1}, and no {key!r}"
        )
    return int(key)
