"""Grids: what to compare, in a TOML file.

>>> grid = load({
...     "name": "small",
...     "recipe": {
...         "sampler": {"classes": 4, "per_class": 8},
...         "network": {"name": "mlp"},
...         "optimizer": {"lr": 1e-3},
...         "training": {"epochs": 5},
...     },
...     "losses": {"raw": {}, "sharp": {"loss": {"name": "raw", "alpha": 8.0}}},
...     "dims": [16, 32],
... })
>>> list(grid.losses), grid.dims, grid.seeds, grid.protocol.name
(['raw', 'sharp'], (16, 32), (0,), 'standard')
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nearfar import losses as losses_room
from nearfar.bench.grid import protocols
from nearfar.bench.grid.protocols import Protocol
from nearfar.training.recipe.files import SECTIONS
from nearfar.training.recipe.overrides import apply
from nearfar.training.recipe.toml import value, written
from nearfar.utils.toml import read
from nearfar.utils.validation import nearest, whole

Tables = Mapping[str, Any]
KEYS = (
    "name",
    "recipe",
    "changes",
    "protocol",
    "protocol_settings",
    "baseline",
    "seeds",
    "losses",
    "networks",
    "dims",
    "data",
    "settings",
)
PARTS = (*SECTIONS, "stages")  # of a recipe
FROZEN = "frozen"  # the label of the baseline
# What says it instead of [settings].
SAID = {
    "loss.name": "[losses]",
    "network.name": "[networks]",
    "network.dim": "dims",
    "data.name": "[data]",
    "split.name": "protocol",
    "split.fold": "protocol",
    "training.seed": "seeds",
}


class GridError(ValueError):
    """A grid that cannot be run; the message names the file and the key."""


@dataclass(frozen=True, kw_only=True)
class Grid:
    """What to compare: every loss with every network, dimension, data set, setting and seed.

    Args:
        name: Of its folder.
        recipe: What all cells share, as tables.
        losses: By label, what a loss changes: [loss], and where it must any other section.
        networks: The same for networks, under "losses" with changes for one loss on this network; may be empty.
        data: The same for data sets; may be empty.
        dims: Of the embeddings; may be empty.
        settings: Values to try of keys of the recipe, {"loss.alpha": (2, 4)}, each with each; may be empty.
        seeds: Of the trainings.
        protocol: Which classes validate.
        baseline: Whether features without training are measured as well.
    """

    name: str
    recipe: Tables
    losses: Mapping[str, Tables]
    networks: Mapping[str, Tables] = field(default_factory=dict)
    data: Mapping[str, Tables] = field(default_factory=dict)
    dims: tuple[int, ...] = ()
    settings: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    seeds: tuple[int, ...] = (0,)
    protocol: Protocol = field(default_factory=Protocol)
    baseline: bool = True


def load(grid: str | Path | Tables | Grid) -> Grid:
    """A grid from a TOML file, or from what such a file holds.

    Args:
        grid: The file. Its ``recipe`` is the path of a recipe, from the folder of the grid on, or a table; ``changes``
            are made to it for all cells.
    """
    if isinstance(grid, Grid):
        return grid
    if isinstance(grid, Mapping):
        return _read(grid, Path(), "")
    file = Path(grid)
    table = read(file, "a grid", GridError)
    try:
        return _read(table, file.parent, file.stem)
    except (TypeError, ValueError) as error:
        raise GridError(f"{file}: {error}") from None


def to_toml(grid: Grid) -> str:
    """A grid as text that needs no other file: what ``load`` reads.

    >>> print(to_toml(Grid(name="one", recipe={"optimizer": {"lr": 0.1}}, losses={"raw": {"loss": {"name": "raw"}}})))
    name = "one"
    protocol = "standard"
    baseline = true
    seeds = [0]
    <BLANKLINE>
    [recipe]
    optimizer = {lr = 0.1}
    <BLANKLINE>
    [losses.raw]
    loss = {name = "raw"}
    <BLANKLINE>
    """
    protocol = grid.protocol
    settings = {key: getattr(protocol, key) for key in protocols.SETTINGS[protocol.name]}
    plain = {"name": grid.name, "protocol": protocol.name, "protocol_settings": settings, "baseline": grid.baseline}
    plain |= {"seeds": list(grid.seeds), "dims": list(grid.dims)}
    lines = [f"{key} = {value(each)}" for key, each in plain.items() if each not in ({}, [])]
    blocks = ["\n".join(lines) + "\n", written({"recipe": grid.recipe})]
    if grid.settings:
        blocks.append(written({"settings": {key: list(values) for key, values in grid.settings.items()}}))
    for axis, labels in {"losses": grid.losses, "networks": grid.networks, "data": grid.data}.items():
        blocks += [written({label: changes}).replace("[", f"[{axis}.", 1) for label, changes in labels.items()]
    return "\n".join(blocks)


def _read(table: Tables, here: Path, name: str) -> Grid:
    for key in table:
        if key not in KEYS:
            raise ValueError(f"unknown key {key}{nearest(key, KEYS)}; a grid has {', '.join(KEYS)}")
    name = table.get("name", name)
    if not isinstance(name, str) or not name or Path(name).name != name or name.startswith("."):
        raise ValueError(f"name is {name!r}; needed is the name of a folder")
    baseline = table.get("baseline", True)
    if not isinstance(baseline, bool):
        raise TypeError(f"baseline is {baseline!r}; needed is true or false")
    protocol = protocols.create(table.get("protocol", "standard"), _table("protocol_settings", table))
    recipe = apply(_recipe(table, here), _table("changes", table))
    _check_parts("changes", _table("changes", table))
    for key, said in recipe.get("split", {}).items():
        if key != "name" or said != protocol.name:
            raise ValueError(
                f"protocol is {protocol.name!r}, and the recipe has split.{key} {said!r}; the protocol and its "
                "protocol_settings say how to split, so leave that out of the recipe"
            )
    chosen = {label: _named(label, changes) for label, changes in _axis("losses", table).items()}
    if not chosen:
        raise ValueError("losses is missing; needed is at least one [losses.LABEL]")
    return Grid(
        name=name,
        recipe=recipe,
        losses=chosen,
        networks=_axis("networks", table, chosen),
        data=_axis("data", table, chosen),
        dims=_numbers("dims", table, low=1),
        settings=_settings(_table("settings", table)),
        seeds=_numbers("seeds", table, low=0) or (0,),
        protocol=protocol,
        baseline=baseline,
    )


def _recipe(table: Tables, here: Path) -> Tables:
    recipe = table.get("recipe", {})
    if not isinstance(recipe, str):
        _check_parts("recipe", recipe)
        return dict(recipe)
    file = here / recipe
    if not file.is_file():
        raise FileNotFoundError(f"recipe is {recipe!r}; {file} is not there")
    found = read(file, "a recipe")
    _check_parts(str(file), found)
    return found


def _table(key: str, table: Tables) -> Tables:
    found = table.get(key, {})
    if not isinstance(found, Mapping):
        raise TypeError(f"{key} is {found!r}; needed is a table, [{key}]")
    return found


def _axis(key: str, table: Tables, chosen: Mapping[str, Tables] | None = None) -> dict[str, Tables]:
    """Labels and what each changes; with ``chosen`` losses, changes for one of these may stand inside."""
    found = _table(key, table)
    for label, changes in found.items():
        where = f"{key}.{label}"
        if label == FROZEN:
            raise ValueError(f"{where}: {FROZEN!r} is what the baseline is called; choose another label")
        if not isinstance(changes, Mapping):
            raise TypeError(f"{where} is {changes!r}; needed is a table, [{where}]")
        inner = changes.get("losses", {}) if chosen is not None else {}
        if not isinstance(inner, Mapping):
            raise TypeError(f"{where}.losses is {inner!r}; needed is a table, [{where}.losses.LABEL]")
        _check_parts(where, {part: one for part, one in changes.items() if chosen is None or part != "losses"})
        for loss, own in inner.items():
            if chosen is not None and loss not in chosen:
                raise ValueError(f"{where}.losses.{loss}: no loss has this label{nearest(loss, chosen)}")
            _check_parts(f"{where}.losses.{loss}", own)
    return dict(found)


def _settings(table: Tables, above: str = "") -> dict[str, tuple[Any, ...]]:
    """Values by key of the recipe.

    >>> _settings({"loss": {"alpha": [2, 4]}, "sampler.per_class": [5]})
    {'loss.alpha': (2, 4), 'sampler.per_class': (5,)}
    """
    found: dict[str, tuple[Any, ...]] = {}
    for word, values in table.items():
        key = f"{above}{word}"
        if isinstance(values, Mapping):
            found |= _settings(values, f"{key}.")
            continue
        section = key.partition(".")[0]
        if section not in SECTIONS or section == key:
            known = ", ".join(f"{one}.…" for one in SECTIONS)
            raise ValueError(f"settings.{key} is no key of a recipe{nearest(section, SECTIONS)}; those are {known}")
        if key in SAID:
            raise ValueError(f"settings.{key} is what {SAID[key]} of a grid says")
        if not isinstance(values, list) or not values:
            raise TypeError(f"settings.{key} is {values!r}; needed is a list of the values to try")
        if any(values.count(each) > 1 for each in values):
            raise ValueError(f"settings.{key} is {values!r}; each value once is enough")
        found[key] = tuple(values)
    return found


def _check_parts(where: str, changes: Any) -> None:
    if not isinstance(changes, Mapping):
        raise TypeError(f"{where} is {changes!r}; needed is a table of a recipe's sections")
    for part, content in changes.items():
        if part not in PARTS:
            raise ValueError(f"{where}: unknown section {part}{nearest(part, PARTS)}; a recipe has {', '.join(PARTS)}")
        if part != "stages" and not isinstance(content, Mapping):
            raise TypeError(f"{where}.{part} is {content!r}; needed is a table, as in {part}.name = …")


def _named(label: str, changes: Tables) -> Tables:
    """A label that begins with the name of a loss names it; another has to say which loss its settings are of.

    >>> _named("raw+hard", {"loss": {"mining": "hard"}})
    {'loss': {'name': 'raw', 'mining': 'hard'}}
    """
    loss = changes.get("loss", {})
    word = re.split(r"\W", label)[0]
    if "name" in loss:
        return changes
    if word in losses_room.names():
        return {**changes, "loss": {"name": word, **loss}}
    if not changes or loss:
        known = nearest(word, losses_room.names())
        raise ValueError(f"losses.{label}: no loss is called {word!r}{known}; say which it is with loss.name")
    return changes  # the recipe's own loss, and something else changed


def _numbers(key: str, table: Tables, *, low: int) -> tuple[int, ...]:
    values = table.get(key, [])
    if not isinstance(values, (list, tuple)):
        raise TypeError(f"{key} is {values!r}; needed is a list of whole numbers")
    for each in values:
        whole(key, each, low=low)
    if len(set(values)) < len(values):
        raise ValueError(f"{key} is {list(values)}; each number once is enough")
    return tuple(values)
