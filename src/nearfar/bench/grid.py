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

import hashlib
import itertools
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field
from typing_extensions import TypedDict

from nearfar import losses as loss_registry
from nearfar import networks
from nearfar.data.datasets import base as datasets
from nearfar.training.recipe import checks
from nearfar.training.recipe.files import (
    Overrides,
    RecipeError,
    apply,
    inherited,
    parse_override,
    section_tables,
    to_dict,
)
from nearfar.training.recipe.files import load as load_recipe
from nearfar.training.recipe.schema import SECTIONS, Count, Fraction, Index, Recipe, Section, SplitSection, file_schema
from nearfar.training.run.folder import FREE, LogLine, RunError, RunFolder, RunTable, parse
from nearfar.training.run.provenance import CELLS
from nearfar.utils import plugins, shipped
from nearfar.utils.folders import read_table
from nearfar.utils.shipped import read
from nearfar.utils.validation import listed, nearest

Tables = Mapping[str, Any]
Values = Annotated[tuple[Any, ...], Field(min_length=1)]
FROZEN = "frozen"  # label of the baseline
OUT = Path("bench")  # folder of the folders of grids
KEY_DIGITS = 8  # of a key in a folder name
TAIL = 20_000  # bytes read from the end of a log or an output
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
FEATURE_SECTIONS = ("data", "augmentation", "network", "evaluation")  # of a recipe, that untrained features depend on
BASELINE_SECTIONS = (*FEATURE_SECTIONS, "split")  # and that their metrics depend on
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


@dataclass(eq=False)
class Cell:
    """One run of a grid.

    Args:
        key: Digest of everything that can change its result.
        name: Its labels, joined.
        labels: Labels by axis: "loss", "seed", and where the grid has them "network", "dim", "data", "fold" and keys of
            the recipe such as "loss.alpha".
        recipe: The recipe to train; for a baseline, the recipe of the runs it is compared with.
        is_baseline: Whether its features are measured without training.
        folder: Its run folder.
        state: "finished", "begun" (by an earlier call), "new", "running", "stopped" or "failed".
        error: Why it failed, in one line.
    """

    key: str
    name: str
    labels: Mapping[str, str]
    recipe: Recipe
    is_baseline: bool
    folder: Path
    state: str = "new"
    error: str = ""

    @property
    def grid(self) -> Path:
        """The folder of its grid."""
        return self.folder.parents[1]

    @property
    def output(self) -> Path:
        """The file with the output of its process."""
        return self.grid / "output" / f"{self.folder.name}.txt"

    def metrics(self) -> dict[str, Any]:
        """The metrics of a finished cell; an empty dictionary otherwise."""
        return read_table(RunFolder(self.folder).metrics) if self.state == "finished" else {}

    def score_text(self) -> str | None:
        """recall@1 in percent: of the test classes, else of the validation classes, else None."""
        metrics = self.metrics()
        for part, suffix in (("test", ""), ("validation", " (validation)")):
            if (score := metrics.get(part, {}).get("recall@1")) is not None:
                return f"{100 * score:.2f}{suffix}"
        return None

    def steps(self) -> tuple[int, int] | None:
        """The steps done and the steps in all, or None while they are unknown."""
        run = RunFolder(self.folder)
        try:
            total = parse(run.manifest, run.manifest.read_bytes(), RunTable).get("length", {}).get("steps")
            lines = tail(run.log)
            return (int(parse(run.log, lines[-1], LogLine).get("step", 0)), int(total)) if total and lines else None
        except (OSError, RunError):
            return None


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
        for loss_label in changes.get("losses", {}):
            if loss_label not in self.losses:
                yield f"{axis}.{label}.losses.{loss_label}: no loss has this label{nearest(loss_label, self.losses)}"
        loss = changes.get("loss", {})
        word = re.split(r"\W", label)[0]
        if axis == "losses" and "name" not in loss and (not changes or loss) and word not in loss_registry.names():
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
        values = flat(table["settings"])
        table["settings"] = {
            key: tuple(choices) if isinstance(choices, list) else choices for key, choices in values.items()
        }
    checked, problems = checks.read(Grid, table, owner="a grid")
    if checked is None:
        raise GridError(listed(problems), tuple(problems))
    losses: dict[str, Tables] = {}
    for label, changes in checked.losses.items():
        loss, word = changes.get("loss", {}), re.split(r"\W", label)[0]  # "raw+hard" stands for "raw"
        named = "name" in loss or word not in loss_registry.names()
        losses[label] = changes if named else {**changes, "loss": {"name": word, **loss}}
    recipe = apply(checked.recipe, checked.changes)
    return checked.model_copy(update={"recipe": recipe, "changes": {}, "losses": losses})


def _setting_conflicts(key: str, values: tuple[Any, ...]) -> Iterator[str]:
    section = key.partition(".")[0]
    if section not in SECTIONS or section == key:
        known = ", ".join(f"{name}.…" for name in SECTIONS)
        yield f"settings.{key} is not a key of a recipe{nearest(section, SECTIONS)}; allowed: {known}"
    elif key in OWN_AXES:
        yield f"settings.{key} is not allowed; use {OWN_AXES[key]} of the grid instead"
    elif key.rpartition(".")[2] == "seed":
        yield f"settings.{key} is not allowed: a seed is chance, and no value of it is better; use protocol_settings"
    elif any(values.count(value) > 1 for value in values):
        yield f"settings.{key} is {list(values)}; values must be different"


def flat(table: Tables, above: str = "") -> dict[str, Any]:
    """Values by dotted key: {"loss": {"alpha": [2, 4]}} gives {"loss.alpha": [2, 4]}."""
    flattened: dict[str, Any] = {}
    for word, value in table.items():
        flattened |= flat(value, f"{above}{word}.") if isinstance(value, Mapping) else {f"{above}{word}": value}
    return flattened


def tail(file: Path) -> list[bytes]:
    """The last complete lines of a file, the first of which may be cut; none if there is no such file."""
    try:
        with open(file, "rb") as content:
            content.seek(max(0, os.path.getsize(file) - TAIL))
            return [line for line in content.read().splitlines(keepends=True) if line.endswith(b"\n")]
    except OSError:
        return []


def expand(
    grid: Grid,
    *,
    overrides: Overrides = (),
    roots: Sequence[str] = (),
    only: Sequence[str] = (),
    out: str | Path = OUT,
) -> list[Cell]:
    """Return the cells of a grid: baselines first, then seed by seed."""
    changes = overrides if isinstance(overrides, Mapping) else dict(map(parse_override, overrides))
    _check_changes(grid, changes)
    for entry in roots:
        label, equals, _ = entry.partition("=")
        known = [*grid.data, *datasets.names()]
        if equals and label not in known:
            raise ValueError(f"data is {entry!r}; the grid has no dataset {label!r}{nearest(label, known)}")
    drafts = _only([*(_baselines(grid) if grid.baseline else ()), *_trained(grid)], only)
    cells: dict[int, Cell] = {}
    # Trained cells first: an error in a loss should name its own cell, not the baseline.
    for at in sorted(range(len(drafts)), key=lambda at: drafts[at][0]["loss"] == FROZEN):
        cells[at] = _cell(*drafts[at], changes, roots, Path(out) / grid.name / CELLS)
    by_key: dict[str, Cell] = {}
    for _, cell in sorted(cells.items()):
        if cell.key in by_key and cell.is_baseline:
            continue  # pretrained weights do not depend on the seed
        if cell.key in by_key:
            raise ValueError(f"cells {by_key[cell.key].name} and {cell.name} are identical; remove one of them")
        by_key[cell.key] = cell
    return list(by_key.values())


def _check_changes(grid: Grid, changes: Tables) -> None:
    """Refuse changes of keys that an axis or the protocol sets: labels of cells would be wrong."""
    axes = {"loss.name": "losses", "split": "protocol", "training.seed": "seeds"}
    axes |= {"network.dim": "dims"} if grid.dims else {}
    axes |= {"network.name": "networks"} if grid.networks else {}
    axes |= {"data.name": "data"} if grid.data else {}
    axes |= dict.fromkeys(grid.settings, "settings")
    for key in flat(changes):
        for place, axis in axes.items():
            if key == place or key.startswith(f"{place}."):
                raise ValueError(f"{key} cannot be set for all cells: {axis} of the grid defines it")


Draft = tuple[dict[str, str], Tables]  # labels and tables of a cell


def _only(drafts: Sequence[Draft], only: Sequence[str]) -> list[Draft]:
    """The cells with the given labels, one of each axis that is named."""
    axes: dict[str, set[str]] = {}
    for label in only:
        every = [pair for labels, _ in drafts for pair in labels.items()]
        axis_of = {axis: value for axis, value in every if label in (value, _word(axis, value))}
        if label in [_name(labels) for labels, _ in drafts]:
            axis_of[""] = label
        if not axis_of:
            known = sorted({value for _, value in every})
            raise ValueError(f"only is {label!r}{nearest(label, known)}; the labels are {', '.join(map(repr, known))}")
        if len(axis_of) > 1:
            clear = " or ".join(_word(axis, value) for axis, value in axis_of.items())
            raise ValueError(f"only is {label!r}, which is both a {' and a '.join(axis_of)}; use {clear}")
        for axis, value in axis_of.items():
            axes.setdefault(axis, set()).add(value)
    return [
        (labels, tables)
        for labels, tables in drafts
        if all({**labels, "": _name(labels)}.get(axis) in wanted for axis, wanted in axes.items())
    ]


def _cell(labels: dict[str, str], tables: Tables, changes: Tables, roots: Sequence[str], place: Path) -> Cell:
    name, is_baseline = _name(labels), labels["loss"] == FROZEN
    if is_baseline:  # untrained features do not depend on the other sections
        kept = (*BASELINE_SECTIONS, "training")
        changes = {key: value for key, value in changes.items() if key.partition(".")[0] in kept}
    try:
        tables = apply(tables, changes)
        root = _root(str(tables.get("data", {}).get("name", "digits")), labels, roots)
        recipe = load_recipe(apply(tables, {"data.root": root}) if root else tables)
    except RecipeError as error:
        raise RecipeError(f"cell {name}: {error}", tuple(f"cell {name}: {line}" for line in error.problems)) from None
    key = _key(recipe, labels, is_baseline=is_baseline)
    return Cell(key, name, labels, recipe, is_baseline, place / f"{name}-{key[:KEY_DIGITS]}")


def _trained(grid: Grid) -> Iterator[Draft]:
    for tables, labels, last in _frames(grid, grid.settings):
        for loss, changes in grid.losses.items():
            inner = [grid.networks.get(labels.get("network", ""), {}), grid.data.get(labels.get("data", ""), {})]
            steps = [changes, *(axis.get("losses", {}).get(loss, {}) for axis in inner)]
            yield {"loss": loss, **labels}, _changed(tables, *steps, last)


def _baselines(grid: Grid) -> Iterator[Draft]:
    """Yield a baseline for each network, dimension and dataset; with random weights, for each seed as well."""
    seen = {key: values for key, values in grid.settings.items() if key.partition(".")[0] in FEATURE_SECTIONS}
    for tables, labels, last in _frames(grid, seen):
        # The network that all losses share; the sections that only training needs complete the recipe.
        first = _changed(tables, next(iter(grid.losses.values())))
        shared = {section: tables[section] for section in BASELINE_SECTIONS if section in tables}
        random = shared.get("network", {}).get("pretrained", False) is False
        if labels.get("fold", "0") == "0" and (random or int(labels["seed"]) == grid.seeds[0]):
            yield {"loss": FROZEN, **labels}, _changed({**first, **shared}, last)


def _frames(grid: Grid, settings: Mapping[str, Sequence[Any]]) -> Iterator[tuple[Tables, dict[str, str], Tables]]:
    """Yield all combinations of axes but the loss: tables, labels, and changes to apply after those of the loss."""
    nothing: Mapping[str, Tables] = {"": {}}
    axes = grid.seeds, grid.data or nothing, grid.networks or nothing, grid.dims or (None,), grid.splits()
    for seed, data, network, dim, (fold, split), *values in itertools.product(*axes, *settings.values()):
        chosen = dict(zip(settings, values, strict=True))
        numbers = {"dim": dim, "fold": fold, **chosen}
        labels = {"network": network, "data": data} | {axis: _text(value) for axis, value in numbers.items()}
        order = ("network", "dim", "data", "fold", *settings)
        labels = {axis: labels[axis] for axis in order if labels[axis]} | {"seed": str(seed)}
        changes = [grid.data.get(data, {}), grid.networks.get(network, {})]
        plain = ({part: keys for part, keys in tables.items() if part != "losses"} for tables in changes)
        last = {**chosen, "training.seed": seed} | ({} if dim is None else {"network.dim": dim})
        yield _changed(grid.recipe, {"split": split}, *plain), labels, last


def _text(value: Any) -> str:
    return "" if value is None else value if isinstance(value, str) else json.dumps(value)


def _changed(tables: Tables, *changes: Tables) -> Tables:
    for change in changes:
        tables = apply(tables, change)
    return tables


def _root(name: str, labels: Mapping[str, str], roots: Sequence[str]) -> str | list[str] | None:
    """Return the location of a cell's data, if one was given."""
    if datasets.takes_root(name) is None:
        return None
    entries = [entry.partition("=") for entry in roots]
    labeled = [root for label, equals, root in entries if equals and label in (labels.get("data"), name)]
    chosen = labeled or [root for root, equals, _ in entries if not equals]
    return (chosen[0] if len(chosen) == 1 else chosen) or None


def _key(recipe: Recipe, labels: Mapping[str, str], *, is_baseline: bool) -> str:
    """Return a digest of all that can change a result. The location of data cannot; its label stands for the data."""
    tables: dict[str, Any] = to_dict(recipe)
    for path in FREE:
        section, _, key = path.partition(".")
        tables[section].pop(key, None)
    if is_baseline:
        kept = ("precision",) if recipe.network.pretrained is not False else ("precision", "seed")
        training = {key: tables["training"][key] for key in kept}
        tables = {section: tables[section] for section in BASELINE_SECTIONS} | {"training": training}
    # The user's files that define the loss, the network or the dataset.
    sections = [recipe.loss, *(stage.loss for stage in recipe.stages if stage.loss is not None)]
    things: list[object] = [datasets.get(recipe.data.name)]
    things += [networks.get(recipe.network.name)] if recipe.network.name in networks.names() else []
    things += [] if is_baseline else [loss_registry.get(name) for section in sections for name in section.names]
    code = sorted({digest for thing in things if (digest := plugins.digest(thing))})
    content = {"baseline": is_baseline, "data": labels.get("data"), "recipe": tables, "code": code}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _word(axis: str, label: str) -> str:
    """Return a label as it is written in the name of a cell."""
    if "." in axis:
        return f"{axis.rpartition('.')[2]}={label}"
    return {"dim": f"{label}d", "fold": f"fold{label}", "seed": f"seed{label}"}.get(axis, label)


def _name(labels: Mapping[str, str]) -> str:
    """Return all labels joined to a folder name, such as "raw+valid_triplet-64d-seed1"."""
    words = (_word(axis, label) for axis, label in labels.items())
    return re.sub(r"[^\w.+-]+", "-", "-".join(words))
