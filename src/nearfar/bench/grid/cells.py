"""Cells: the single runs of a grid, each identified by a digest of its content."""

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
from nearfar.data.datasets import base as datasets
from nearfar.training.recipe.files import Overrides, RecipeError, apply, load, parse_override, to_dict
from nearfar.training.recipe.schema import Recipe, TuningSection
from nearfar.training.run.folder import FREE
from nearfar.utils import plugins
from nearfar.utils.validation import nearest

KEY_DIGITS = 8  # of a key in a folder name
# Keys of recipes that came later, with the default under which finished cells keep their digests.
ADDED = {
    "data.pad": False,
    "evaluation.before": False,
    "evaluation.crops": 1,
    "evaluation.test_every": 0,
    "network.concatenation": "normalized",
    "network.freeze": False,
    "network.independent": False,
    "training.shard_classes": False,
}
FEATURE_SECTIONS = ("data", "augmentation", "network", "evaluation")  # of a recipe, that untrained features depend on
BASELINE_SECTIONS = (*FEATURE_SECTIONS, "split")  # and that their metrics depend on


@dataclass(frozen=True)
class Cell:
    """One run of a grid."""

    key: str  # digest of everything that can change its result
    name: str  # its labels, joined
    # Labels by axis: "loss", "seed", and where the grid has them "network", "dim", "data", "fold" and keys of the
    # recipe such as "loss.alpha".
    labels: Mapping[str, str]
    recipe: Recipe  # recipe to train; for a baseline, the recipe of the runs it is compared with
    what: str = "train"  # "train", or "frozen" for features without training

    @property
    def folder(self) -> str:
        """Name of its run folder."""
        return f"{self.name}-{self.key[:KEY_DIGITS]}"


def expand(grid: Grid, *, overrides: Overrides = (), roots: Sequence[str] = (), only: Sequence[str] = ()) -> list[Cell]:
    """Return the cells of a grid: baselines first, then seed by seed."""
    changes = overrides if isinstance(overrides, Mapping) else dict(map(parse_override, overrides))
    _check_changes(grid, changes)
    _check_roots(grid, roots)
    drafts = [*(_baselines(grid) if grid.baseline else ()), *_trained(grid)]
    chosen = _chosen(drafts, only)
    # Trained cells first: an error in a loss should name its own cell, not the baseline.
    made = {id(draft): _cell(draft, changes, roots) for draft in sorted(chosen, key=lambda draft: draft.what == FROZEN)}
    seen: dict[str, Cell] = {}
    for cell in (made[id(draft)] for draft in chosen):
        if cell.key in seen and cell.what == FROZEN:
            continue  # pretrained weights do not depend on the seed
        if cell.key in seen:
            raise ValueError(f"cells {seen[cell.key].name} and {cell.name} are identical; remove one of them")
        seen[cell.key] = cell
    return list(seen.values())


def _check_changes(grid: Grid, changes: Mapping[str, Any]) -> None:
    """Refuse changes of keys that an axis or the protocol sets: labels of cells would be wrong."""
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
                raise ValueError(f"{key} cannot be set for all cells: {axis} of the grid defines it")


def _check_roots(grid: Grid, roots: Sequence[str]) -> None:
    for entry in roots:
        label, equals, _ = entry.partition("=")
        known = [*grid.data, *datasets.names()]
        if equals and label not in known:
            raise ValueError(f"data is {entry!r}; the grid has no dataset {label!r}{nearest(label, known)}")


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
            raise ValueError(f"only is {label!r}, which is both a {' and a '.join(of)}; use {clear}")
        for axis, own in of.items():
            axes.setdefault(axis, set()).add(own)

    def matches(draft: _Draft) -> bool:
        own = {**draft.labels, "": _name(draft.labels)}
        return all(own.get(axis) in wanted for axis, wanted in axes.items())

    return [draft for draft in drafts if matches(draft)]


def _cell(draft: _Draft, changes: Mapping[str, Any], roots: Sequence[str]) -> Cell:
    name = _name(draft.labels)
    if draft.what == FROZEN:  # untrained features do not depend on the other sections
        changes = {
            key: value for key, value in changes.items() if key.partition(".")[0] in (*BASELINE_SECTIONS, "training")
        }
    try:
        tables = apply(draft.tables, changes)
        root = _root(str(tables.get("data", {}).get("name", "digits")), draft.labels, roots)
        recipe = load(apply(tables, {"data.root": root}) if root else tables)
    except RecipeError as error:
        raise RecipeError(f"cell {name}: {error}", tuple(f"cell {name}: {line}" for line in error.problems)) from None
    return Cell(_key(recipe, draft.what, draft.labels), name, draft.labels, recipe, draft.what)


def _trained(grid: Grid) -> Iterator[_Draft]:
    for tables, labels, last in _frames(grid, grid.settings):
        for loss, changes in grid.losses.items():
            inner = [grid.networks.get(labels.get("network", ""), {}), grid.data.get(labels.get("data", ""), {})]
            steps = [changes, *(axis.get("losses", {}).get(loss, {}) for axis in inner)]
            yield _Draft({"loss": loss, **labels}, _changed(tables, *steps, last))


def _baselines(grid: Grid) -> Iterator[_Draft]:
    """Yield a baseline for each network, dimension and dataset; with random weights, for each seed as well."""
    seen = {key: values for key, values in grid.settings.items() if key.partition(".")[0] in FEATURE_SECTIONS}
    for tables, labels, last in _frames(grid, seen):
        # The network that all losses share; the sections that only training needs complete the recipe.
        first = _changed(tables, next(iter(grid.losses.values())))
        shared = {section: tables[section] for section in BASELINE_SECTIONS if section in tables}
        random = shared.get("network", {}).get("pretrained", False) is False
        if labels.get("fold", "0") == "0" and (random or int(labels["seed"]) == grid.seeds[0]):
            full = _changed({**first, **shared}, last)
            yield _Draft({"loss": FROZEN, **labels}, full, FROZEN)


def _frames(grid: Grid, settings: Mapping[str, Sequence[Any]]) -> Iterator[tuple[Tables, dict[str, str], Tables]]:
    """Yield all combinations of axes but the loss: tables, labels, and changes to apply after those of the loss."""
    nothing: Mapping[str, Tables] = {"": {}}
    axes = grid.seeds, grid.data or nothing, grid.networks or nothing, grid.dims or (None,), grid.splits()
    for seed, data, network, dim, (fold, split), *values in itertools.product(*axes, *settings.values()):
        chosen = dict(zip(settings, values, strict=True))
        numbers = {"dim": dim, "fold": fold, **chosen}
        labels = {"network": network, "data": data} | {axis: _text(one) for axis, one in numbers.items()}
        order = ("network", "dim", "data", "fold", *settings)
        labels = {axis: labels[axis] for axis in order if labels[axis]} | {"seed": str(seed)}
        changes = [grid.data.get(data, {}), grid.networks.get(network, {})]
        plain = ({part: one for part, one in each.items() if part != "losses"} for each in changes)
        last = {**chosen, "training.seed": seed} | ({} if dim is None else {"network.dim": dim})
        yield _changed(grid.recipe, {"split": split}, *plain), labels, last


def _text(value: Any) -> str:
    return "" if value is None else value if isinstance(value, str) else json.dumps(value)


def _changed(tables: Tables, *changes: Tables) -> Tables:
    for each in changes:
        tables = apply(tables, each)
    return tables


def _root(name: str, labels: Mapping[str, str], roots: Sequence[str]) -> str | list[str] | None:
    """Return the location of a cell's data, if one was given."""
    if datasets.takes_root(name) is None:
        return None
    found, own = [], []
    for entry in roots:
        label, equals, root = entry.partition("=")
        if not equals:
            found.append(entry)
        elif label in (labels.get("data"), name):
            own.append(root)
    chosen = own or found
    return (chosen[0] if len(chosen) == 1 else chosen) or None


def _key(recipe: Recipe, what: str, labels: Mapping[str, str]) -> str:
    """Return a digest of all that can change a result. The location of data cannot; its label stands for the data."""
    tables: dict[str, Any] = to_dict(recipe)
    # The key of the split rule when the first cells were trained: finished cells keep their digests.
    tables["split"]["kind"] = tables["split"].pop("name")
    if recipe.tuning == TuningSection():  # as in cells that were trained before there was this section
        del tables["tuning"]
    for path in FREE:
        section, _, key = path.partition(".")
        tables[section].pop(key, None)
    for path, default in ADDED.items():
        section, _, key = path.partition(".")
        if tables[section].get(key) == default:
            del tables[section][key]
    if what == FROZEN:
        kept = ("precision",) if recipe.network.pretrained is not False else ("precision", "seed")
        training = {key: tables["training"][key] for key in kept}
        tables = {section: tables[section] for section in BASELINE_SECTIONS} | {"training": training}
    content: dict[str, Any] = {"what": what, "data": labels.get("data"), "recipe": tables}
    if code := _plugin_digests(recipe, what):
        content["code"] = code
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _plugin_digests(recipe: Recipe, what: str) -> list[str]:
    """Return digests of the user's files that define the loss, network or dataset of a cell."""
    staged = [name for stage in recipe.stages if stage.loss is not None for name in stage.loss.names]
    things: list[object] = [datasets.get(recipe.data.name)]
    things += [networks.get(recipe.network.name)] if recipe.network.name in networks.names() else []
    things += [losses.get(name) for name in (*recipe.loss.names, *staged)] if what != FROZEN else []
    return sorted({found for thing in things if (found := plugins.digest(thing))})


def _word(axis: str, label: str) -> str:
    """Return a label as it is written in the name of a cell."""
    if "." in axis:
        return f"{axis.rpartition('.')[2]}={label}"
    return {"dim": f"{label}d", "fold": f"fold{label}", "seed": f"seed{label}"}.get(axis, label)


def _name(labels: Mapping[str, str]) -> str:
    """Return all labels joined to a folder name, such as "raw+valid_triplet-64d-seed1"."""
    words = (_word(axis, label) for axis, label in labels.items())
    return re.sub(r"[^\w.+-]+", "-", "-".join(words))
