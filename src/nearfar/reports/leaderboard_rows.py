"""Runs as a leaderboard shows them: by experiment, a row for each loss."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from nearfar.bench.comparison import comparison, tournament
from nearfar.bench.comparison.fairness import Verdict
from nearfar.bench.comparison.outcomes import Outcome
from nearfar.reports.run_data import metric_points

BESIDE = ("recall@2", "recall@4", "recall@8", "recall@10", "recall@100", "recall@1000", "map@r", "nmi")
DRAWS = {"classes": 10_000, "queries": 2000}  # samples; there are many more queries than classes


@dataclass(frozen=True)
class Row:
    """A loss in an experiment: the mean over its repetitions.

    Args:
        loss: What it is called.
        runs: Its repetitions.
        rank: In its experiment; None for baselines, and where ranking would be unfair.
        score: The metric of the test classes; ``std`` over repetitions, ``low`` and ``high`` the interval of draws.
        p: Against the best loss of its experiment.
        beside: Other metrics by name.
        seconds: That a training took, mean; ``memory`` the most it held, in MiB.
    """

    loss: str
    runs: Sequence[Outcome]
    rank: int | None
    score: float
    std: float | None
    low: float | None
    high: float | None
    p: float | None
    beside: Mapping[str, float]
    seconds: float
    memory: float | None

    @property
    def is_baseline(self) -> bool:
        """Whether nothing was trained."""
        return self.runs[0].is_baseline


@dataclass(frozen=True)
class Experiment:
    """What is compared with each other: one data set, network, size and protocol.

    Args:
        name: What tells it from the others.
        rows: Best first where they are ranked, by name otherwise; baselines last.
        verdict: Whether they may be ranked; ``notes`` are about intervals.
    """

    name: str
    data: str
    network: str
    dim: int
    protocol: str
    rows: Sequence[Row]
    verdict: Verdict
    notes: Sequence[str]

    def row(self, loss: str) -> Row | None:
        """That of a loss."""
        return next((row for row in self.rows if row.loss == loss), None)

    @property
    def best(self) -> Row | None:
        """The trained loss with the largest score."""
        return max((row for row in self.rows if not row.is_baseline), key=lambda row: row.score, default=None)


def experiments(outcomes: Iterable[Outcome], metric: str, *, anyway: bool) -> list[Experiment]:
    """All experiments, in the order of data set, network and size."""
    found = []
    for name, runs in tournament.experiments(outcomes).items():
        first = runs[0]
        rows, verdict, notes = _rows(runs, metric, anyway)
        found.append(Experiment(name, **first.place, rows=rows, verdict=verdict, notes=notes))
    return sorted(found, key=lambda one: (one.data, one.protocol, one.network, one.dim))


def curves(runs: Sequence[Outcome], metric: str) -> tuple[str, list[tuple[float, float]]]:
    """How a loss converged: the part that was measured after epochs, and its mean over repetitions."""
    logs = [run.history() for run in runs]
    for part in ("validation", "test"):
        every = [dict(metric_points(log, part, metric)) for log in logs]
        epochs = sorted(set.intersection(*map(set, every))) if every else []
        if len(epochs) > 1:
            return part, [(epoch, statistics.fmean(points[epoch] for points in every)) for epoch in epochs]
    return "", []


def _rows(runs: Sequence[Outcome], metric: str, anyway: bool) -> tuple[list[Row], Verdict, list[str]]:
    found = comparison.compare(runs, metric=metric, anyway=anyway, samples=DRAWS["classes"])
    if _lacks_intervals(found):  # old runs do not know the classes of their queries
        other = comparison.compare(runs, metric=metric, anyway=anyway, over="queries", samples=DRAWS["queries"])
        found = found if _lacks_intervals(other) else other
    names = [column.name for column in found.table.columns]
    groups = comparison.named(runs)
    rows = []
    for cells in found.table.rows:
        facts = dict(zip(names, cells, strict=True))
        own = groups[str(facts["loss"])]
        rows.append(
            Row(
                loss=str(facts["loss"]),
                runs=own,
                rank=facts["rank"] if isinstance(facts["rank"], int) else None,
                score=statistics.fmean(run.score(metric) for run in own),
                std=_share(facts.get("std")),
                low=_share(facts.get("low")),
                high=_share(facts.get("high")),
                p=_number(facts.get("p")),
                beside=_beside(own, metric),
                seconds=statistics.fmean(run.seconds for run in own),
                memory=_number(facts.get("MiB")),
            )
        )
    told = set(found.verdict.notes)
    notes = [note for note in found.table.notes if note not in told and note != comparison.REFUSED]
    order = (lambda row: -row.score) if found.ranked else (lambda row: 0.0)
    return sorted(rows, key=lambda row: (row.is_baseline, order(row), row.loss)), found.verdict, notes


def _lacks_intervals(found: comparison.Comparison) -> bool:
    return any(note.startswith("no intervals") for note in found.table.notes)


def _beside(runs: Sequence[Outcome], metric: str) -> dict[str, float]:
    """Means of the metrics that all repetitions have."""
    found = {}
    for name in BESIDE:
        values = [(run.metrics.get("test") or {}).get(name) for run in runs]
        numbers = [float(value) for value in values if isinstance(value, (int, float))]
        if name != metric and len(numbers) == len(runs):
            found[name] = statistics.fmean(numbers)
    return found


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, (int, float)) else None


def _share(percent: object) -> float | None:
    value = _number(percent)
    return None if value is None else value / 100
