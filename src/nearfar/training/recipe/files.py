"""Recipes in files: strict TOML in, complete TOML out.

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

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_type_hints

from nearfar.training.recipe.base import Section
from nearfar.training.recipe.checks import foreign, not_of
from nearfar.training.recipe.overrides import Overrides, apply
from nearfar.training.recipe.schema import Recipe
from nearfar.training.recipe.sections import Loss, Stage
from nearfar.training.recipe.toml import written
from nearfar.training.recipe.values import NOTHING
from nearfar.utils.toml import read
from nearfar.utils.validation import nearest

NAME = "recipe.toml"
RENAMED = {"split.kind": "split.name"}
OLD_SPLITS = {"default": "standard", "kfold": "k_fold"}
_TYPES: dict[str, Any] = get_type_hints(Recipe)
SECTIONS: dict[str, type[Section]] = {name: kind for name, kind in _TYPES.items() if name != "stages"}


class RecipeError(ValueError):
    """A recipe that cannot be followed; the message names the file and the key."""


def load(recipe: str | Path | Mapping[str, Any] | Recipe, *, overrides: Overrides = ()) -> Recipe:
    """A recipe from a TOML file, a run folder, or a table of tables.

    Args:
        recipe: The file, a run folder, or what such a file holds. The recipe of a run folder may have been written by
            an earlier version; see :func:`upgrade`.
        overrides: What is changed: "loss.alpha=32" as on a command line, or {"loss.alpha": 32}, or
            {"loss": {"alpha": 32}}. A section that gets another name loses what belonged to the old one.
    """
    where, table = _table(recipe)
    try:
        return from_dict(apply(table, overrides))
    except (TypeError, ValueError) as error:
        raise RecipeError(f"{where}{error}") from None


def from_dict(table: Mapping[str, Any]) -> Recipe:
    """A recipe from what a file holds."""
    known = [*_TYPES]
    values: dict[str, Any] = {}
    for name, content in table.items():
        if name not in _TYPES:
            raise ValueError(f"unknown section [{name}]{nearest(name, known)}; a recipe has {', '.join(known)}")
        if name == "stages":
            if not isinstance(content, (list, tuple)):
                raise TypeError("stages is no list; each stage begins with [[stages]]")
            values[name] = tuple(_stage(i, stage) for i, stage in enumerate(content))
        else:
            values[name] = _section(SECTIONS[name], name, content)
    needed = [field.name for field in dataclasses.fields(Recipe) if _is_needed(field)]
    missing = [f"[{name}]" for name in needed if name not in values]
    if missing:
        raise ValueError(f"section {' and '.join(missing)} is missing")
    return Recipe(**values)


def upgrade(table: Mapping[str, Any]) -> dict[str, Any]:
    """Rename the keys of a recipe that an earlier version wrote into a run folder, a manifest or a study.

    Args:
        table: The recipe as tables, of this version or an earlier one.

    Returns:
        The recipe with the keys and words of this version.

    Example:
        >>> upgrade({"split": {"kind": "k_fold", "fold": 1}})
        {'split': {'name': 'k_fold', 'fold': 1}}
    """
    upgraded = dict(table)
    split = upgraded.get("split")
    if isinstance(split, Mapping) and "kind" in split and "name" not in split:
        renamed = {"name" if key == "kind" else key: value for key, value in split.items()}
        upgraded["split"] = {**renamed, "name": OLD_SPLITS.get(renamed["name"], renamed["name"])}
    return upgraded


def to_dict(recipe: Recipe) -> dict[str, Any]:
    """Everything a recipe says, defaults included, as plain tables: what ``from_dict`` reads."""
    table: dict[str, Any] = {name: _plain(getattr(recipe, name)) for name in SECTIONS}
    if recipe.stages:
        table["stages"] = [_plain(stage) for stage in recipe.stages]
    return table


def to_toml(recipe: Recipe) -> str:
    """The same as text.

    >>> print(to_toml(load({"sampler": {"name": "random", "batch_size": 8}, "network": {"name": "linear"},
    ...     "loss": {"name": "nra"}, "optimizer": {"lr": 0.1}, "training": {"epochs": 1}})).split("[augmentation]")[0])
    [data]
    name = "digits"
    side = 256
    aspect = "keep"
    on_error = "fail"
    mode = "auto"
    <BLANKLINE>
    [split]
    name = "standard"
    <BLANKLINE>
    [sampler]
    name = "random"
    batch_size = 8
    <BLANKLINE>
    <BLANKLINE>
    """
    return written(to_dict(recipe))


def difference(old: Recipe, new: Recipe) -> list[str]:
    """Where two recipes differ: "optimizer.lr: 0.001 → 0.01"."""
    before, after = _flat(to_dict(old)), _flat(to_dict(new))
    keys = list(dict.fromkeys([*before, *after]))
    gone = "not set"
    return [
        f"{key}: {before.get(key, gone)} → {after.get(key, gone)}" for key in keys if before.get(key) != after.get(key)
    ]


def _table(recipe: str | Path | Mapping[str, Any] | Recipe) -> tuple[str, Mapping[str, Any]]:
    """What to name in errors, and what the recipe holds."""
    if isinstance(recipe, Recipe):
        return "", to_dict(recipe)
    if isinstance(recipe, Mapping):
        return "", recipe
    file = Path(recipe)
    if file.is_dir():
        file = file / NAME
        return f"{file}: ", upgrade(read(file, "a recipe", RecipeError))
    return f"{file}: ", read(file, "a recipe", RecipeError)


def _section(kind: type[Section], where: str, content: Any) -> Section:
    if not isinstance(content, Mapping):
        raise TypeError(f"{where} is {content!r}; needed is a table, [{where}]")
    if issubclass(kind, Loss):
        return _loss(where, content)
    fields = {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    for key in content:
        if f"{where}.{key}" in RENAMED:
            raise ValueError(f"{where}.{key} is now called {RENAMED[f'{where}.{key}']}; rename it in the recipe")
        if key not in fields:
            raise ValueError(
                f"unknown key {where}.{key}{nearest(key, fields, f'{where}.')}; [{where}] has {', '.join(fields)}"
            )
    name = content.get("name", getattr(kind, "name", None))
    for key in content:
        if isinstance(name, str) and foreign(kind, name, key):
            raise ValueError(not_of(kind, name, key))
    for key, field in fields.items():
        if key not in content and _is_needed(field):
            raise ValueError(f"{where}.{key} is missing")
    return kind(**content)


def _loss(where: str, content: Any) -> Loss:
    if not isinstance(content, Mapping):
        raise TypeError(f"{where} is {content!r}; needed is a table with the name of a loss")
    if "name" not in content:
        raise ValueError(f"{where}.name is missing")
    return Loss(name=content["name"], settings={key: value for key, value in content.items() if key != "name"})


def _stage(number: int, content: Any) -> Stage:
    where = f"stages.{number}"
    if isinstance(content, Mapping) and "loss" in content:
        content = {**content, "loss": _loss(f"{where}.loss", content["loss"])}
    stage = _section(Stage, where, content)
    assert isinstance(stage, Stage)
    return stage


def _is_needed(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _plain(section: Section) -> dict[str, Any]:
    """The keys of a section that belong to its name, with plain values."""
    if isinstance(section, Loss):
        return {"name": section.name, **section.settings}
    kind = type(section)
    name = getattr(section, "name", "")
    table: dict[str, Any] = {}
    for field in dataclasses.fields(section):  # type: ignore[arg-type]
        value = getattr(section, field.name)
        if foreign(kind, name, field.name) or (value is None and field.default is None) or value == {}:
            continue
        if isinstance(value, Loss):
            value = _plain(value)
        table[field.name] = NOTHING if value is None else list(value) if isinstance(value, tuple) else value
    return table


def _flat(table: Any, where: str = "") -> dict[str, Any]:
    if isinstance(table, list) and any(isinstance(one, Mapping) for one in table):
        table = {str(i): one for i, one in enumerate(table)}
    if not isinstance(table, Mapping):
        return {where: table}
    found: dict[str, Any] = {}
    for key, value in table.items():
        found |= _flat(value, f"{where}.{key}" if where else str(key))
    return found
