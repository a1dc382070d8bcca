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
    >>> list(grid.losses), grid.dims, grid.seeds, grid.protocol
    (['raw', 'sharp'], (16, 32), (0,), 'standard')
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field
from typing_extensions import TypedDict

from nearfar import losses as loss_registry
from nearfar.training.recipe.checks import read_section
from nearfar.training.recipe.files import RecipeError, apply, inherited, section_tables
from nearfar.training.recipe.schema import SECTIONS, Count, Fraction, Index, Section, SplitSection, file_schema
from nearfar.utils import shipped
from nearfar.utils.shipped import read
from nearfar.utils.validation import listed, nearest

Tables = Mapping[str, Any]
Values = Annotated[tuple[Any, ...], Field(min_length=1)]
FROZEN = "frozen"  # label of the baseline
REALITY_CHECK = "reality_check"  # the protocol of Musgrave et al. 2020, with its folds and reproductions
FOLDS, REPRODUCTIONS = 4, 10
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
_CLOSED = ConfigDict(extra="forbid", strict=True)


class Changes(TypedDict, total=False):
    """Sections of a recipe, with the keys that are set."""

    __pydantic_config__ = _CLOSED  # type: ignore[misc]
    data: dict[str, Any]
    split: dict[str, Any]
    sampler: dict[str, Any]
    augmentation: dict[str, Any]
    network: dict[str, Any]
    loss: dict[str, Any]
    optimizer: dict[str, Any]
    schedule: dict[str, Any]
    training: dict[str, Any]
    evaluation: dict[str, Any]
    selection: dict[str, Any]
    stages: list[dict[str, Any]]
    tuning: dict[str, Any]


class AxisChanges(Changes, total=False):
    """Changes for a network or a dataset; ``losses`` has changes for one loss with it."""

    __pydantic_config__ = _CLOSED  # type: ignore[misc]
    losses: dict[str, Changes]


class ProtocolSettings(TypedDict, total=False):
    """Settings of an evaluation protocol, as in [split] of a recipe."""

    __pydantic_config__ = _CLOSED  # type: ignore[misc]
    share: Fraction
    folds: Annotated[int, Field(ge=2)]
    seed: Index


class GridError(RecipeError):
    """A grid with problems; the message names the file and has a line for each problem."""


class Grid(Section):
    """A comparison: every loss with every network, dimension, dataset, setting and seed."""

    section = "grid"
    name: str = ""
    """Name of the grid and of its folder; that of the file if not given."""
    recipe: Changes = Field(default_factory=Changes)
    """Sections of the recipe that all cells share; in a file also the path of a recipe, relative to the grid."""
    changes: Changes = Field(default_factory=Changes)
    """Changes to that recipe for all cells."""
    protocol: Literal["standard", "fixed_validation", "k_fold", "reality_check"] = "standard"
    """Evaluation protocol; all share the same test classes. "standard": the last epoch is tested; "fixed_validation": a
    share of the training classes selects the epoch to test; "k_fold": the training classes take turns to validate, each
    fold is a run, and the result is the mean of their tests; "reality_check": four folds and, unless seeds are given,
    ten seeds (Musgrave et al. 2020)."""
    protocol_settings: ProtocolSettings = Field(default_factory=ProtocolSettings)
    """Settings of the protocol."""
    baseline: bool = True
    """Whether features without training are measured as well."""
    seeds: Annotated[tuple[Index, ...], Field(min_length=1)] = (0,)
    """Seeds of the training."""
    losses: dict[str, Changes] = Field(default_factory=dict)
    """Changes by label of the loss: [loss], and other sections where the loss needs them."""
    networks: dict[str, AxisChanges] = Field(default_factory=dict)
    """Changes by label of the network."""
    dims: tuple[Count, ...] = ()
    """Dimensions of the embeddings."""
    data: dict[str, AxisChanges] = Field(default_factory=dict)
    """Changes by label of the dataset."""
    settings: dict[str, Values] = Field(default_factory=dict)
    """Values to compare by key of the recipe, "loss.alpha" = [2, 4], each with each."""

    def splits(self) -> list[tuple[int | None, dict[str, Any]]]:
        """Return the fold (None without folds) and the section [split] of each run of a result."""
        folds = {"folds": FOLDS} if self.protocol == REALITY_CHECK else {}
        split = SplitSection.model_validate({"name": self._split, **folds, **self.protocol_settings})
        if split.name != "k_fold":
            return [(None, section_tables(split))]
        return [(fold, {**section_tables(split), "fold": fold}) for fold in range(split.folds)]

    @property
    def _split(self) -> str:
        """The name of the split of recipes."""
        return "k_fold" if self.protocol == REALITY_CHECK else self.protocol

    def conflicts(self) -> Iterator[str]:
        if not self.name or Path(self.name).name != self.name or self.name.startswith("."):
            yield f"name is {self.name!r}; allowed: a folder name"
        for key in self.protocol_settings:
            if SplitSection.is_foreign(self._split, key):
                has = ", ".join(SplitSection.keys[self._split]) or "no settings"
                yield f"protocol_settings.{key} is set, and protocol is {self.protocol!r}, which has {has}"
        for key, value in apply(self.recipe, self.changes).get("split", {}).items():
            if key != "name" or value != self._split:
                yield (
                    f"protocol is {self.protocol!r}, but the recipe has split.{key} {value!r}; protocol and "
                    "protocol_settings define the split, so remove it from the recipe"
                )
        if not self.losses:
            yield "losses is missing; at least one [losses.LABEL] is required"
        axes: dict[str, Mapping[str, Any]] = {"losses": self.losses, "networks": self.networks, "data": self.data}
        for axis, labels in axes.items():
            for label, changes in labels.items():
                yield from self._label_conflicts(axis, label, changes)
        for key, numbers in (("dims", self.dims), ("seeds", self.seeds)):
            if len(set(numbers)) < len(numbers):
                yield f"{key} is {list(numbers)}; numbers must be different"
        for key, values in self.settings.items():
            yield from _setting_conflicts(key, values)

    def _label_conflicts(self, axis: str, label: str, changes: Tables) -> Iterator[str]:
        if label == FROZEN:
            yield f"{axis}.{label}: {FROZEN!r} is the label of the baseline; choose another one"
        for own in changes.get("losses", {}):
            if own not in self.losses:
                yield f"{axis}.{label}.losses.{own}: no loss has this label{nearest(own, self.losses)}"
        loss = changes.get("loss", {})
        if axis == "losses" and "name" not in loss and (not changes or loss) and not _loss_of(label):
            word = _first_word(label)
            yield f"losses.{label}: there is no loss {word!r}{nearest(word, loss_registry.names())}; set loss.name"


def load(grid: str | Path | Tables | Grid) -> Grid:
    """Read a grid from a TOML file, by name, or from the content of a file.

    Args:
        grid: The file, or the name of a grid that comes with nearfar. Its ``recipe`` is a table, or the path of a
            recipe relative to the folder of the grid; ``changes`` are applied to it for all cells.

    Raises:
        GridError: If the file is invalid; all problems are named.
    """
    if isinstance(grid, Grid):
        return grid
    if isinstance(grid, Mapping):
        return _read(grid, Path(), "")
    file = shipped.find(grid, "grid")
    table = read(file, "a grid", GridError)
    try:
        return _read(table, file.parent, file.stem)
    except (TypeError, ValueError) as error:
        raise GridError(f"{file}: {error}", getattr(error, "problems", ())) from None


def to_toml(grid: Grid) -> str:
    """Return a grid as TOML that ``load`` reads and that refers to no other file."""
    import tomli_w

    return tomli_w.dumps({key: value for key, value in grid.model_dump().items() if value not in ({}, ())})


def json_schema() -> dict[str, Any]:
    """Return a JSON schema of grids, for editors."""
    schema = Grid.model_json_schema()
    properties = schema["properties"]
    properties["recipe"] = {"anyOf": [{"type": "string"}, properties["recipe"]]}
    # Keys may also be written as tables: [settings.loss] alpha = [2, 4].
    properties["settings"]["additionalProperties"] = {"type": ["array", "object"]}
    return file_schema(schema, "nearfar grid")


def _read(table: Tables, here: Path, name: str) -> Grid:
    table = {"name": name, **table}
    if table.get("protocol") == REALITY_CHECK:
        table = {"seeds": tuple(range(REPRODUCTIONS)), **table}
    if isinstance(table.get("recipe"), str):
        file = here / table["recipe"]
        if not file.is_file():
            raise FileNotFoundError(f"recipe is {table['recipe']!r}; {file} does not exist")
        table["recipe"] = inherited(file)
    if isinstance(table.get("settings"), Mapping):
        table["settings"] = dict(_flat(table["settings"]))
    found, problems, _ = read_section(Grid, "", table, owner="a grid")
    if found is None or problems:
        raise GridError(listed(problems), tuple(problems))
    losses = {label: _named(label, changes) for label, changes in found.losses.items()}
    recipe = apply(found.recipe, found.changes)
    return found.model_copy(update={"recipe": recipe, "changes": {}, "losses": losses})


def _setting_conflicts(key: str, values: tuple[Any, ...]) -> Iterator[str]:
    section = key.partition(".")[0]
    if section not in SECTIONS or section == key:
        known = ", ".join(f"{one}.…" for one in SECTIONS)
        yield f"settings.{key} is not a key of a recipe{nearest(section, SECTIONS)}; allowed: {known}"
    elif key in OWN_AXES:
        yield f"settings.{key} is not allowed; use {OWN_AXES[key]} of the grid instead"
    elif key.rpartition(".")[2] == "seed":
        yield f"settings.{key} is not allowed: a seed is chance, and no value of it is better; use protocol_settings"
    elif any(values.count(each) > 1 for each in values):
        yield f"settings.{key} is {list(values)}; values must be different"


def _flat(settings: Tables, above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield settings by key of the recipe: {"loss": {"alpha": [2, 4]}} gives ("loss.alpha", (2, 4))."""
    for word, values in settings.items():
        if isinstance(values, Mapping):
            yield from _flat(values, f"{above}{word}.")
        else:
            yield f"{above}{word}", tuple(values) if isinstance(values, list) else values


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
