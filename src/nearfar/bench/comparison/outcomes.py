"""Finished runs as a comparison reads them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nearfar import losses
from nearfar.bench.comparison import facts
from nearfar.bench.executors.job import LABELS
from nearfar.training.recipe.files import upgrade
from nearfar.training.run.folder import RunError, RunFolder, read_log

PROTOCOLS = ("standard", "fixed_validation", "k_fold")


class Repetition(NamedTuple):
    """What runs share that differ in seed or fold alone.

    Args:
        loss, network, dim, data, protocol: As an Outcome names them.
        rest: Digest of everything else that can change a number.
    """

    loss: str
    network: str
    dim: int
    data: str
    protocol: str
    rest: str


@dataclass(frozen=True, eq=False)
class Outcome:
    """A finished run.

    Args:
        folder: The run folder.
        manifest: Everything that can change its numbers.
        metrics: As in metrics.json: by part, and which epoch they are of.
        labels: What a grid calls its parts, such as {"loss": "raw+valid_triplet"}; empty elsewhere.
        key: Of the cell of a grid; empty elsewhere.
    """

    folder: Path
    manifest: dict[str, Any] = field(repr=False)
    metrics: dict[str, Any] = field(repr=False)
    labels: Mapping[str, str] = field(default_factory=dict)
    key: str = ""

    @property
    def name(self) -> str:
        """Of the folder."""
        return self.folder.absolute().name

    @property
    def recipe(self) -> dict[str, Any]:
        """What was trained, as tables."""
        found: dict[str, Any] = self.manifest.get("recipe", {})
        return found

    @property
    def is_baseline(self) -> bool:
        """Whether nothing was trained: features as the network came."""
        return bool(self.manifest.get("baseline"))

    @property
    def loss(self) -> str:
        """The grid's word for the loss; or its name, with the mining where it is another than usual."""
        if self.is_baseline:
            return str(self.manifest["baseline"])
        return self.labels.get("loss") or _label(self.recipe.get("loss", {}))

    @property
    def network(self) -> str:
        """The backbone, with how many there are in an ensemble: "resnet50", "googlenet×2"."""
        section = self.recipe.get("network", {})
        name, members = str(section.get("name", "?")), section.get("members", 1)
        return self.labels.get("network") or (name if members == 1 else f"{name}×{members}")

    @property
    def dim(self) -> int:
        """How long an embedding is, levels and members together; that of the runs beside it for a baseline."""
        section = self.recipe.get("network", {})
        if self.is_baseline:
            return (section.get("dim") or 0) * len(section.get("levels") or [1]) * int(section.get("members", 1))
        model = self.manifest.get("network", {}).get("model", {})
        each = model.get("ensemble", [model])
        sizes = [(one.get("dim") or section.get("dim") or 0) * len(one.get("levels") or [1]) for one in each]
        return int(sum(sizes))

    @property
    def data(self) -> str:
        """The data set."""
        found = self.manifest.get("data", {}).get("name") or self.recipe.get("data", {}).get("name", "?")
        return self.labels.get("data") or str(found)

    @property
    def seed(self) -> int:
        """Of the training."""
        return int(self.manifest.get("seed", self.recipe.get("training", {}).get("seed", 0)))

    @property
    def fold(self) -> int | None:
        """Which fold validated; None without folds."""
        split = self.recipe.get("split", {})
        return int(split.get("fold", 0)) if split.get("name") == "k_fold" else None

    @property
    def protocol(self) -> str:
        """ "standard", "fixed_validation" or "k_fold"."""
        name = self.recipe.get("split", {}).get("name", "standard")
        if name not in PROTOCOLS:
            raise RunError(f"{self.folder} has split.name {name!r}; known are {', '.join(PROTOCOLS)}")
        return str(name)

    @property
    def place(self) -> dict[str, Any]:
        """On what it was trained, by name: what puts it into one experiment or another."""
        return {"data": self.data, "network": self.network, "dim": self.dim, "protocol": self.protocol}

    @property
    def settings(self) -> dict[str, Any]:
        """The keys of the recipe that its grid tries values of, with the value that it has: {"loss.alpha": 4.0}."""
        recipe = facts.flat(self.recipe)
        return {key: recipe.get(key, label) for key, label in self.labels.items() if "." in key}

    @property
    def selected_by(self) -> str | None:
        """The metric of validation classes that chose the epoch; None where the last one counts."""
        found = self.recipe.get("selection", {}).get("metric")
        return None if self.protocol == "standard" or found is None else str(found)

    @property
    def seconds(self) -> float:
        """How long it trained."""
        return float(self.metrics.get("seconds") or 0.0)

    @property
    def memory(self) -> float | None:
        """The most it held, in MiB; None where that was not measured."""
        found = self.metrics.get("memory")
        return None if found is None else float(found)

    @property
    def epochs(self) -> int | None:
        """How many it trained."""
        found = self.manifest.get("length", {}).get("epochs")
        return None if found is None else int(found)

    @property
    def repetition(self) -> Repetition:
        """What it shares with runs of other seeds and folds."""
        kept = facts.that_matter(self.manifest)
        if self.is_baseline:
            kept = {key: value for key, value in kept.items() if facts.within(key, facts.UNTRAINED)}
        else:
            own = facts.flat(self.manifest).items()
            kept |= {key: value for key, value in own if facts.is_loss(key) or key in facts.NORMALIZE}
        rest = hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:12]
        return Repetition(self.loss, self.network, self.dim, self.data, self.protocol, rest)

    def score(self, metric: str = "recall@1", part: str = "test") -> float:
        """One of its numbers, from 0 to 1."""
        values = self.metrics.get(part)
        if not isinstance(values, Mapping):
            measured = " and ".join(name for name, each in self.metrics.items() if isinstance(each, Mapping))
            raise ValueError(f"{self.folder} was not measured on {part} classes, but on {measured or 'none'}")
        value = values.get(metric)
        if not isinstance(value, (int, float)):
            known = [name for name, each in values.items() if isinstance(each, float)]
            raise ValueError(f"{self.folder} has no {metric!r} of {part}; it has {', '.join(known)}")
        return float(value)

    def history(self) -> list[dict[str, Any]]:
        """The lines of its log."""
        return read_log(RunFolder(self.folder).log)

    def queries(self) -> dict[str, NDArray[Any]] | None:
        """For each query of the test: "rows" of the data set, "labels", "recall@1", "map@r"; None where not kept.

        "labels" are missing in old runs that kept neither them nor their embeddings.
        """
        file = RunFolder(self.folder).queries
        if not file.is_file():
            return None
        found = _tensors(file)
        kept = RunFolder(self.folder).embeddings
        if "labels" not in found and kept.is_file():
            tested = _tensors(kept)
            order = np.argsort(tested["rows"], kind="stable")
            found["labels"] = tested["labels"][order[np.searchsorted(tested["rows"], found["rows"], sorter=order)]]
        return found


def read(folder: str | Path) -> Outcome:
    """A finished run.

    Args:
        folder: The run folder, as ``nearfar train`` or ``nearfar bench run`` leaves one.
    """
    run = RunFolder(folder)
    if not run.recipe.is_file():
        raise RunError(f"{run.folder} holds no run: {run.recipe.name} is not there")
    if not run.metrics.is_file():
        raise RunError(f"the run in {run.folder} is not finished: {run.metrics.name} is not there")
    if not run.manifest.is_file():
        raise RunError(f"the run in {run.folder} cannot be compared: {run.manifest.name} is not there")
    cell = run.folder / LABELS
    about = _json(cell) if cell.is_file() else {}
    labels = about.get("labels", {})
    if not isinstance(labels, dict):
        raise RunError(f"{cell} has labels {labels!r}; needed is a table")
    manifest = _json(run.manifest)
    if isinstance(manifest.get("recipe"), dict):
        manifest["recipe"] = upgrade(manifest["recipe"])
    return Outcome(run.folder, manifest, _json(run.metrics), labels, str(about.get("key", "")))


def find(*places: str | Path) -> list[Outcome]:
    """The finished runs in some folders: each is a run folder, or holds them at any depth.

    A run that one grid copied from another is given once.

    Args:
        places: Run folders, or folders of them. One with no finished run in it is an error.
    """
    found = []
    for place in places:
        finished = [folder for folder in _runs(Path(place)) if RunFolder(folder).metrics.is_file()]
        if not finished:
            if RunFolder(place).recipe.is_file():
                read(place)  # says why not
            raise RunError(f"{place} holds no finished run")
        found += finished
    return _originals(read(folder) for folder in _once(found))


def unfinished(*places: str | Path) -> list[Path]:
    """The run folders in some folders that have no numbers yet."""
    every = [folder for place in places for folder in _runs(Path(place))]
    return [folder for folder in _once(every) if not RunFolder(folder).metrics.is_file()]


def repetitions(outcomes: Iterable[Outcome]) -> dict[Repetition, list[Outcome]]:
    """Runs that differ in nothing but seed or fold, together; seeds and folds in order."""
    found: dict[Repetition, list[Outcome]] = {}
    for outcome in outcomes:
        found.setdefault(outcome.repetition, []).append(outcome)
    return {key: sorted(runs, key=lambda run: (run.seed, run.fold or 0)) for key, runs in found.items()}


def _label(section: Mapping[str, Any]) -> str:
    """What a loss is called.

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


def _runs(place: Path) -> Iterator[Path]:
    """Run folders at a place or below it; what is inside a run folder is its own."""
    if not place.is_dir():
        what = "is a file" if place.is_file() else "is not there"
        raise FileNotFoundError(f"{place} {what}; needed is a run folder, or a folder that holds some")
    if RunFolder(place).recipe.is_file() or (place / LABELS).is_file():
        yield place
        return
    for below in sorted(place.iterdir()):
        if below.is_dir() and not below.name.startswith("."):
            yield from _runs(below)


def _once(folders: Iterable[Path]) -> list[Path]:
    return list({folder.resolve(): folder for folder in folders}.values())


def _originals(outcomes: Iterable[Outcome]) -> list[Outcome]:
    """Each cell once: two of one key and loss with the same numbers, down to their seconds, are copies."""
    found: dict[Hashable, Outcome] = {}
    for one in outcomes:
        copies = one.key, one.loss, json.dumps(one.metrics, sort_keys=True)
        found.setdefault(copies if one.key else one.folder, one)
    return list(found.values())


def _json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise RunError(f"{file} is no JSON: {error}") from None
    if not isinstance(content, dict):
        raise RunError(f"{file} holds a {type(content).__name__}; needed is a table")
    return content


def _tensors(file: Path) -> dict[str, NDArray[Any]]:
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        found: dict[str, NDArray[Any]] = load_file(file)
    except SafetensorError as error:
        raise RunError(f"{file} cannot be read: {error}") from None
    return found
