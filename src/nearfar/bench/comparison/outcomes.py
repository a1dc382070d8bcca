"""Reads finished runs for comparisons, from run folders and from packed grids."""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from nearfar import losses
from nearfar.bench.comparison import manifest_keys as keys
from nearfar.bench.comparison.packed import content, locate, run_folders
from nearfar.training.recipe.files import upgrade
from nearfar.training.recipe.schema import SplitSection
from nearfar.training.run import provenance
from nearfar.training.run.folder import RunError, RunFolder, parse_log
from nearfar.training.run.provenance import LABELS
from nearfar.training.run.tables import RunTable, parse, parse_queries

PROTOCOLS = tuple(SplitSection.keys)


@dataclass(frozen=True, eq=False)
class Outcome:
    """A finished run.

    Args:
        folder: The run folder. It may lie in a packed grid, as in ``results/cub.zip/cells/nra-seed0-…``.
        manifest: Everything that can change its numbers.
        metrics: The content of metrics.json: metrics by part, and the epoch they belong to.
        labels: Names that a grid gives to its axes, such as {"loss": "raw+valid_triplet"}; empty without a grid.
        key: Identifier of the grid's cell; empty without a grid.
    """

    folder: Path
    manifest: dict[str, Any] = field(repr=False)
    metrics: dict[str, Any] = field(repr=False)
    labels: Mapping[str, str] = field(default_factory=dict)
    key: str = ""

    @property
    def name(self) -> str:
        """The name of the folder."""
        return self.folder.absolute().name

    @property
    def recipe(self) -> dict[str, Any]:
        """The recipe as tables."""
        found: dict[str, Any] = self.manifest.get("recipe", {})
        return found

    @property
    def is_baseline(self) -> bool:
        """Whether nothing was trained: the run measures pretrained features."""
        return bool(self.manifest.get("baseline"))

    @property
    def loss(self) -> str:
        """The grid's label for the loss, or its name, with the mining if that is not the default."""
        if self.is_baseline:
            return str(self.manifest["baseline"])
        return self.labels.get("loss") or _label(self.recipe.get("loss", {}))

    @property
    def network(self) -> str:
        """The backbone, with the number of members of an ensemble: "resnet50", "googlenet×2"."""
        section = self.recipe.get("network", {})
        name, members = str(section.get("name", "?")), section.get("members", 1)
        return self.labels.get("network") or (name if members == 1 else f"{name}×{members}")

    @property
    def dim(self) -> int:
        """Size of the embedding, levels and members together. A baseline has that of the runs it belongs to."""
        section = self.recipe.get("network", {})
        if self.is_baseline:
            return (section.get("dim") or 0) * len(section.get("levels") or [1]) * int(section.get("members", 1))
        model = self.manifest.get("network", {}).get("model", {})
        each = model.get("ensemble", [model])
        sizes = [(one.get("dim") or section.get("dim"), len(one.get("levels") or [1])) for one in each]
        return sum(size * levels for size, levels in sizes if isinstance(size, int))

    @property
    def data(self) -> str:
        """The dataset."""
        found = self.manifest.get("data", {}).get("name") or self.recipe.get("data", {}).get("name", "?")
        return self.labels.get("data") or str(found)

    @property
    def seed(self) -> int:
        """The training seed."""
        return int(self.manifest.get("seed", self.recipe.get("training", {}).get("seed", 0)))

    @property
    def fold(self) -> int | None:
        """The validation fold; None without folds."""
        split = self.recipe.get("split", {})
        return int(split.get("fold", 0)) if split.get("name") == "k_fold" else None

    @property
    def protocol(self) -> str:
        """Name of the split, as in the recipe: "standard", "k_fold"."""
        name = self.recipe.get("split", {}).get("name", "standard")
        if name not in PROTOCOLS:
            raise RunError(f"{self.folder} has split.name {name!r}; known are {', '.join(PROTOCOLS)}")
        return str(name)

    @property
    def place(self) -> dict[str, Any]:
        """Dataset, network, size and protocol by name: they identify the experiment of a run."""
        return {"data": self.data, "network": self.network, "dim": self.dim, "protocol": self.protocol}

    @property
    def settings(self) -> dict[str, Any]:
        """Recipe keys that the grid varies, with the values of this run: {"loss.alpha": 4.0}."""
        recipe = keys.flat(self.recipe)
        return {key: recipe.get(key, label) for key, label in self.labels.items() if "." in key}

    def grid(self) -> dict[str, Any]:
        """The content of grid.toml beside the folder of cells; empty without one. Settings are by key of the recipe."""
        file = provenance.grid_file(self.folder)
        found = None if file is None else content(file)
        if found is None:
            return {}
        try:
            table = tomllib.loads(found.decode())
        except (RecursionError, ValueError) as error:
            raise RunError(f"{file} cannot be read: {error}") from None
        return {**table, "settings": keys.flat(table.get("settings", {}))}

    @property
    def selected_by(self) -> str | None:
        """The validation metric that selected the epoch; None if the last epoch was used."""
        found = self.recipe.get("selection", {}).get("metric")
        return str(found) if keys.selects_epoch(self.manifest) and found is not None else None

    @property
    def seconds(self) -> float:
        """Training time."""
        return float(self.metrics.get("seconds") or 0.0)

    @property
    def memory(self) -> float | None:
        """Peak memory in MiB; None if it was not measured."""
        found = self.metrics.get("memory")
        return None if found is None else float(found)

    @property
    def epochs(self) -> int | None:
        """Number of trained epochs."""
        found = self.manifest.get("length", {}).get("epochs")
        return None if found is None else int(found)

    @property
    def repetition(self) -> tuple[Any, ...]:
        """Identity that it shares with runs of other seeds and folds."""
        kept = keys.relevant(self.manifest)
        if self.is_baseline:
            kept = {key: value for key, value in kept.items() if keys.within(key, keys.UNTRAINED)}
        else:
            own = keys.flat(self.manifest).items()
            kept |= {key: value for key, value in own if keys.is_loss(key) or key in keys.NORMALIZE}
        rest = hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:12]
        return self.loss, self.network, self.dim, self.data, self.protocol, rest

    def has(self, metric: str, part: str = "test") -> bool:
        """Whether the run was measured by a metric.

        Args:
            metric: Its name in metrics.json.
            part: "test", "validation" or "train".
        """
        values = self.metrics.get(part)
        return isinstance(values, Mapping) and isinstance(values.get(metric), (int, float))

    def score(self, metric: str = "recall@1", part: str = "test") -> float:
        """A metric of the run, from 0 to 1.

        Args:
            metric: Its name in metrics.json.
            part: "test", "validation" or "train".

        Raises:
            ValueError: If the run does not have it.
        """
        values = self.metrics.get(part)
        if not isinstance(values, Mapping):
            measured = " and ".join(name for name, each in self.metrics.items() if isinstance(each, Mapping))
            raise ValueError(f"{self.folder} was not measured on {part} classes, but on {measured or 'none'}")
        value = values.get(metric)
        if not isinstance(value, (int, float)):
            known = [name for name, each in values.items() if isinstance(each, float)]
            raise ValueError(f"{self.folder} has no {metric!r} of {part}; it has {', '.join(known)}")
        return float(value)

    @property
    def test_looks(self) -> int:
        """How often the test classes were evaluated; in runs without a ledger, how often the log says so."""
        recorded = provenance.count_looks(content(RunFolder(self.folder).looks))
        logged = sum("test" in (line.get("metrics") or {}) for line in self.history())
        return max(recorded, logged, int(self.manifest.get("test_looks", 0)), int("test" in self.metrics))

    def history(self) -> list[dict[str, Any]]:
        """The lines of the log."""
        file = RunFolder(self.folder).log
        return parse_log(file, content(file) or b"")

    def queries(self) -> dict[str, NDArray[Any]] | None:
        """Arrays with one value for each test query, or None if the run did not keep them.

        Returns:
            "rows" of the dataset, "labels", "recall@1" and "map@r".
        """
        file = RunFolder(self.folder).queries
        stored = content(file)
        return None if stored is None else parse_queries(file, stored)


def read(folder: str | Path) -> Outcome:
    """Read a finished run.

    Args:
        folder: A run folder written by ``nearfar train`` or ``nearfar bench run``; it may lie in a packed grid.

    Returns:
        The run.

    Raises:
        RunError: If the folder holds no finished run, or a file is damaged or was changed after the run.
    """
    run = RunFolder(folder)
    if not locate(run.recipe).is_file():
        raise RunError(f"{run.folder} holds no run: {run.recipe.name} is missing")
    if not locate(run.metrics).is_file():
        raise RunError(f"the run in {run.folder} is not finished: {run.metrics.name} is missing")
    if not locate(run.manifest).is_file():
        raise RunError(f"the run in {run.folder} cannot be compared: {run.manifest.name} is missing")
    cell = run.folder / LABELS
    about = parse(cell, content(cell) or b"{}", RunTable)
    metrics = provenance.check(run, content)
    manifest = parse(run.manifest, content(run.manifest) or b"", RunTable)
    if "recipe" in manifest:
        manifest["recipe"] = upgrade(manifest["recipe"])
    return Outcome(run.folder, manifest, metrics, about.get("labels", {}), str(about.get("key", "")))


def find(*places: str | Path) -> list[Outcome]:
    """Find all finished runs in folders and packed grids.

    A run that one grid copied from another is returned once.

    Args:
        *places: Run folders, folders that hold some at any depth, or packed grids.

    Returns:
        The runs, in the order of the places and of folder names.

    Raises:
        RunError: If one of the places holds no finished run.
    """
    found = []
    for place in places:
        finished = [folder for folder in run_folders(place) if locate(RunFolder(folder).metrics).is_file()]
        if not finished:
            if locate(RunFolder(place).recipe).is_file():
                read(place)  # raises with the reason
            raise RunError(f"{place} holds no finished run")
        found += finished
    return _originals(read(folder) for folder in _once(found))


def unfinished(*places: str | Path) -> list[Path]:
    """Run folders without results yet.

    Args:
        *places: As for ``find``.

    Returns:
        Their paths.
    """
    every = [folder for place in places for folder in run_folders(place)]
    return [folder for folder in _once(every) if not locate(RunFolder(folder).metrics).is_file()]


def repetitions(outcomes: Iterable[Outcome]) -> dict[tuple[Any, ...], list[Outcome]]:
    """Group runs that differ in nothing but seed or fold.

    Args:
        outcomes: Finished runs.

    Returns:
        The runs of each group, ordered by seed and fold.
    """
    groups: dict[tuple[Any, ...], list[Outcome]] = {}
    for run in outcomes:
        groups.setdefault(run.repetition, []).append(run)
    return {key: sorted(runs, key=lambda run: (run.seed, run.fold or 0)) for key, runs in groups.items()}


def _label(section: Mapping[str, Any]) -> str:
    """The name of a loss, with its mining if that is not the default.

    >>> _label({"name": "raw", "mining": {"name": "valid_triplet"}}), _label({"name": "triplet", "mining": "semi_hard"})
    ('raw+valid_triplet', 'triplet')
    >>> _label({"name": "proxy_repel", "through_batch": True})
    'proxy_repel+batch'
    """
    name, mining = str(section.get("name", "?")), section.get("mining")
    mined = mining.get("name") if isinstance(mining, Mapping) else mining
    usual = losses.defaults(name).get("mining", "all") if name in losses.names() else "all"
    if section.get("through_batch"):
        return f"{name}+batch"
    return name if mined in (None, usual) else f"{name}+{mined}"


def _once(folders: Iterable[Path]) -> list[Path]:
    return list({folder.resolve(): folder for folder in folders}.values())


def _originals(outcomes: Iterable[Outcome]) -> list[Outcome]:
    """Each cell once: cells with the same key, loss and numbers, including the seconds, are copies."""
    found: dict[Hashable, Outcome] = {}
    for one in outcomes:
        copies = one.key, one.loss, json.dumps(one.metrics, sort_keys=True)
        found.setdefault(copies if one.key else one.folder, one)
    return list(found.values())
