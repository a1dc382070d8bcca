"""Reads run folders. Missing files are reported as absent; damaged files raise an error."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nearfar.data import Dataset
from nearfar.training.evaluation.embeddings import EmbeddingSet
from nearfar.training.loop.builder import open_dataset
from nearfar.training.recipe.files import load
from nearfar.training.recipe.schema import Recipe
from nearfar.training.run.folder import RunFolder, read_log
from nearfar.training.run.provenance import check, count_looks
from nearfar.training.run.tables import parse


@dataclass(frozen=True, eq=False)
class RunData:
    """The content of a run folder."""

    name: str  # name of the folder
    recipe: Recipe
    recipe_text: str  # the recipe as its file has it
    manifest: dict[str, Any]  # everything that can change the results
    log: list[dict[str, Any]]  # the lines of the log
    metrics: dict[str, Any]  # metrics of the selected epoch
    # Embeddings of the test, with the gallery that was searched; None while the run is not finished.
    queries: EmbeddingSet | None
    dataset: Dataset | None  # the dataset; None if it is no longer available
    missing: str = ""  # why it is not
    test_looks: int = 0  # number of evaluations on the test classes in the ledger

    @property
    def gallery(self) -> EmbeddingSet | None:
        """The embeddings that the queries were searched in; None: each other."""
        return None if self.queries is None else self.queries.gallery

    @property
    def of_vectors(self) -> bool:
        """Whether the dataset holds vectors instead of images."""
        return self.dataset is not None and self.dataset.is_vectors

    def class_name(self, label: int) -> str:
        """The name of a class, or its number if the name is not known."""
        known = self.dataset is not None and 0 <= label < self.dataset.num_classes
        return self.dataset.classes[label] if self.dataset is not None and known else f"class {label}"


def read_run(folder: str | Path) -> RunData:
    """Read a run folder."""
    folder = Path(folder)
    run = RunFolder(folder)
    if not run.recipe.is_file():
        raise FileNotFoundError(f"{folder} holds no run: {run.recipe.name} is missing")
    if run.metrics.is_file():
        check(run, lambda file: file.read_bytes() if file.is_file() else None)
    recipe = load(run.folder)
    queries = EmbeddingSet.load(run.embeddings) if run.embeddings.is_file() else None
    dataset, missing = None, ""
    try:
        dataset = open_dataset(recipe)
    except (OSError, ValueError, ImportError) as error:
        missing = " ".join(str(error).split())
    if dataset is not None and queries is not None and int(queries.rows.max()) >= len(dataset):
        missing = f"the dataset has {len(dataset)} images now, and the run used more"
        dataset = None
    return RunData(
        name=folder.absolute().name,
        recipe=recipe,
        recipe_text=run.recipe.read_text(encoding="utf-8"),
        manifest=read_json(run.manifest),
        log=read_log(run.log),
        metrics=read_json(run.metrics),
        queries=queries,
        dataset=dataset,
        missing=missing,
        test_looks=count_looks(run.looks.read_bytes() if run.looks.is_file() else None),
    )


def read_json(file: Path) -> dict[str, Any]:
    """Read a JSON file of a run folder."""
    return parse(file, file.read_bytes()) if file.is_file() else {}
