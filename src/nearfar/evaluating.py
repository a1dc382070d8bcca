"""``nearfar evaluate``: embeddings from files or of a run, metrics as a table and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nearfar import __version__, metrics
from nearfar.files import read
from nearfar.inputs import Array, as_device, as_labels, as_vectors
from nearfar.metrics.scores import NORMALIZATIONS
from nearfar.progress import Watch
from nearfar.settings import one_of, whole

NEARNESS = {"cosine": "cosine similarity", "euclidean": "Euclidean distance"}


class Labelled(NamedTuple):
    """Embeddings [n, d] and their labels [n]."""

    embeddings: Tensor
    labels: Array

    def describe(self, labels_name: str) -> dict[str, int]:
        """How many of what."""
        count, dimensions = self.embeddings.shape
        classes = len(torch.unique(as_labels(labels_name, self.labels, count)))
        return {"vectors": count, "dimensions": dimensions, "classes": classes}


def load(
    name: str,
    embeddings: Path,
    labels: Path | None = None,
    *,
    key: str | None = None,
    labels_key: str | None = None,
    device: str = "cpu",
) -> Labelled:
    """Embeddings on a device, and their labels from another file or from the same one. Errors use ``name``."""
    place, shared = as_device("device", device), labels is None or labels == embeddings
    vectors = as_vectors(name, read(embeddings, "embeddings", key, shared=shared))
    return Labelled(vectors.to(place), read(labels or embeddings, "labels", labels_key, shared=shared))


class Trained(NamedTuple):
    """What a trained model is measured on, and how its recipe says to."""

    queries: Labelled
    gallery: Labelled | None
    ks: tuple[int, ...]
    measure: str


def load_run(where: Path, *, data: str | None = None, device: str = "cpu", watch: Watch = lambda work: None) -> Trained:
    """The embeddings of a run's test classes, or of another data set; see ``nearfar.training.tested``."""
    from nearfar.training.tested import embeddings_of, is_trained

    if not is_trained(where):
        raise ValueError(f"{where} is a folder without recipe.toml or model.safetensors: no run, and no saved network")
    place = as_device("device", device)
    queries, gallery, recipe = embeddings_of(where, data=data, device=place, watch=watch)
    sides = [None if one is None else Labelled(one.points.to(place), one.labels) for one in (queries, gallery)]
    assert sides[0] is not None
    if recipe is None:
        return Trained(sides[0], sides[1], (1, 2, 4, 8), "cosine")
    return Trained(sides[0], sides[1], tuple(recipe.evaluation.ks), recipe.evaluation.measure)


def evaluate(
    queries: Labelled,
    gallery: Labelled | None = None,
    *,
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

    Clusters are of the queries, and of unit vectors where cosines are compared. ``watch`` is told what work begins
    and returns what to call with its progress.
    """
    # What is wrong should show before anything long begins.
    whole("worst", worst, low=0)
    whole("seed", seed, low=0, high=2**63 - 1)
    one_of("normalization", normalization, NORMALIZATIONS)
    settings = {"ks": list(ks), "measure": measure, "normalization": normalization, "seed": seed}
    report: dict[str, Any] = {"nearfar": __version__, "settings": settings, "queries": queries.describe("labels")}
    if gallery is not None:
        report["gallery"] = gallery.describe("gallery_labels")
    if clustering and report["queries"]["classes"] == 1:
        raise ValueError("labels have one class, so there is nothing to cluster; leave clustering out")
    found = metrics.retrieval(
        *queries, *(gallery or ()), ks=ks, measure=measure, per_query=True, progress=watch("ranking")
    )
    per_query: dict[str, Tensor] = found.pop("per_query")
    report["retrieval"] = found
    if clustering:
        report["clustering"] = metrics.clustering(
            *queries,
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


def evaluate_model(
    where: str | Path,
    data: str | None = None,
    *,
    ks: Sequence[int] | None = None,
    clustering: bool = False,
    intervals: bool = False,
    worst: int = 0,
    device: str = "auto",
) -> dict[str, Any]:
    """All metrics of a trained model, as ``nearfar evaluate RUN --json`` writes them.

    Parameters
        where        a run folder, or a folder that ``nearfar.networks.saving`` wrote.
        data         another data set than the run's, as NAME, NAME:PLACE, or where the run's own now lies.
        ks           of recall@k; the recipe's unless told.
        clustering   also NMI, AMI and F1 of clusters.
        intervals    also 95 % intervals, by draws of queries.
        worst        so many of the queries that find their class worst.
        device       where to compute: "auto", "cpu", "cuda", …

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
    queries, gallery, own_ks, measure = load_run(Path(where), data=data, device=device)
    return evaluate(
        queries,
        gallery,
        ks=own_ks if ks is None else ks,
        measure=measure,
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


def show(report: dict[str, Any]) -> None:
    """Print a report as tables."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    queries, found = report["queries"], report["retrieval"]
    intervals: dict[str, dict[str, float]] = report.get("intervals", {})
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("metric")
    table.add_column("%", justify="right")
    if intervals:
        table.add_column("95 % interval", justify="right")
    for name, value in {**found, **report.get("clustering", {})}.items():
        if name in ("queries", "queries_without_match", "clusters"):
            continue
        cells = [name, f"{100 * value:.2f}"]
        if name in intervals:
            cells.append(f"{100 * intervals[name]['low']:.2f} – {100 * intervals[name]['high']:.2f}")
        table.add_row(*cells)
    console.print(
        f"{queries['vectors']:,} embeddings of {queries['dimensions']:,} dimensions, {queries['classes']:,} classes"
        + (f"; a gallery of {report['gallery']['vectors']:,}" if "gallery" in report else "")
    )
    console.print(table)
    console.print(f"{found['queries']:,} queries, nearest by {NEARNESS[report['settings']['measure']]}.")
    if found["queries_without_match"]:
        console.print(f"{found['queries_without_match']:,} more had none of their class to find.")
    if "clustering" in report:
        console.print(f"nmi, ami and f1 are of {report['clustering']['clusters']:,} clusters by k-means.")
    if "worst" in report:
        _print_worst(report["worst"], console)


def _print_worst(worst: list[dict[str, Any]], console: Any) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(title="Worst queries by average precision", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("row", "label", "map, %", "first match at"):
        table.add_column(heading, justify="right")
    for query in worst:
        table.add_row(
            str(query["row"]), Text(str(query["label"])), f"{100 * query['map']:.2f}", f"{query['first_match']:,}"
        )
    console.print(table)
