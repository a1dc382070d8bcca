"""A run folder as a report reads it. What is missing is left out of the report; what is damaged is an error."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from nearfar import metrics
from nearfar.data import Dataset
from nearfar.metrics.intervals import Interval
from nearfar.reports.charts import Point
from nearfar.training.loop.examples import open_data
from nearfar.training.recipe.files import load
from nearfar.training.recipe.schema import Recipe
from nearfar.training.run.folder import RunFolder, read_log
from nearfar.utils.inputs import as_device
from nearfar.utils.progress import Watch

PARTS = ("train", "validation", "test")
NUMBERS_OF_CLUSTERS = ("nmi", "ami", "f1")


@dataclass(frozen=True)
class Embeddings:
    """The embeddings that were tested.

    Args:
        points: [n, d].
        labels: [n], as the data set numbers its classes.
        rows: [n], which pictures of the data set these are.
    """

    points: Tensor
    labels: Tensor
    rows: Tensor


@dataclass(frozen=True, eq=False)
class RunData:
    """All a report is made of.

    Args:
        name: Of the folder.
        recipe: What was trained, and ``recipe_text``, its file.
        manifest: Everything that can change a number.
        log: A table for each line.
        metrics: Of the selected epoch.
        queries: Tested embeddings; None while the run is not finished. ``gallery`` where they were looked for in one.
        dataset: None where it is no longer there; ``missing`` then says why.
    """

    name: str
    recipe: Recipe
    recipe_text: str
    manifest: dict[str, Any]
    log: list[dict[str, Any]]
    metrics: dict[str, Any]
    queries: Embeddings | None
    gallery: Embeddings | None
    dataset: Dataset | None
    missing: str = ""

    def class_name(self, label: int) -> str:
        """What a class is called; its number where that is not known."""
        known = self.dataset is not None and 0 <= label < self.dataset.num_classes
        return self.dataset.classes[label] if self.dataset is not None and known else f"class {label}"


@dataclass(frozen=True)
class Measured:
    """The metrics of the tested embeddings, with what is needed to show where they come from.

    Args:
        values: By name.
        intervals: Of those that are means over queries.
        precision: [n], average precision of each query; NaN where there was nothing to find.
        first: [n], place of the first match.
    """

    values: dict[str, float]
    intervals: dict[str, Interval]
    precision: Tensor
    first: Tensor


def read_run(folder: str | Path) -> RunData:
    """What is in a run folder."""
    folder = Path(folder)
    run = RunFolder(folder)
    if not run.recipe.is_file():
        raise FileNotFoundError(f"{folder} holds no run: {run.recipe.name} is not there")
    recipe = load(run.recipe)
    queries, gallery = read_embeddings(run.embeddings)
    dataset, missing = None, ""
    try:
        dataset = open_data(recipe)
    except (OSError, ValueError, ImportError) as error:
        missing = " ".join(str(error).split())
    if dataset is not None and queries is not None and int(queries.rows.max()) >= len(dataset):
        missing = f"the data set has {len(dataset)} pictures now, and the run saw more"
        dataset = None
    return RunData(
        name=folder.absolute().name,
        recipe=recipe,
        recipe_text=run.recipe.read_text(encoding="utf-8"),
        manifest=read_json(run.manifest),
        log=read_log(run.log),
        metrics=read_json(run.metrics),
        queries=queries,
        gallery=gallery,
        dataset=dataset,
        missing=missing,
    )


def measured(run: RunData, *, device: str = "cpu", seed: int = 0, watch: Watch = lambda work: None) -> Measured | None:
    """The metrics of the tested embeddings and their intervals, computed anew."""
    if run.queries is None:
        return None
    section = run.recipe.evaluation
    queries, gallery = run.queries, run.gallery
    where = as_device("device", device)
    asked = () if gallery is None else (gallery.points.to(where), gallery.labels)
    found = metrics.retrieval(
        queries.points.to(where),
        queries.labels,
        *asked,
        ks=section.ks,
        measure=section.measure,
        per_query=True,
        progress=watch("ranking"),
    )
    per_query: dict[str, Tensor] = {name: values.cpu() for name, values in found.pop("per_query").items()}
    tested = run.metrics.get("test", {})
    values = {name: float(value) for name, value in found.items() if name in per_query}
    values |= {name: float(tested[name]) for name in NUMBERS_OF_CLUSTERS if name in tested}
    return Measured(values, metrics.bootstrap(per_query, seed=seed), per_query["map"], 1.0 / per_query["mrr"])


def loss_points(log: Sequence[dict[str, Any]]) -> list[Point]:
    """The loss by step."""
    return [(line["step"], line["loss"]) for line in log if _is_number(line.get("loss")) and "step" in line]


def metric_points(log: Sequence[dict[str, Any]], part: str, metric: str) -> list[Point]:
    """A metric of a part after each epoch it was measured in, counted from 1."""
    found = []
    for line in log:
        value = (line.get("metrics") or {}).get(part, {}).get(metric)
        if _is_number(value):
            found.append((float(line.get("epoch", 0) + 1), float(value)))
    return found


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def read_json(file: Path) -> dict[str, Any]:
    """A table of a run folder; an empty one where there is none."""
    if not file.is_file():
        return {}
    try:
        content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is no JSON: {error}") from error
    return content


def read_embeddings(file: Path) -> tuple[Embeddings | None, Embeddings | None]:
    """What a run tested: queries, and a gallery if they were looked for in one; None where there is none."""
    if not file.is_file():
        return None, None
    try:
        tensors = load_file(file)
    except SafetensorError as error:
        raise ValueError(f"{file} cannot be read: {error}") from error

    def part(start: str) -> Embeddings | None:
        names = [f"{start}{name}" for name in ("embeddings", "labels", "rows")]
        if names[0] not in tensors:
            return None
        absent = [name for name in names if name not in tensors]
        if absent:
            raise ValueError(f"{file} has no {' and no '.join(absent)}")
        points, labels, rows = (tensors[name] for name in names)
        return Embeddings(points.float(), labels, rows)

    return part(""), part("gallery_")
