"""Runs as the page compares them."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from nearfar.bench.fairness import judge
from nearfar.bench.results import Outcome, find, repetitions, unfinished
from nearfar.bench.tournaments import experiments, labels, tournament
from nearfar.training.run import RunError, finite

CURVE = "recall@1"
POINTS = 200  # of a curve


def listed(places: Sequence[str | Path]) -> dict[str, Any]:
    """The finished runs with scores and curves, the names of the others, and the metrics that there are."""
    outcomes = _outcomes(places)
    waiting = [folder.absolute().name for folder in unfinished(*places)]
    found: dict[str, Any] = finite(
        {"runs": [_run(outcome) for outcome in outcomes], "unfinished": waiting, "metrics": _metrics(outcomes)}
    )
    return found


def leaderboard(places: Sequence[str | Path], metric: str = "recall@1") -> dict[str, Any]:
    """Losses by rank in each experiment, whether each is fair, and the tournament over the fair ones.

    A loss has a rank only where the comparison is fair; baselines have none.
    """
    outcomes = _outcomes(places)
    known = _metrics(outcomes)
    if outcomes and metric not in known:
        raise ValueError(f"metric is {metric!r}; the runs have {', '.join(known)}")
    tables, fair = [], {}
    for name, runs in experiments(outcomes).items():
        measured = [run for run in runs if _score(run, metric) is not None]
        verdict = judge(measured)
        rows = _rows(measured, metric)
        scores = {row["loss"]: row["mean"] for row in rows if not row["baseline"]}
        for row in rows:
            ranked = verdict.fair and not row["baseline"] and len(scores) > 1
            row["rank"] = 1 + sum(other > row["mean"] for other in scores.values()) if ranked else None
        if verdict.fair and len(scores) > 1:
            fair[name] = scores
        tables.append(
            {
                "name": name,
                "fair": verdict.fair,
                "reasons": verdict.reasons,
                "notes": verdict.notes,
                "rows": sorted(rows, key=lambda row: -row["mean"]),
            }
        )
    found: dict[str, Any] = finite(
        {"metric": metric, "metrics": known, "experiments": tables, "tournament": _tournament(fair)}
    )
    return found


def _outcomes(places: Sequence[str | Path]) -> list[Outcome]:
    """All finished runs; a folder in which none is finished yet has none to show."""
    found: list[Outcome] = []
    for place in places:
        try:
            found += find(place)
        except (RunError, FileNotFoundError):
            continue
    return list({outcome.folder.resolve(): outcome for outcome in found}.values())


def _rows(runs: Iterable[Outcome], metric: str) -> list[dict[str, Any]]:
    groups = list(repetitions(runs).values())
    rows = []
    for word, group in zip(labels(groups), groups, strict=True):
        values = [run.score(metric) for run in group]
        rows.append(
            {
                "loss": word,
                "mean": statistics.fmean(values),
                "std": statistics.stdev(values) if len(values) > 1 else None,
                "runs": len(values),
                "seconds": statistics.fmean(run.seconds for run in group),
                "baseline": group[0].is_baseline,
            }
        )
    return rows


def _tournament(scores: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    """Over the experiments that have all losses of the largest."""
    everyone = max((set(each) for each in scores.values()), key=len, default=set())
    entered = {name: each for name, each in scores.items() if set(each) == everyone}
    if not entered:
        return {"experiments": [], "rows": []}
    rows = [
        {"loss": row.loss, "total": row.total, "average": row.average, "std": row.std, "ranks": list(row.ranks)}
        for row in tournament(entered)
    ]
    return {"experiments": list(entered), "rows": rows}


def _run(outcome: Outcome) -> dict[str, Any]:
    test = outcome.metrics.get("test")
    scores = (
        {name: value for name, value in test.items() if isinstance(value, float)} if isinstance(test, Mapping) else {}
    )
    return {
        "name": outcome.name,
        "loss": outcome.loss,
        "network": outcome.network,
        "dim": outcome.dim,
        "data": outcome.data,
        "seed": outcome.seed,
        "protocol": outcome.protocol,
        "seconds": outcome.seconds,
        "memory": outcome.memory,
        "scores": scores,
        "curves": _curves(outcome),
    }


def _curves(outcome: Outcome) -> dict[str, list[list[float]]]:
    """[epoch, value] of the loss and of recall@1 by part, thinned out."""
    found: dict[str, list[list[float]]] = {}
    for line in outcome.history():
        epoch = line.get("epoch")
        if not isinstance(epoch, int):
            continue
        for part, values in (line.get("metrics") or {}).items():
            value = values.get(CURVE) if isinstance(values, Mapping) else None
            if isinstance(value, (int, float)):
                found.setdefault(str(part), []).append([epoch + 1, float(value)])
    return {part: points[:: 1 + len(points) // POINTS] for part, points in found.items()}


def _metrics(outcomes: Iterable[Outcome]) -> list[str]:
    """What all runs were measured by."""
    sets = [
        [name for name, value in test.items() if isinstance(value, float)]
        for test in (outcome.metrics.get("test") for outcome in outcomes)
        if isinstance(test, Mapping)
    ]
    return [name for name in sets[0] if all(name in other for other in sets)] if sets else []


def _score(outcome: Outcome, metric: str) -> float | None:
    try:
        return outcome.score(metric)
    except ValueError:
        return None
