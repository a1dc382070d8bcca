"""Grids: the losses, networks, dimensions, datasets, settings and seeds to compare, read from a TOML file.

Example:
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

from nearfar import losses as loss_registry
from nearfar.bench.grid import protocols
from nearfar.bench.grid.protocols import Protocol
from nearfar.training.recipe.overrides import apply
from nearfar.training.recipe.schema import SECTIONS
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
FROZEN = "frozen"  # label of the baseline
# Keys that cannot be under [settings], and what defines them instead.
OWN_AXES = {
    "loss.name": "[losses]",
    "network.name": "[networks]",
    "network.dim": "dims",
    "data.name": "[data]",
    "split.name": "protocol",
    "split.fold": "protocol",
    "training.seed": "seeds",
}


class GridError(ValueError):
    """Raised for an invalid grid; the message names the file and the key."""


@dataclass(frozen=True, kw_only=True)
class Grid:
    """A comparison: every loss with every network, dimension, dataset, setting and seed.

    Args:
        name: Name of the grid and of its folder.
        recipe: Sections of the recipe that all cells share.
        losses: Changes to the recipe by label of the loss: [loss], and other sections where the loss needs them.
        networks: Changes by label of the network; "losses" in them holds changes for one loss on this network.
        data: Changes by label of the dataset, in the same way.
        dims: Dimensions of the embeddings.
        settings: Values to compare by key of the recipe, {"loss.alpha": (2, 4)}, each with each.
        seeds: Seeds of the training.
        protocol: Evaluation protocol: which classes validate.
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
    """Read a grid from a TOML file or from the content of one.

    Args:
        grid: The file. Its ``recipe`` is a table, or the path of a recipe relative to the folder of the grid;
            ``changes`` are applied to it for all cells.

    Raises:
        GridError: If the file is invalid.
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
    """Return a grid as TOML that ``load`` reads and that refers to no other file.

    Args:
        grid: The grid.

    Example:
        >>> import tomllib
        >>> grid = Grid(name="one", recipe={"optimizer": {"lr": 0.1}}, losses={"raw": {"loss": {"name": "raw"}}})
        >>> load(tomllib.loads(to_toml(grid))) == grid
        True
    """
    import tomli_w

    axes = {"losses": grid.losses, "networks": grid.networks, "data": grid.data}
    tables = {
        "name": grid.name,
        "protocol": grid.protocol.name,
        "protocol_settings": grid.protocol.settings(),
        "baseline": grid.baseline,
        "seeds": list(grid.seeds),
        "dims": list(grid.dims),
        "recipe": grid.recipe,
        "settings": {key: list(values) for key, values in grid.settings.items()},
    }
    return tomli_w.dumps({key: each for key, each in (tables | axes).items() if each not in ({}, [])})


def _read(table: Tables, here: Path, name: str) -> Grid:
    for key in table:
        if key not in KEYS:
            raise ValueError(f"unknown key {key}{nearest(key, KEYS)}; allowed are {', '.join(KEYS)}")
    name = table.get("name", name)
    if not isinstance(name, str) or not name or Path(name).name != name or name.startswith("."):
        raise ValueError(f"name is {name!r}; it must be a folder name")
    baseline = table.get("baseline", True)
    if not isinstance(baseline, bool):
        raise TypeError(f"baseline is {baseline!r}; it must be true or false")
    protocol = protocols.create(table.get("protocol", "standard"), _table("protocol_settings", table))
    recipe = apply(_recipe(table, here), _table("changes", table))
    _check_parts("changes", _table("changes", table))
    for key, value in recipe.get("split", {}).items():
        if key != "name" or value != protocol.name:
            raise ValueError(
                f"protocol is {protocol.name!r}, but the recipe has split.{key} {value!r}; protocol and "
                "protocol_settings define the split, so remove it from the recipe"
            )
    chosen = {label: _named(label, changes) for label, changes in _axis("losses", table).items()}
    if not chosen:
        raise ValueError("losses is missing; at least one [losses.LABEL] is required")
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
        raise FileNotFoundError(f"recipe is {recipe!r}; {file} does not exist")
    found = read(file, "a recipe")
    _check_parts(str(file), found)
    return found


def _table(key: str, table: Tables) -> Tables:
    found = table.get(key, {})
    if not isinstance(found, Mapping):
        raise TypeError(f"{key} is {found!r}; it must be a table, [{key}]")
    return found


def _axis(key: str, table: Tables, chosen: Mapping[str, Tables] | None = None) -> dict[str, Tables]:
    """Return the changes of an axis by label; with ``chosen`` losses, they may contain changes for single losses."""
    found = _table(key, table)
    for label, changes in found.items():
        where = f"{key}.{label}"
        if label == FROZEN:
            raise ValueError(f"{where}: {FROZEN!r} is the label of the baseline; choose another one")
        if not isinstance(changes, Mapping):
            raise TypeError(f"{where} is {changes!r}; it must be a table, [{where}]")
        inner = changes.get("losses", {}) if chosen is not None else {}
        if not isinstance(inner, Mapping):
            raise TypeError(f"{where}.losses is {inner!r}; it must be a table, [{where}.losses.LABEL]")
        _check_parts(where, {part: one for part, one in changes.items() if chosen is None or part != "losses"})
        for loss, own in inner.items():
            if chosen is not None and loss not in chosen:
                raise ValueError(f"{where}.losses.{loss}: no loss has this label{nearest(loss, chosen)}")
            _check_parts(f"{where}.losses.{loss}", own)
    return dict(found)


def _settings(table: Tables, above: str = "") -> dict[str, tuple[Any, ...]]:
    """Return values by key of the recipe: {"loss": {"alpha": [2, 4]}} gives {"loss.alpha": (2, 4)}."""
    found: dict[str, tuple[Any, ...]] = {}
    for word, values in table.items():
        key = f"{above}{word}"
        if isinstance(values, Mapping):
            found |= _settings(values, f"{key}.")
            continue
        section = key.partition(".")[0]
        if section not in SECTIONS or section == key:
            known = ", ".join(f"{one}.…" for one in SECTIONS)
            raise ValueError(
                f"settings.{key} is not a key of a recipe{nearest(section, SECTIONS)}; allowed are {known}"
            )
        if key in OWN_AXES:
            raise ValueError(f"settings.{key} is not allowed; use {OWN_AXES[key]} of the grid instead")
        if not isinstance(values, list) or not values:
            raise TypeError(f"settings.{key} is {values!r}; it must be a list of values")
        if any(values.count(each) > 1 for each in values):
            raise ValueError(f"settings.{key} is {values!r}; values must be different")
        found[key] = tuple(values)
    return found


def _check_parts(where: str, changes: Any) -> None:
    if not isinstance(changes, Mapping):
        raise TypeError(f"{where} is {changes!r}; it must be a table with sections of a recipe")
    for part, content in changes.items():
        if part not in PARTS:
            raise ValueError(f"{where}: unknown section {part}{nearest(part, PARTS)}; allowed are {', '.join(PARTS)}")
        if part != "stages" and not isinstance(content, Mapping):
            raise TypeError(f"{where}.{part} is {content!r}; it must be a table, as in {part}.name = …")


def _named(label: str, changes: Tables) -> Tables:
    """Add the name of the loss to its changes: "raw+hard" stands for the loss "raw"; other labels need loss.name."""
    loss = changes.get("loss", {})
    word = re.split(r"\W", label)[0]
    if "name" in loss:
        return changes
    if word in loss_registry.names():
        return {**changes, "loss": {"name": word, **loss}}
    if not changes or loss:
        known = nearest(word, loss_registry.names())
        raise ValueError(f"losses.{label}: there is no loss {word!r}{known}; set loss.name")
    return changes  # the loss of the recipe, with other changes


def _numbers(key: str, table: Tables, *, low: int) -> tuple[int, ...]:
    values = table.get(key, [])
    if not isinstance(values, (list, tuple)):
        raise TypeError(f"{key} is {values!r}; it must be a list of integers")
    for each in values:
        whole(key, each, low=low)
    if len(set(values)) < len(values):
        raise ValueError(f"{key} is {list(values)}; numbers must be different")
    return tuple(values)
