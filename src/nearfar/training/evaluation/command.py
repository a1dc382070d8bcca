"""``nearfar evaluate``: embeddings from files or of runs, and all their metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from nearfar import __version__, metrics
from nearfar.metrics.clustering import NORMALIZATIONS
from nearfar.utils.inputs import Array, as_device, as_labels, as_vectors
from nearfar.utils.progress import Watch
from nearfar.utils.validation import one_of, whole
from nearfar.utils.vector_files import marks_none, read

if TYPE_CHECKING:
    from nearfar.training.evaluation.models import Sides
    from nearfar.training.run.reader import Embeddings


class Labelled(NamedTuple):
    """Embeddings [n, d] and their labels [n]."""

    embeddings: Tensor
    labels: Array
    left_out: int = 0  # others that have no class

    def describe(self, labels_name: str) -> dict[str, int]:
        """How many of what."""
        count, dimensions = self.embeddings.shape
        classes = len(torch.unique(as_labels(labels_name, self.labels, count)))
        found = {"vectors": count, "dimensions": dimensions, "classes": classes}
        return {**found, "without_class": self.left_out} if self.left_out else found


def load(
    name: str,
    embeddings: Path,
    labels: Path | None = None,
    *,
    key: str | None = None,
    labels_key: str | None = None,
    device: str = "cpu",
) -> Labelled:
    """Embeddings on a device, and their labels from another file or from the same one. Errors use ``name``.

    What ``nearfar embed`` found in no class is left out.
    """
    place, shared = as_device("device", device), labels is None or labels == embeddings
    vectors = as_vectors(name, read(embeddings, "embeddings", key, shared=shared))
    file = labels or embeddings
    found = read(file, "labels", labels_key, shared=shared)
    if labels_key is None and marks_none(file) and len(found) == len(vectors):
        classed = torch.as_tensor(found) >= 0
        if not classed.any():
            raise ValueError(f"{file} has no class for any of its {len(vectors):,} embeddings")
        if not classed.all():
            return Labelled(vectors[classed].to(place), found[classed.numpy()], int((~classed).sum()))
    return Labelled(vectors.to(place), found)


class Asked(NamedTuple):
    """Embeddings to ask with, and to look in where that is something else."""

    queries: Labelled
    gallery: Labelled | None


class Subject(NamedTuple):
    """What is measured, how to unless told otherwise, and the parts of it that are measured alone."""

    queries: Labelled
    gallery: Labelled | None = None
    ks: tuple[int, ...] = (1, 2, 4, 8)
    measure: str = "cosine"
    alone: Mapping[str, Asked] | None = None


def load_run(
    where: Path,
    *,
    levels: bool = False,
    data: str | None = None,
    device: str = "cpu",
    watch: Watch = lambda work: None,
) -> Subject:
    """The embeddings of a run's test classes, or of another data set; see ``nearfar.training.evaluation.models``."""
    from nearfar.training.evaluation import models

    _check_trained(where)
    place = as_device("device", device)
    dims = models.levels_of(where) if levels else {}
    together = models.embeddings_of(where, data=data, device=place, watch=watch)
    return _subject(together, models.by_level(together, dims) if levels else {}, place)


def load_ensemble(
    runs: Sequence[Path], *, data: str | None = None, device: str = "cpu", watch: Watch = lambda work: None
) -> Subject:
    """The embeddings of several runs as one, and those of each; see ``nearfar.training.evaluation.models.joined``.

    How to measure them is what the first one's recipe says.
    """
    from nearfar.training.evaluation import models

    models.check_ensemble(runs)
    for run in runs:
        _check_trained(run)
    place = as_device("device", device)
    if data is None:
        models.check_same_data(runs)
    each = {str(run): models.embeddings_of(run, data=data, device=place, watch=watch) for run in runs}
    return _subject(models.joined(each), each, place)


def _check_trained(where: Path) -> None:
    from nearfar.training.evaluation.models import is_trained

    if not is_trained(where):
        if not where.exists():
            raise FileNotFoundError(f"{where} is not there; needed is a run folder, or one with model.safetensors")
        raise ValueError(
            f"{where} is no run, and no saved network: a folder with recipe.toml or model.safetensors is needed"
        )


def _subject(together: Sides, alone: Mapping[str, Sides], place: torch.device) -> Subject:
    def labelled(one: Embeddings) -> Labelled:
        return Labelled(one.points.to(place), one.labels)

    def asked(sides: Sides) -> Asked:
        return Asked(labelled(sides.queries), None if sides.gallery is None else labelled(sides.gallery))

    parts = {name: asked(sides) for name, sides in alone.items()}
    if together.recipe is None:
        return Subject(*asked(together), alone=parts)
    section = together.recipe.evaluation
    return Subject(*asked(together), tuple(section.ks), section.measure, parts)


def evaluate(
    queries: Labelled,
    gallery: Labelled | None = None,
    *,
    alone: Mapping[str, Asked] | None = None,
    ks: Sequence[int] = (1, 2, 4, 8),
    measure: str = "cosine",
    clustering: bool = True,
    normalization: str = "arithmetic",
    intervals: bool = False,
    worst: int = 0,
    seed: int = 0,
    watch: Watch = lambda work: None,
) -> dict[str, Any]:
    """All metrics, ready for JSON.

    Clusters are of the queries, and of unit vectors where cosines are compared. What is to be measured
    ``alone`` has such a report each, under that name. ``watch`` is told what work begins and returns what to call with
    its progress.
    """
    # What is wrong should show before anything long begins.
    whole("worst", worst, low=0)
    whole("seed", seed, low=0, high=2**63 - 1)
    one_of("normalization", normalization, NORMALIZATIONS)
    settings = {"ks": list(ks), "measure": measure, "normalization": normalization, "seed": seed}

    def measured(queries: Labelled, gallery: Labelled | None = None) -> dict[str, Any]:
        report: dict[str, Any] = {"nearfar": __version__, "settings": settings, "queries": queries.describe("labels")}
        if gallery is not None:
            report["gallery"] = gallery.describe("gallery_labels")
        if clustering and report["queries"]["classes"] == 1:
            raise ValueError("labels have one class, so there is nothing to cluster; leave clustering out")
        given = [one for side in (queries, gallery) if side is not None for one in side[:2]]
        found = metrics.retrieval(*given, ks=ks, measure=measure, per_query=True, progress=watch("ranking"))
        per_query: dict[str, Tensor] = found.pop("per_query")
        report["retrieval"] = found
        if clustering:
            report["clustering"] = metrics.clustering(
                *queries[:2],
                seed=seed,
                normalize=measure == "cosine",
                normalization=normalization,
                progress=watch("clustering"),
            )
        if intervals:
            report["intervals"] = {
                name: {"low": interval.low, "high": interval.high}
                for name, interval in metrics.bootstrap(per_query, seed=seed).items()
            }
        if worst:
            report["worst"] = _worst(per_query, queries.labels, worst)
        return report

    report = measured(queries, gallery)
    if alone:
        report["alone"] = {name: measured(*asked) for name, asked in alone.items()}
    return report


def evaluate_model(
    where: str | Path | Sequence[str | Path],
    data: str | None = None,
    *,
    levels: bool = False,
    ks: Sequence[int] | None = None,
    clustering: bool = False,
    intervals: bool = False,
    worst: int = 0,
    device: str = "auto",
) -> dict[str, Any]:
    """All metrics of a trained model, as ``nearfar evaluate RUN --json`` writes them.

    Those of its levels, or of the runs of an ensemble, stand under "alone", by name.

    Args:
        where: A run folder, or a folder that ``nearfar.networks.weights.save`` wrote; several of them are
            an ensemble, whose embeddings stand side by side.
        data: Another data set than the run's, as NAME, NAME:PLACE, or where the run's own now lies.
        levels: Also each level of the network alone.
        ks: Of recall@k; the recipe's unless told.
        clustering: Also NMI, AMI and F1 of clusters.
        intervals: Also 95 % intervals, by draws of queries.
        worst: So many of the queries that find their class worst.
        device: Where to compute: "auto", "cpu", "cuda", …

    >>> import tempfile, nearfar as nf
    >>> settings = {
    ...     "data": {"name": "digits", "settings": {"vectors": True}},
    ...     "sampler": {"classes": 5, "per_class": 8, "steps": 2},
    ...     "network": {"name": "linear", "dim": 8},
    ...     "loss": {"name": "raw"},
    ...     "optimizer": {"lr": 0.01},
    ...     "training": {"epochs": 1, "device": "cpu"},
    ... }
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     trained = nf.train(settings, f"{folder}/run")
    ...     found = nf.evaluate(trained.folder, device="cpu")
    >>> found["retrieval"]["recall@1"] == trained.metrics["test"]["recall@1"]
    True
    """
    if isinstance(where, (str, Path)):
        found = load_run(Path(where), levels=levels, data=data, device=device)
    elif levels:
        raise ValueError(f"levels are those of one run; where has {len(where)}")
    else:
        found = load_ensemble([Path(run) for run in where], data=data, device=device)
    return evaluate(
        found.queries,
        found.gallery,
        alone=found.alone,
        ks=found.ks if ks is None else ks,
        measure=found.measure,
        clustering=clustering,
        intervals=intervals,
        worst=worst,
    )


def check_file(file: Path) -> None:
    """That a report can be written there, before anything is computed."""
    if file.is_dir() or not file.absolute().parent.is_dir():
        raise ValueError(f"json is {str(file)!r}; needed is a file in a folder that exists")


def _worst(per_query: dict[str, Tensor], labels: Array, count: int) -> list[dict[str, Any]]:
    """The queries with the least average precision, the worst first."""
    precision = per_query["map"].cpu()
    order = precision.nan_to_num(nan=torch.inf).argsort(stable=True)[: int((~precision.isnan()).sum())]
    return [
        {
            "row": row,
            "label": _plain(labels[row]),
            "map": precision[row].item(),
            "first_match": round(1 / per_query["mrr"][row].item()),
        }
        for row in order[:count].tolist()
    ]


def _plain(label: Any) -> int | str:
    """A label as Python has it."""
    value = label.item() if hasattr(label, "item") else label
    return value.decode(errors="replace") if isinstance(value, bytes) else value
