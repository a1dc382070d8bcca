"""Reads run folders back. Missing files are reported as absent; damaged files raise an error."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from nearfar.data import Dataset
from nearfar.training.loop.examples import open_data
from nearfar.training.recipe.files import load
from nearfar.training.recipe.schema import Recipe
from nearfar.training.run.folder import RunFolder, read_log


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


def read_run(folder: str | Path) -> RunData:
    """What is in a run folder."""
    folder = Path(folder)
    run = RunFolder(folder)
    if not run.recipe.is_file():
        raise FileNotFoundError(f"{folder} holds no run: {run.recipe.name} is not there")
    recipe = load(run.folder)
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
