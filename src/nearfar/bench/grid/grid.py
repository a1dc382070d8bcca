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
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nearfar import losses as loss_registry
from nearfar.bench.grid import protocols
from nearfar.bench.grid.protocols import Protocol
from nearfar.training.recipe.files import apply
from nearfar.training.recipe.schema import SECTIONS
from nearfar.utils.toml import read
from nearfar.utils.validation import listed, nearest, whole

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
    """Raised for an invalid grid; the message names the file and has a line for each problem."""


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
    table = {"name": name, "recipe": {}, "protocol": "standard", "baseline": True, "seeds": (0,), **table}
    if isinstance(table["recipe"], str):
        table["recipe"] = _recipe(here, table["recipe"])
    found = list(_problems(table))
    if found:
        raise GridError(listed(found))
    losses = {label: _named(label, changes) for label, changes in table["losses"].items()}
    return Grid(
        name=table["name"],
        recipe=apply(table["recipe"], table.get("changes", {})),
        losses=losses,
        networks=dict(table.get("networks", {})),
        data=dict(table.get("data", {})),
        dims=tuple(table.get("dims", ())),
        settings={key: tuple(values) for key, values in _flat(table.get("settings", {}))},
        seeds=tuple(table["seeds"]) or (0,),
        protocol=protocols.create(table["protocol"], table.get("protocol_settings", {})),
        baseline=table["baseline"],
    )


def _recipe(here: Path, recipe: str) -> Tables:
    file = here / recipe
    if not file.is_file():
        raise FileNotFoundError(f"recipe is {recipe!r}; {file} does not exist")
    return read(file, "a recipe")


def _problems(table: Tables) -> Iterator[str]:
    """Yield everything that is wrong with the content of a file."""
    for key in table:
        if key not in KEYS:
            yield f"unknown key {key}{nearest(key, KEYS)}; allowed are {', '.join(KEYS)}"
    name, baseline = table["name"], table["baseline"]
    if not isinstance(name, str) or not name or Path(name).name != name or name.startswith("."):
        yield f"name is {name!r}; it must be a folder name"
    if not isinstance(baseline, bool):
        yield f"baseline is {baseline!r}; it must be true or false"
    tables: dict[str, Tables] = {}
    for key in ("protocol_settings", "changes", "settings", "losses", "networks", "data"):
        tables[key] = table.get(key, {})
        if not isinstance(tables[key], Mapping):
            yield f"{key} is {tables[key]!r}; it must be a table, [{key}]"
            tables[key] = {}
    try:
        protocols.create(table["protocol"], tables["protocol_settings"])
    except (TypeError, ValueError) as error:
        yield str(error)
    parts = [*_part_problems("recipe", table["recipe"]), *_part_problems("changes", tables["changes"])]
    yield from parts
    split = {} if parts else apply(table["recipe"], tables["changes"]).get("split", {})
    for key, value in split.items():
        if key != "name" or value != table["protocol"]:
            yield (
                f"protocol is {table['protocol']!r}, but the recipe has split.{key} {value!r}; protocol and "
                "protocol_settings define the split, so remove it from the recipe"
            )
    if not tables["losses"]:
        yield "losses is missing; at least one [losses.LABEL] is required"
    for key in ("losses", "networks", "data"):
        for label, changes in tables[key].items():
            yield from _label_problems(f"{key}.{label}", label, changes, None if key == "losses" else tables["losses"])
    for key, low in (("dims", 1), ("seeds", 0)):
        yield from _number_problems(key, table.get(key, ()), low)
    for key, values in _flat(tables["settings"]):
        yield from _setting_problems(key, values)


def _part_problems(where: str, changes: Any) -> Iterator[str]:
    """Yield what is wrong with a table of sections of a recipe."""
    if not isinstance(changes, Mapping):
        yield f"{where} is {changes!r}; it must be a table with sections of a recipe"
        return
    for part, content in changes.items():
        if part not in PARTS:
            yield f"{where}: unknown section {part}{nearest(part, PARTS)}; allowed are {', '.join(PARTS)}"
        elif part != "stages" and not isinstance(content, Mapping):
            yield f"{where}.{part} is {content!r}; it must be a table, as in {part}.name = …"


def _label_problems(where: str, label: str, changes: Any, losses: Tables | None) -> Iterator[str]:
    """Yield what is wrong with a label of an axis; with ``losses``, it may contain changes for single losses."""
    if label == FROZEN:
        yield f"{where}: {FROZEN!r} is the label of the baseline; choose another one"
    if not isinstance(changes, Mapping):
        yield f"{where} is {changes!r}; it must be a table, [{where}]"
        return
    if losses is None:
        yield from _part_problems(where, changes)
        loss = changes.get("loss", {})
        if isinstance(loss, Mapping) and "name" not in loss and (not changes or loss) and not _loss_of(label):
            word = _first_word(label)
            yield f"losses.{label}: there is no loss {word!r}{nearest(word, loss_registry.names())}; set loss.name"
        return
    yield from _part_problems(where, {part: one for part, one in changes.items() if part != "losses"})
    inner = changes.get("losses", {})
    if not isinstance(inner, Mapping):
        yield f"{where}.losses is {inner!r}; it must be a table, [{where}.losses.LABEL]"
        return
    for own, content in inner.items():
        if own not in losses:
            yield f"{where}.losses.{own}: no loss has this label{nearest(own, losses)}"
        yield from _part_problems(f"{where}.losses.{own}", content)


def _number_problems(key: str, values: Any, low: int) -> Iterator[str]:
    if not isinstance(values, (list, tuple)):
        yield f"{key} is {values!r}; it must be a list of integers"
        return
    for each in values:
        try:
            whole(key, each, low=low)
        except (TypeError, ValueError) as error:
            yield str(error)
    if any(values.count(each) > 1 for each in values):
        yield f"{key} is {list(values)}; numbers must be different"


def _setting_problems(key: str, values: Any) -> Iterator[str]:
    section = key.partition(".")[0]
    if section not in SECTIONS or section == key:
        known = ", ".join(f"{one}.…" for one in SECTIONS)
        yield f"settings.{key} is not a key of a recipe{nearest(section, SECTIONS)}; allowed are {known}"
    elif key in OWN_AXES:
        yield f"settings.{key} is not allowed; use {OWN_AXES[key]} of the grid instead"
    elif not isinstance(values, (list, tuple)) or not values:
        yield f"settings.{key} is {values!r}; it must be a list of values"
    elif any(values.count(each) > 1 for each in values):
        yield f"settings.{key} is {values!r}; values must be different"


def _flat(settings: Tables, above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield settings by key of the recipe: {"loss": {"alpha": [2, 4]}} gives ("loss.alpha", [2, 4])."""
    for word, values in settings.items():
        if isinstance(values, Mapping):
            yield from _flat(values, f"{above}{word}.")
        else:
            yield f"{above}{word}", values


def _first_word(label: str) -> str:
    return re.split(r"\W", label)[0]


def _loss_of(label: str) -> str | None:
    """Return the loss that a label begins with: "raw+hard" stands for "raw"."""
    word = _first_word(label)
    return word if word in loss_registry.names() else None


def _named(label: str, changes: Tables) -> Tables:
    """Add the name of the loss to its changes, unless they have one or keep the loss of the recipe."""
    loss, name = changes.get("loss", {}), _loss_of(label)
    return changes if "name" in loss or name is None else {**changes, "loss": {"name": name, **loss}}
