"""Numbers of a run report: metrics with intervals, and curves from the log."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from nearfar import metrics
from nearfar.metrics.intervals import Interval
from nearfar.reports.charts import Point
from nearfar.training.run.reader import RunData
from nearfar.utils.inputs import as_device
from nearfar.utils.progress import Watch

PARTS = ("train", "validation", "test")
NUMBERS_OF_CLUSTERS = ("nmi", "ami", "f1")


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
