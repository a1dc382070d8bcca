"""Cells: what a grid comes down to, one run each, known by its content."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nearfar.bench.grid import FROZEN, Grid, Tables
from nearfar.data.registry import takes_root
from nearfar.settings import nearest
from nearfar.training.recipe import Recipe
from nearfar.training.recipe_file import RecipeError, load, to_dict
from nearfar.training.recipe_overrides import Overrides, apply
from nearfar.training.run import FREE

SHOWN = 8  # digits of a key in the name of a folder
MEASURED = ("data", "split", "augmentation", "network", "evaluation")  # what features depend on that nobody trains


@dataclass(frozen=True)
class Cell:
    """One run of a grid.

    Parameters
        key      digest of everything that can change its number.
        name     readable: its labels.
        labels   by axis: "loss", and where the grid has them "network", "dim", "data", "fold", "seed".
        recipe   what to train; for the baseline, what it is compared with.
        what     "train", or "frozen" for features without training.
    """

    key: str
    name: str
    labels: Mapping[str, str]
    recipe: Recipe
    what: str = "train"

    @property
    def folder(self) -> str:
        """The name of its run folder."""
        return f"{self.name}-{self.key[:SHOWN]}"


def expand(grid: Grid, *, overrides: Overrides = (), roots: Sequence[str] = ()) -> list[Cell]:
    """All cells of a grid, baselines first, and then seed after seed.

    Parameters
        overrides   changes to every cell, as for ``nearfar.training.load_recipe``.
        roots       where data lies: "PLACE" for all data sets that need one, or "LABEL=PLACE".

    >>> from nearfar.bench.grid import load as grid
    >>> recipe = {"sampler": {"classes": 4, "per_class": 8}, "network": {"name": "mlp"}, "optimizer": {"lr": 1e-3},
    ...     "training": {"epochs": 5}}
    >>> [cell.name for cell in expand(grid({"name": "g", "recipe": recipe, "losses": {"raw": {}}, "seeds": [0, 1]}))]
    ['frozen-seed0', 'frozen-seed1', 'raw-seed0', 'raw-seed1']
    """
    cells = [*_baselines(grid, overrides, roots), *_trained(grid, overrides, roots)]
    seen: dict[str, Cell] = {}
    for cell in cells:
        if cell.key in seen:
            raise ValueError(f"the cells {seen[cell.key].name} and {cell.name} are the same; leave one of them out")
        seen[cell.key] = cell
    return cells


def choose(cells: Sequence[Cell], labels: Sequence[str]) -> list[Cell]:
    """The cells with some labels: of each axis that one of them names, any of those named."""
    axes: dict[str, set[str]] = {}
    for label in labels:
        of = {axis for cell in cells for axis, own in cell.labels.items() if own == label}
        of |= {"name" for cell in cells if label in (cell.name, cell.folder)}
        if not of:
            known = sorted({own for cell in cells for own in cell.labels.values()})
            raise ValueError(f"only is {label!r}{nearest(label, known)}; the labels are {', '.join(known)}")
        axes.setdefault(sorted(of)[0], set()).add(label)
    names = axes.pop("name", None)
    chosen = [cell for cell in cells if all(cell.labels.get(axis) in wanted for axis, wanted in axes.items())]
    return chosen if names is None else [cell for cell in chosen if {cell.name, cell.folder} & names]


def _trained(grid: Grid, overrides: Overrides, roots: Sequence[str]) -> Iterator[Cell]:
    for tables, labels in _frames(grid):
        for loss, changes in grid.losses.items():
            inner = [grid.networks.get(labels.get("network", ""), {}), grid.data.get(labels.get("data", ""), {})]
            steps = [changes, *(axis.get("losses", {}).get(loss, {}) for axis in inner)]
            full = _changed(tables, *steps, _last(labels))
            own = {"loss": loss, **labels}
            recipe = _recipe(full, own, overrides, roots)
            yield Cell(_key(recipe, "train", labels), _name(own), own, recipe)


def _baselines(grid: Grid, overrides: Overrides, roots: Sequence[str]) -> Iterator[Cell]:
    """Features without training: one for each network, dimension and data set; of random weights, for each seed."""
    if not grid.baseline:
        return
    for tables, labels in _frames(grid):
        # The network as all losses have it; what is there to train it only makes a recipe whole.
        first = _changed(tables, next(iter(grid.losses.values())))
        shared = {section: tables[section] for section in MEASURED if section in tables}
        own = {"loss": FROZEN, **labels}
        recipe = _recipe(_changed({**first, **shared}, _last(labels)), own, overrides, roots)
        again = int(labels["seed"]) != grid.seeds[0] and recipe.network.pretrained is not False
        if labels.get("fold", "0") == "0" and not again:
            yield Cell(_key(recipe, FROZEN, labels), _name(own), own, recipe, FROZEN)


def _frames(grid: Grid) -> Iterator[tuple[Tables, dict[str, str]]]:
    """Everything but the loss: tables so far, and labels."""
    nothing: Mapping[str, Tables] = {"": {}}
    axes = grid.seeds, grid.data or nothing, grid.networks or nothing, grid.dims or ("",), grid.protocol.splits()
    for seed, data, network, dim, (fold, split) in itertools.product(*axes):
        labels = {"network": network, "dim": str(dim), "data": data, "fold": "" if fold is None else str(fold)}
        labels = {axis: label for axis, label in labels.items() if label} | {"seed": str(seed)}
        changes = [grid.data.get(data, {}), grid.networks.get(network, {})]
        plain = ({part: one for part, one in each.items() if part != "losses"} for each in changes)
        yield _changed(grid.recipe, {"split": split}, *plain), labels


def _last(labels: Mapping[str, str]) -> Tables:
    """What the axes of numbers set."""
    changes: dict[str, Any] = {"training": {"seed": int(labels["seed"])}}
    if "dim" in labels:
        changes["network"] = {"dim": int(labels["dim"])}
    return changes


def _changed(tables: Tables, *changes: Tables) -> Tables:
    for each in changes:
        tables = apply(tables, each)
    return tables


def _recipe(tables: Tables, labels: Mapping[str, str], overrides: Overrides, roots: Sequence[str]) -> Recipe:
    name = _name(labels)
    try:
        tables = apply(tables, overrides)
        section = tables.get("data", {})
        root = _root(str(section.get("name", "digits")), labels, roots)
        return load(apply(tables, {"data.root": root}) if root else tables)
    except RecipeError as error:
        raise RecipeError(f"cell {name}: {error}") from None


def _root(name: str, labels: Mapping[str, str], roots: Sequence[str]) -> str | list[str] | None:
    """Where the data of a cell lies, if it was said."""
    if takes_root(name) is None:
        return None
    found, own = [], []
    for entry in roots:
        label, equals, place = entry.partition("=")
        if not equals:
            found.append(entry)
        elif label in (labels.get("data"), name):
            own.append(place)
    places = own or found
    return (places[0] if len(places) == 1 else places) or None


def _key(recipe: Recipe, what: str, labels: Mapping[str, str]) -> str:
    """Digest of all that can change a number. Where data lies cannot, but its label tells apart what is elsewhere."""
    tables: dict[str, Any] = to_dict(recipe)
    for path in FREE:
        section, _, key = path.partition(".")
        tables[section].pop(key, None)
    if what == FROZEN:
        kept = ("precision",) if recipe.network.pretrained is not False else ("precision", "seed")
        training = {key: tables["training"][key] for key in kept}
        tables = {section: tables[section] for section in MEASURED} | {"training": training}
    content = {"what": what, "data": labels.get("data"), "recipe": tables}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _name(labels: Mapping[str, str]) -> str:
    """All labels in one word that a folder can have.

    >>> _name({"loss": "raw+valid_triplet", "dim": "64", "seed": "1"})
    'raw+valid_triplet-64d-seed1'
    """
    forms = {"dim": "{}d", "fold": "fold{}", "seed": "seed{}"}
    words = (forms.get(axis, "{}").format(label) for axis, label in labels.items())
    return re.sub(r"[^\w.+-]+", "-", "-".join(words))
