"""Metrics of a run report with intervals."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nearfar import metrics
from nearfar.metrics.intervals import Interval
from nearfar.training.evaluation.embeddings import measure_embeddings
from nearfar.training.run.reader import Run
from nearfar.utils.progress import Watch
from nearfar.utils.tensors import as_device

CLUSTERING_METRICS = ("nmi", "ami", "f1")
COUNTS = ("queries", "queries_without_match", "clusters", "positives", "negatives")  # metrics that are numbers of items


@dataclass(frozen=True)
class RunMetrics:
    """Metrics of the test embeddings of a run."""

    values: dict[str, float]  # metrics by name
    intervals: dict[str, Interval]  # intervals over classes, of the metrics that are means over queries
    precision: Tensor  # [n], average precision of each query; NaN if there is no match
    first: Tensor  # [n], rank of the first match


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
