"""Runs: what is in a run folder, read when it is asked for. Missing files are absent values; damaged ones raise."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from nearfar import losses
from nearfar.data import Dataset
from nearfar.training.evaluation.embeddings import EmbeddingSet
from nearfar.training.recipe.files import flat, load
from nearfar.training.recipe.schema import Recipe, SplitSection
from nearfar.training.run import provenance
from nearfar.training.run.folder import RunError, RunFolder, RunTable, parse, parse_log, parse_queries
from nearfar.training.run.packed import content, locate
from nearfar.training.setup import open_dataset

PROTOCOLS = tuple(SplitSection.keys)
UNSELECTED = ("standard", "closed_set")  # splits without validation classes, which would select an epoch


class Run:
    """A run.

    Its folder may lie in a packed grid, as in ``results/cub.zip/cells/nra-seed0-…``.

    Args:
        folder: The run folder.
        metrics: The content of metrics.json, if it is known already.
        per_query: Metrics of each test query of all folds of a seed, if the run stands for them.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        metrics: Mapping[str, Any] | None = None,
        per_query: Mapping[str, NDArray[Any]] | None = None,
    ) -> None:
        self.folder, self.files = Path(folder), RunFolder(folder)
        self._per_query = per_query
        if metrics is not None:
            self.metrics = dict(metrics)

    def __repr__(self) -> str:
        return f"Run({str(self.folder)!r})"

    # --- files -------------------------------------------------------------------------------------------------

    @cached_property
    def metrics(self) -> dict[str, Any]:
        """Metrics by part, and the epoch they belong to; empty before the run has finished."""
        return provenance.check(self.files, content) if locate(self.files.metrics).is_file() else {}

    @cached_property
    def manifest(self) -> dict[str, Any]:
        """Everything that can change the metrics."""
        return self._table(self.files.manifest)

    @cached_property
    def cell(self) -> dict[str, Any]:
        """What a grid says about the run: "key" and "labels"; empty without a grid."""
        return self._table(self.folder / provenance.LABELS)

    @cached_property
    def log(self) -> list[dict[str, Any]]:
        """The lines of the log."""
        return parse_log(self.files.log, content(self.files.log) or b"")

    @cached_property
    def recipe(self) -> Recipe:
        """The recipe."""
        return load(self.folder)

    @cached_property
    def embeddings(self) -> EmbeddingSet | None:
        """Embeddings of the test, with the gallery that was searched; None if they were not kept."""
        return EmbeddingSet.load(self.files.embeddings) if self.files.embeddings.is_file() else None

    @property
    def searched(self) -> EmbeddingSet | None:
        """The embeddings that those of the test were searched in: the gallery, or each other."""
        return None if self.embeddings is None else self.embeddings.gallery or self.embeddings

    def queries(self) -> dict[str, NDArray[Any]] | None:
        """Arrays with one value for each test query, or None if the run did not keep them.

        Returns:
            "rows" of the dataset, "labels", "recall@1" and "map@r".
        """
        if self._per_query is not None:
            return dict(self._per_query)
        stored = content(self.files.queries)
        return None if stored is None else parse_queries(self.files.queries, stored)

    def grid(self) -> dict[str, Any]:
        """The content of grid.toml beside the folder of cells; empty without one. Settings are by key of the recipe."""
        file = provenance.grid_file(self.folder)
        stored = None if file is None else content(file)
        if stored is None:
            return {}
        try:
            table = tomllib.loads(stored.decode())
        except (RecursionError, ValueError) as error:
            raise RunError(f"{file} cannot be read: {error}") from None
        return {**table, "settings": flat(table.get("settings", {}))}

    def _table(self, file: Path) -> dict[str, Any]:
        stored = content(file)
        return {} if stored is None else parse(file, stored, RunTable)

    # --- what it is --------------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """The name of the folder."""
        return self.folder.absolute().name

    @property
    def key(self) -> str:
        """Identifier of the grid's cell; empty without a grid."""
        return str(self.cell.get("key", ""))

    @cached_property
    def labels(self) -> Mapping[str, str]:
        """Names that a grid gives to its axes, such as {"loss": "raw+valid_triplet"}; empty without a grid."""
        labels: dict[str, str] = self.cell.get("labels", {})
        return labels

    @property
    def tables(self) -> dict[str, Any]:
        """The recipe of the manifest as tables."""
        tables: dict[str, Any] = self.manifest.get("recipe", {})
        return tables

    @property
    def is_baseline(self) -> bool:
        """Whether nothing was trained: the run measures pretrained features."""
        return bool(self.manifest.get("baseline"))

    @property
    def loss(self) -> str:
        """The grid's label for the loss, or its name, with the mining if that is not the default."""
        if self.is_baseline:
            return str(self.manifest["baseline"])
        return self.labels.get("loss") or _label(self.tables.get("loss", {}))

    @property
    def network(self) -> str:
        """The backbone, with the number of members of an ensemble: "resnet50", "googlenet×2"."""
        section = self.tables.get("network", {})
        name, members = str(section.get("name", "?")), section.get("members", 1)
        return self.labels.get("network") or (name if members == 1 else f"{name}×{members}")

    @property
    def dim(self) -> int:
        """Size of the embedding, levels and members together. A baseline has that of the runs it belongs to."""
        section = self.tables.get("network", {})
        if self.is_baseline:
            return (section.get("dim") or 0) * len(section.get("levels") or [1]) * int(section.get("members", 1))
        model = self.manifest.get("network", {}).get("model", {})
        members = model.get("ensemble", [model])
        sizes = [(member.get("dim") or section.get("dim"), len(member.get("levels") or [1])) for member in members]
        return sum(size * levels for size, levels in sizes if isinstance(size, int))

    @property
    def data(self) -> str:
        """The dataset."""
        name = self.manifest.get("data", {}).get("name") or self.tables.get("data", {}).get("name", "?")
        return self.labels.get("data") or str(name)

    @property
    def seed(self) -> int:
        """The training seed."""
        return int(self.manifest.get("seed", self.tables.get("training", {}).get("seed", 0)))

    @property
    def fold(self) -> int | None:
        """The validation fold; None without folds, and for all of them together."""
        split = self.tables.get("split", {})
        folds = split.get("name") == "k_fold" and self._per_query is None
        return int(split.get("fold", 0)) if folds else None

    @property
    def protocol(self) -> str:
        """Name of the split, as in the recipe: "standard", "k_fold"."""
        name = self.tables.get("split", {}).get("name", "standard")
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
        recipe = flat(self.tables)
        return {key: recipe.get(key, label) for key, label in self.labels.items() if "." in key}

    @property
    def selected_by(self) -> str | None:
        """The validation metric that selected the epoch; None if the last epoch was used."""
        metric = self.tables.get("selection", {}).get("metric")
        selects = self.tables.get("split", {}).get("name", "standard") not in UNSELECTED
        return str(metric) if selects and metric is not None else None

    # --- what came out -----------------------------------------------------------------------------------------

    @property
    def seconds(self) -> float:
        """Training time."""
        return float(self.metrics.get("seconds") or 0.0)

    @property
    def memory(self) -> float | None:
        """Peak memory in MiB; None if it was not measured."""
        memory = self.metrics.get("memory")
        return None if memory is None else float(memory)

    @property
    def epochs(self) -> int | None:
        """Number of trained epochs."""
        epochs = self.manifest.get("length", {}).get("epochs")
        return None if epochs is None else int(epochs)

    @property
    def test_looks(self) -> int:
        """How often the test classes were evaluated; in runs without a ledger, how often the log says so."""
        recorded = provenance.count_looks(content(self.files.looks))
        logged = sum("test" in (line.get("metrics") or {}) for line in self.log)
        return max(recorded, logged, int(self.manifest.get("test_looks", 0)), int("test" in self.metrics))

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
            measured = " and ".join(name for name, value in self.metrics.items() if isinstance(value, Mapping))
            raise ValueError(f"{self.folder} was not measured on {part} classes, but on {measured or 'none'}")
        value = values.get(metric)
        if not isinstance(value, (int, float)):
            known = [name for name, number in values.items() if isinstance(number, float)]
            raise ValueError(f"{self.folder} has no {metric!r} of {part}; it has {', '.join(known)}")
        return float(value)

    def curve(self, part: str, metric: str) -> list[tuple[float, float]]:
        """A metric after each evaluated epoch, counted from 1.

        Args:
            part: "test", "validation" or "train".
            metric: Its name in the log.
        """
        points = []
        for line in self.log:
            value = (line.get("metrics") or {}).get(part, {}).get(metric)
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                points.append((float(line.get("epoch", 0) + 1), float(value)))
        return points

    # --- the dataset -------------------------------------------------------------------------------------------

    @cached_property
    def dataset(self) -> Dataset | None:
        """The dataset; None if it is no longer available, and ``missing`` says why."""
        self.missing = ""
        try:
            dataset = open_dataset(self.recipe)
        except (OSError, ValueError, ImportError) as error:
            self.missing = " ".join(str(error).split())
            return None
        if self.embeddings is not None and int(self.embeddings.rows.max()) >= len(dataset):
            self.missing = f"the dataset has {len(dataset)} images now, and the run used more"
            return None
        return dataset

    @property
    def of_vectors(self) -> bool:
        """Whether the dataset holds vectors instead of images."""
        return self.dataset is not None and self.dataset.is_vectors

    def class_name(self, label: int) -> str:
        """The name of a class, or its number if the name is not known.

        Args:
            label: Its number.
        """
        known = self.dataset is not None and 0 <= label < self.dataset.num_classes
        return self.dataset.classes[label] if self.dataset is not None and known else f"class {label}"


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


def read_json(file: Path) -> dict[str, Any]:
    """Read a JSON file of a run folder."""
    return parse(file, file.read_bytes()) if file.is_file() else {}
