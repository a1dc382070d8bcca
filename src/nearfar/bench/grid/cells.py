"""Cells: what a grid comes down to, one run each, known by its content."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from nearfar import losses, networks
from nearfar.bench.grid.grid import FROZEN, Grid, Tables
from nearfar.data.datasets import registry as data_sets
from nearfar.training.recipe.files import RecipeError, load, to_dict
from nearfar.training.recipe.overrides import Overrides, apply, parse_override
from nearfar.training.recipe.schema import Recipe
from nearfar.training.run.folder import FREE
from nearfar.utils import plugins
from nearfar.utils.validation import nearest

SHOWN = 8  # digits of a key in the name of a folder
SEEN = ("data", "augmentation", "network", "evaluation")  # what features depend on that nobody trains
MEASURED = (*SEEN, "split")  # and on which classes they are measured


@dataclass(frozen=True)
class Cell:
    """One run of a grid.

    Args:
        key: Digest of everything that can change its number.
        name: Readable: its labels.
        labels: By axis: "loss", and where the grid has them "network", "dim", "data", "fold", keys of the recipe such
            as "loss.alpha", "seed".
        recipe: What to train; for the baseline, what it is compared with.
        what: "train", or "frozen" for features without training.
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


def expand(grid: Grid, *, overrides: Overrides = (), roots: Sequence[str] = (), only: Sequence[str] = ()) -> list[Cell]:
    """The cells of a grid, baselines first, and then seed after seed.

    Args:
        overrides: Changes to every cell, as for ``nearfar.training.load_recipe``.
        roots: Where data lies: "PLACE" for all data sets that need one, or "LABEL=PLACE".
        only: Labels, or names of cells: of each axis that one of them is on, only these; of the others, all.

    >>> from nearfar.bench.grid.grid import load as grid
    >>> recipe = {"sampler": {"classes": 4, "per_class": 8}, "network": {"name": "mlp"}, "optimizer": {"lr": 1e-3},
    ...     "training": {"epochs": 5}}
    >>> [cell.name for cell in expand(grid({"name": "g", "recipe": recipe, "losses": {"raw": {}}, "seeds": [0, 1]}))]
    ['frozen-seed0', 'frozen-seed1', 'raw-seed0', 'raw-seed1']
    """
    changes = overrides if isinstance(overrides, Mapping) else dict(map(parse_override, overrides))
    _check_changes(grid, changes)
    _check_roots(grid, roots)
    drafts = [*(_baselines(grid) if grid.baseline else ()), *_trained(grid)]
    chosen = _chosen(drafts, only)
    # What is wrong with a loss is told of its own cell, not of the baseline that stands before it.
    made = {id(draft): _cell(draft, changes, roots) for draft in sorted(chosen, key=lambda draft: draft.what == FROZEN)}
    seen: dict[str, Cell] = {}
    for cell in (made[id(draft)] for draft in chosen):
        if cell.key in seen and cell.what == FROZEN:
            continue  # of pretrained weights, whatever the seed
        if cell.key in seen:
            raise ValueError(f"the cells {seen[cell.key].name} and {cell.name} are the same; leave one of them out")
        seen[cell.key] = cell
    return list(seen.values())


def _check_changes(grid: Grid, changes: Mapping[str, Any]) -> None:
    """What an axis or the protocol sets cannot be set for all cells: their names would lie."""
    axes = {"loss.name": "losses", "split": "protocol", "training.seed": "seeds"}
    axes |= {"network.dim": "dims"} if grid.dims else {}
    axes |= {"network.name": "networks"} if grid.networks else {}
    axes |= {"data.name": "data"} if grid.data else {}
    axes |= dict.fromkeys(grid.settings, "settings")
    keys = [
        path
        for key, value in changes.items()
        for path in ([f"{key}.{inner}" for inner in value] if isinstance(value, Mapping) else [key])
    ]
    for key in keys:
        for place, axis in axes.items():
            if key == place or key.startswith(f"{place}."):
                raise ValueError(f"{key} cannot be set for all cells: the {axis} of the grid say it")


def _check_roots(grid: Grid, roots: Sequence[str]) -> None:
    for entry in roots:
        label, equals, _ = entry.partition("=")
        known = [*grid.data, *data_sets.names()]
        if equals and label not in known:
            raise ValueError(f"data is {entry!r}; {label} is no data set of the grid{nearest(label, known)}")


class _Draft(NamedTuple):
    """A cell before its recipe is read."""

    labels: dict[str, str]
    tables: Tables
    what: str = "train"


def _chosen(drafts: Sequence[_Draft], only: Sequence[str]) -> list[_Draft]:
    axes: dict[str, set[str]] = {}
    for label in only:
        labels = [each for draft in drafts for each in draft.labels.items()]
        of = {axis: own for axis, own in labels if label in (own, _word(axis, own))}
        if label in [_name(draft.labels) for draft in drafts]:
            of[""] = label
        if not of:
            known = sorted({own for draft in drafts for own in draft.labels.values()})
            raise ValueError(f"only is {label!r}{nearest(label, known)}; the labels are {', '.join(map(repr, known))}")
        if len(of) > 1:
            clear = " or ".join(_word(axis, own) for axis, own in of.items())
            raise ValueError(f"only is {label!r}, which is a {' and a '.join(of)}; say {clear}")
        for axis, own in of.items():
            axes.setdefault(axis, set()).add(own)

    def fits(draft: _Draft) -> bool:
        own = {**draft.labels, "": _name(draft.labels)}
        return all(own.get(axis) in wanted for axis, wanted in axes.items())

    return [draft for draft in drafts if fits(draft)]


def _cell(draft: _Draft, changes: Mapping[str, Any], roots: Sequence[str]) -> Cell:
    name = _name(draft.labels)
    if draft.what == FROZEN:  # what changes a loss is no matter of features that nobody trains
        changes = {key: value for key, value in changes.items() if key.partition(".")[0] in (*MEASURED, "training")}
    try:
        tables = apply(draft.tables, changes)
        root = _root(str(tables.get("data", {}).get("name", "digits")), draft.labels, roots)
        recipe = load(apply(tables, {"data.root": root}) if root else tables)
    except RecipeError as error:
        raise RecipeError(f"cell {name}: {error}") from None
    return Cell(_key(recipe, draft.what, draft.labels), name, draft.labels, recipe, draft.what)


def _trained(grid: Grid) -> Iterator[_Draft]:
    for tables, labels, last in _frames(grid, grid.settings):
        for loss, changes in grid.losses.items():
            inner = [grid.networks.get(labels.get("network", ""), {}), grid.data.get(labels.get("data", ""), {})]
            steps = [changes, *(axis.get("losses", {}).get(loss, {}) for axis in inner)]
            yield _Draft({"loss": loss, **labels}, _changed(tables, *steps, last))


def _baselines(grid: Grid) -> Iterator[_Draft]:
    """Features without training: one for each network, dimension and data set; of random weights, for each seed."""
    seen = {key: values for key, values in grid.settings.items() if key.partition(".")[0] in SEEN}
    for tables, labels, last in _frames(grid, seen):
        # The network as all losses have it; what is there to train it only makes a recipe whole.
        first = _changed(tables, next(iter(grid.losses.values())))
        shared = {section: tables[section] for section in MEASURED if section in tables}
        random = shared.get("network", {}).get("pretrained", False) is False
        if labels.get("fold", "0") == "0" and (random or int(labels["seed"]) == grid.seeds[0]):
            full = _changed({**first, **shared}, last)
            yield _Draft({"loss": FROZEN, **labels}, full, FROZEN)


def _frames(grid: Grid, settings: Mapping[str, Sequence[Any]]) -> Iterator[tuple[Tables, dict[str, str], Tables]]:
    """Everything but the loss: tables so far, labels, and what is set after the loss."""
    nothing: Mapping[str, Tables] = {"": {}}
    axes = grid.seeds, grid.data or nothing, grid.networks or nothing, grid.dims or (None,), grid.protocol.splits()
    for seed, data, network, dim, (fold, split), *values in itertools.product(*axes, *settings.values()):
        chosen = dict(zip(settings, values, strict=True))
        numbers = {"dim": dim, "fold": fold, **chosen}
        labels = {"network": network, "data": data} | {axis: _written(one) for axis, one in numbers.items()}
        order = ("network", "dim", "data", "fold", *settings)
        labels = {axis: labels[axis] for axis in order if labels[axis]} | {"seed": str(seed)}
        changes = [grid.data.get(data, {}), grid.networks.get(network, {})]
        plain = ({part: one for part, one in each.items() if part != "losses"} for each in changes)
        last = {**chosen, "training.seed": seed} | ({} if dim is None else {"network.dim": dim})
        yield _changed(grid.recipe, {"split": split}, *plain), labels, last


def _written(value: Any) -> str:
    return "" if value is None else value if isinstance(value, str) else json.dumps(value)


def _changed(tables: Tables, *changes: Tables) -> Tables:
    for each in changes:
        tables = apply(tables, each)
    return tables


def _root(name: str, labels: Mapping[str, str], roots: Sequence[str]) -> str | list[str] | None:
    """Where the data of a cell lies, if it was said."""
    if data_sets.takes_root(name) is None:
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
    # The key of the split rule when the first cells were trained: finished cells keep their digests.
    tables["split"]["kind"] = tables["split"].pop("name")
    for path in FREE:
        section, _, key = path.partition(".")
        tables[section].pop(key, None)
    if what == FROZEN:
        kept = ("precision",) if recipe.network.pretrained is not False else ("precision", "seed")
        training = {key: tables["training"][key] for key in kept}
        tables = {section: tables[section] for section in MEASURED} | {"training": training}
    content: dict[str, Any] = {"what": what, "data": labels.get("data"), "recipe": tables}
    if code := _own_code(recipe, what):
        content["code"] = code
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _own_code(recipe: Recipe, what: str) -> list[str]:
    """Digests of files of the user's own that hold the cell's loss, network or data set."""
    staged = [stage.loss.name for stage in recipe.stages if stage.loss is not None]
    things: list[object] = [data_sets.get(recipe.data.name)]
    things += [networks.get(recipe.network.name)] if recipe.network.name in networks.names() else []
    things += [losses.get(name) for name in (recipe.loss.name, *staged)] if what != FROZEN else []
    return sorted({found for thing in things if (found := plugins.digest(thing))})


def _word(axis: str, label: str) -> str:
    """A label as it stands in the name of a cell."""
    if "." in axis:
        return f"{axis.rpartition('.')[2]}={label}"
    return {"dim": f"{label}d", "fold": f"fold{label}", "seed": f"seed{label}"}.get(axis, label)


def _name(labels: Mapping[str, str]) -> str:
    """All labels in one word that a folder can have.

    >>> _name({"loss": "raw+valid_triplet", "dim": "64", "seed": "1"})
    'raw+valid_triplet-64d-seed1'
    """
    words = (_word(axis, label) for axis, label in labels.items())
    return re.sub(r"[^\w.+-]+", "-", "-".join(words))
