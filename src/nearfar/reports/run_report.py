"""The report of a run: what was trained, its results, and its failures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nearfar import metrics, plots
from nearfar.bench.comparison.significance import kendall_tau
from nearfar.losses import PairLoss
from nearfar.metrics.intervals import Interval
from nearfar.reports.charts import Line, change_chart, line_chart, scatter, smoothed, whiskers
from nearfar.reports.gallery import MAX_POINTS, METHODS, flatten, neighbors, spread, thumbnail
from nearfar.reports.pages import metric_name, render
from nearfar.training import verdict
from nearfar.training.evaluation.embeddings import measure_embeddings
from nearfar.training.recipe.checks import VERIFICATION
from nearfar.training.recipe.files import flat
from nearfar.training.run.reader import Run
from nearfar.training.verdict import ClassChange
from nearfar.utils import formatting
from nearfar.utils.atomic import write_text
from nearfar.utils.folders import claim_file
from nearfar.utils.progress import Watch
from nearfar.utils.tensors import as_device
from nearfar.utils.validation import one_of, whole

PARTS = ("train", "validation", "test")
NAME = "report.html"
NEIGHBORS = 8  # shown for each query
STRONGEST = 8  # gains of classes that are shown, and as many losses, if there are more classes
MAX_LABELS = 16  # classes whose names are written on the map
CLUSTERING_METRICS = ("nmi", "ami", "f1")
COUNTS = ("queries", "queries_without_match", "clusters", "positives", "negatives")  # metrics that are numbers of items
METHOD_NAMES = {
    "pca": "PCA (the two directions of largest variance)",
    "tsne": "t-SNE, which keeps neighbors together and does not preserve distances",
    "umap": "UMAP, which keeps neighbors together and does not preserve distances",
}


@dataclass(frozen=True)
class RunMetrics:
    """Metrics of the test embeddings of a run."""

    values: dict[str, float]  # metrics by name
    intervals: dict[str, Interval]  # intervals over classes, of the metrics that are means over queries
    precision: Tensor  # [n], average precision of each query; NaN if there is no match
    first: Tensor  # [n], rank of the first match


def report(
    folder: str | Path,
    *,
    out: str | Path | None = None,
    map: str = "pca",
    queries: int = 8,
    worst: int = 8,
    device: str = "cpu",
    seed: int = 0,
    force: bool = False,
    watch: Watch = lambda work: None,
) -> Path:
    """Write the report of a run as a page in a single file, without scripts."""
    one_of("map", map, METHODS)
    whole("queries", queries, low=0)
    whole("worst", worst, low=0)
    run = Run(folder)
    if not run.files.recipe.is_file():
        raise FileNotFoundError(f"{folder} holds no run: {run.files.recipe.name} is missing")
    file = claim_file(out if out is not None else Path(folder) / NAME, "run_report", [folder], force=force)
    found = measured(run, device=device, watch=watch)
    gains, left_out, losses = strongest(run)
    changed = [*gains, *losses]
    lowest = _lowest_of_classes(run, found, [change.label for change in changed]) if found is not None and worst else {}
    data = run.manifest.get("data", {}).get("name", run.recipe.data.name)
    page = render(
        "run_report.html",
        run.name,
        lead=f"{run.recipe.loss.name} · {run.recipe.network.name} · {data}",
        run=run,
        version=run.manifest.get("versions", {}).get("nearfar"),
        verdict=verdict.text(run.metrics),
        advice=verdict.advice(run),
        changes=_change_chart(run, changed, len(gains), left_out, lowest),
        gained=[sum(change.gain > 0 for change in [*changed, *left_out]), len(changed) + len(left_out)],
        figures=_figures(run, found),
        curves=_curves(run),
        metrics=_metrics(found),
        classes=max((each.classes for each in found.intervals.values()), default=0) if found is not None else 0,
        agreement=_agreement(run),
        parts=[part for part in ("before", "train", "validation") if part in run.metrics],
        random_queries=_random_queries(run, queries, seed) if found is not None else [],
        worst_queries=_worst_queries(run, found, worst, lowest.values()) if found is not None else [],
        map=_map(run, map, seed),
        weights=_weights(run),
        manifest=_manifest(run),
    )
    write_text(file, page)
    return file


def measured(run: Run, *, device: str = "cpu", watch: Watch = lambda work: None) -> RunMetrics | None:
    """Compute the metrics of the stored test embeddings and their intervals."""
    if run.embeddings is None:
        return None
    section = run.recipe.evaluation
    queries = run.embeddings.to(as_device("device", device))
    found = measure_embeddings(queries, ks=section.ks, measure=section.measure, watch=watch)
    if found.verification:  # given pairs and triplets have no queries
        nothing = torch.full((len(queries),), torch.nan)
        shares = {name: value for name, value in found.verification.items() if not name.startswith("threshold@")}
        return RunMetrics({name: value for name, value in shares.items() if name not in COUNTS}, {}, nothing, nothing)
    per_query = {name: values.cpu() for name, values in found.per_query.items()}
    tested = run.metrics.get("test", {})
    values = {name: float(value) for name, value in found.retrieval.items() if name in per_query}
    values |= {name: float(tested[name]) for name in CLUSTERING_METRICS if name in tested}
    return RunMetrics(
        values, metrics.class_intervals(per_query, queries.labels), per_query["map"], 1.0 / per_query["mrr"]
    )


def strongest(run: Run, most: int = STRONGEST) -> tuple[list[ClassChange], list[ClassChange], list[ClassChange]]:
    """Return the test classes that gained most, those in between, and those that lost most, the largest gain first."""
    changes = [] if verdict.is_unchanged(run.metrics) else verdict.class_changes(run)
    if len(changes) <= 2 * most + 1:
        return changes, [], []
    return changes[:most], changes[most:-most], changes[-most:]


def between(left_out: Sequence[ClassChange]) -> str:
    """Say how many classes are left out, and between which changes they are."""
    first, last = (formatting.signed(100 * change.gain) for change in (left_out[0], left_out[-1]))
    return f"… {len(left_out):,} more classes, {first} to {last} …"


def _change_chart(
    run: Run, changes: Sequence[ClassChange], gains: int, left_out: Sequence[ClassChange], lowest: Mapping[int, int]
) -> str:
    """Draw the change of each class, linked to its worst query on the page."""
    if not changes:
        return ""
    rows = run.embeddings.rows.tolist() if run.embeddings is not None else []
    places = {label: f"query-{rows[query]}" for label, query in lowest.items()}
    shown = [(run.class_name(each.label), each.before, each.after, places.get(each.label, "")) for each in changes]
    row = (gains, between(left_out)) if left_out else None
    return change_chart(shown, title="Classes before and after", x="map@r", left_out=row)


def _figures(run: Run, found: RunMetrics | None) -> list[tuple[str, str, str]]:
    """The most important numbers: name, value and remark."""
    entries: list[tuple[str, str, str]] = []
    for name in ("recall@1", "map@r", "nmi", *VERIFICATION):
        if found is not None and name in found.values:
            each = found.intervals.get(name)
            of = "of given pairs" if name in VERIFICATION else "of k-means clusters"
            remark = formatting.interval(*_ends(each)) if each else of
            entries.append((metric_name(name), formatting.percent(found.values[name]), remark))
    if "before" in run.metrics:
        before = formatting.percent(run.metrics["before"].get("recall@1"))
        entries.append(("Before", before, "recall@1 of the network without this training"))
    if (tested := run.searched) is not None:
        what, count = "vectors" if run.of_vectors else "images", len(torch.unique(torch.as_tensor(tested.labels)))
        classes = f"{what} of {count:,} unseen classes"
        entries.append(("Tested on", f"{len(tested.labels):,}", classes))
    if run.metrics and run.test_looks:
        entries.append(("Test looks", f"{run.test_looks:,}", "evaluations on the test classes"))
    if "epoch" in run.metrics:
        entries.append(("Epoch", f"{run.metrics['epoch'] + 1:,}", str(run.metrics.get("selection", ""))))
    if run.metrics.get("seconds"):
        steps = formatting.plural(run.metrics.get("steps", 0), "step")
        entries.append(("Training time", formatting.duration(run.metrics["seconds"]), steps))
    return entries


def _curves(run: Run) -> list[tuple[str, str]]:
    """Charts of the loss, and of recall@1 of all measured parts, if one was measured at least twice."""
    charts = []
    points = [(line["step"], line["loss"]) for line in run.log if line.get("loss") is not None and "step" in line]
    if points:
        lines = [Line("loss", points)]
        if len(points) >= 40:
            lines = [Line("loss", points, faint=True), Line("average", smoothed(points, max(5, len(points) // 25)))]
        charts.append(("Loss", line_chart(lines, title="Loss by step", x="step", y="loss")))
    by_part = {part: run.curve(part, "recall@1") for part in PARTS}
    before = run.metrics.get("before", {}).get("recall@1")
    if before is not None and by_part["test"]:
        by_part["test"] = [(0.0, before), *by_part["test"]]
    lines = [
        Line(part, found, color=color, dots=True)
        for color, (part, found) in enumerate(by_part.items(), start=1)
        if found
    ]
    if any(len(found) > 1 for found in by_part.values()):
        chart = line_chart(lines, title="Recall@1 by epoch", x="epoch", y="recall@1", percent=True)
        charts.append(("Recall@1", chart))
    return charts


def _metrics(found: RunMetrics | None) -> list[dict[str, Any]]:
    """All metrics with their intervals."""
    rows = []
    for name, value in (found.values if found is not None else {}).items():
        assert found is not None
        each = found.intervals.get(name)
        low, high = _ends(each)
        chart = whiskers(value if low is None else low, value, value if high is None else high)
        rows.append({"name": name, "value": value, "low": low, "high": high, "chart": chart})
    return rows


def _ends(each: Interval | None) -> tuple[float | None, float | None]:
    """The ends of an interval; None without one, as with a single class."""
    return (each.low, each.high) if each is not None and each.classes > 1 else (None, None)


def _agreement(run: Run) -> float | None:
    """Kendall's τ of recall@1 on validation and test classes over epochs; None if they were not both measured."""
    validation, test = (dict(run.curve(part, "recall@1")) for part in ("validation", "test"))
    epochs = sorted(validation.keys() & test.keys())
    return kendall_tau([validation[epoch] for epoch in epochs], [test[epoch] for epoch in epochs])


def _random_queries(run: Run, count: int, seed: int) -> list[list[dict[str, Any]]]:
    """Random queries of different classes with their neighbors."""
    if run.embeddings is None or run.embeddings.relations is not None or not count:
        return []
    return _hits(run, spread(torch.as_tensor(run.embeddings.labels), count, seed))


def _lowest_of_classes(run: Run, found: RunMetrics, classes: Sequence[int]) -> dict[int, int]:
    """Return the query with the lowest average precision of each class that has one."""
    order = found.precision.argsort(descending=True, stable=True)[int(found.precision.isnan().sum()) :].tolist()
    labels = [] if run.embeddings is None else torch.as_tensor(run.embeddings.labels).tolist()
    lowest = {labels[query]: query for query in order}
    return {label: lowest[label] for label in classes if label in lowest}


def _worst_queries(run: Run, found: RunMetrics, count: int, others: Iterable[int]) -> list[list[dict[str, Any]]]:
    """The queries with the lowest average precision, and others, with their neighbors."""
    order = found.precision.nan_to_num(nan=torch.inf).argsort(stable=True)
    chosen = list(dict.fromkeys([*order[: min(count, int((~found.precision.isnan()).sum()))].tolist(), *others]))
    notes = {
        row: f"AP {formatting.percent(float(found.precision[row]))}, first match at {round(float(found.first[row])):,}"
        for row in chosen
    }
    return _hits(run, chosen, notes) if chosen else []


def _hits(run: Run, chosen: Sequence[int], notes: Mapping[int, str] | None = None) -> list[list[dict[str, Any]]]:
    """For each query, the query itself and its neighbors."""
    asked, searched = run.embeddings, run.searched
    assert asked is not None
    assert searched is not None
    gallery = None if asked.gallery is None else asked.gallery.embeddings
    rows = []
    every = neighbors(asked.embeddings, chosen, gallery, count=NEIGHBORS, measure=run.recipe.evaluation.measure)
    for query, nearest in zip(chosen, every, strict=True):
        label = int(asked.labels[query])
        hits = [_hit(run, int(asked.rows[query]), label, "asked", (notes or {}).get(query, ""))]
        for row, value in nearest:
            other = int(searched.labels[row])
            kind = "good" if other == label else "bad"
            hits.append(_hit(run, int(searched.rows[row]), other, kind, f"{round(value, 2) + 0.0:.2f}"))  # no -0.00
        rows.append(hits)
    return rows


def _hit(run: Run, index: int, label: int, kind: str, note: str) -> dict[str, Any]:
    image = None if run.dataset is None else thumbnail(run.dataset, index)
    file = f"row {index}" if run.dataset is None or run.dataset.is_vectors else run.dataset.source.name(index)
    uri, is_small = image or ("", False)
    about = {"index": index, "class_name": run.class_name(label), "file": file, "kind": kind, "note": note}
    return {**about, "image": uri, "is_small": is_small}


def _map(run: Run, method: str, seed: int) -> dict[str, Any] | None:
    """The embeddings of unseen classes on a plane."""
    tested = run.searched
    if tested is None or len(tested.labels) < 3:
        return None
    rows = sorted(spread(torch.as_tensor(tested.labels), MAX_POINTS, seed))
    labels, points = tested.labels[rows], tested.embeddings[rows]
    if run.recipe.evaluation.measure == "cosine":
        points = torch.nn.functional.normalize(points)
    places = flatten(points, method, seed)
    groups = [
        (
            run.class_name(label),
            round(360 * (order * 0.618034 % 1)),  # consecutive classes get different hues
            [(float(x), float(y)) for x, y in places[(labels == label).numpy()]],
        )
        for order, label in enumerate(torch.unique(labels).tolist())
    ]
    labeled = len(groups) <= MAX_LABELS
    return {
        "chart": scatter(groups, title="Map of embeddings", labels=labeled),
        "method": METHOD_NAMES[method],
        "labeled": labeled,
        "shown": len(rows),
        "total": len(tested.labels),
    }


def _weights(run: Run) -> dict[str, Any] | None:
    """The weight that the loss gives to a pair, by its similarity; None for losses without pair weights."""
    section = run.recipe.loss_of(max(0, len(run.recipe.stages) - 1))
    loss = section.create(num_classes=plots.CLASSES, dim=plots.DIMENSIONS)
    if not plots.has_weights(type(loss)):
        return None
    found = plots.curves(loss, steps=101)
    lines = []
    for name, color, values in (("positive", 3, found.positive), ("negative", 2, found.negative)):
        largest = float(values.abs().amax())
        relative = values / largest if largest > 0 else values
        lines.append(Line(name, list(zip(found.similarity.tolist(), relative.tolist(), strict=True)), color=color))
    chart = line_chart(
        lines, title="Pair weight by similarity", x="cosine similarity", y="weight, relative", from_zero=True
    )
    is_pair = isinstance(loss, PairLoss)
    return {
        "loss": section.name,
        "chart": chart,
        "pull": "a positive pair together" if is_pair else "a sample to the proxy of its class",
        "push": "a negative pair apart" if is_pair else "it away from the proxy of another class",
    }


def _manifest(run: Run) -> list[tuple[str, str]]:
    """The manifest as flat keys and values, without the recipe."""
    facts = flat({key: value for key, value in run.manifest.items() if key != "recipe"})
    return [(name, _plain(value)) for name, value in facts.items()]


def _plain(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else "–" if value is None else str(value)
