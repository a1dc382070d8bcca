"""Routes that compare training runs: the list of runs and the leaderboard."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response

from nearfar.bench.comparison.ranking import RankedLoss, Ranking, experiments
from nearfar.bench.comparison.runs import find, unfinished
from nearfar.bench.comparison.tables import left_out_note, statistics_notes
from nearfar.bench.comparison.tournament import Tournament, of_rankings
from nearfar.serve.costly import CostlyWork
from nearfar.serve.errors import ApiError, error_responses
from nearfar.serve.routes import API
from nearfar.serve.security import client_of
from nearfar.training.run.folder import RunFolder, finite
from nearfar.training.run.provenance import LABELS
from nearfar.training.run.reader import Run
from nearfar.utils.deadline import check

CURVE_METRIC = "recall@1"
CURVE_POINTS = 200
KEPT = 16  # responses, until a run changes


def router(places: Sequence[str | Path], costly: CostlyWork) -> APIRouter:
    """Create the routes for runs and the leaderboard."""
    routes = APIRouter(prefix=API, tags=["runs"])

    @lru_cache(maxsize=KEPT)
    def content(version: str, metric: str | None) -> bytes:
        shown = list_runs(places) if metric is None else leaderboard(places, metric)
        return json.dumps(shown, ensure_ascii=False, allow_nan=False).encode()

    async def answer(request: Request, metric: str | None) -> Response:
        data = await costly(client_of(request.scope), ("runs", metric), lambda: content(_version(places), metric))
        return Response(data, media_type="application/json")

    @routes.get("/runs", response_model=dict[str, Any], responses=error_responses(503))
    async def show_runs(request: Request) -> Response:
        """Return the finished runs with their scores and curves."""
        return await answer(request, None)

    @routes.get("/leaderboard", response_model=dict[str, Any], responses=error_responses(503))
    async def show_leaderboard(
        request: Request,
        metric: Annotated[str, Query(max_length=40, description="A metric of the test classes.")] = "recall@1",
    ) -> Response:
        """Rank the losses where the comparison is fair."""
        try:
            return await answer(request, metric)
        except ValueError as error:
            raise ApiError(422, str(error)) from None

    return routes


def _version(places: Sequence[str | Path]) -> str:
    """Return a hash of the names, sizes and dates of all files that results come from."""
    known: list[tuple[Any, ...]] = []
    for place in places:
        known.append(_facts_of(place))
        for folder, below, names in os.walk(place, followlinks=True):
            files = RunFolder(folder)
            if files.recipe.name in names or LABELS in names:
                below.clear()
                finished = files.metrics.name in names
                known += [_facts_of(files.folder / name) for name in sorted(names)] if finished else [(folder,)]
            below[:] = sorted(name for name in below if not name.startswith("."))
            check()
    return hashlib.sha256(repr(known).encode()).hexdigest()


def _facts_of(file: str | Path) -> tuple[Any, ...]:
    try:
        found = os.stat(file)
    except OSError as error:
        return str(file), error.errno
    return str(file), found.st_ino, found.st_size, found.st_mtime_ns


def list_runs(places: Sequence[str | Path]) -> dict[str, Any]:
    """Return the finished runs with scores and curves, and the names of unfinished and damaged runs."""
    outcomes, damaged = _outcomes(places)
    existing = [place for place in places if Path(place).is_dir()]
    found: dict[str, Any] = finite(
        {
            "runs": [_run(outcome) for outcome in outcomes],
            "unfinished": [folder.absolute().name for folder in unfinished(*existing)],
            "damaged": damaged,
            "metrics": _metrics(outcomes),
        }
    )
    return found


def leaderboard(places: Sequence[str | Path], metric: str = "recall@1") -> dict[str, Any]:
    """Rank the losses of each experiment, and over all fair experiments in a tournament.

    Losses have ranks if the comparison is fair and they can be told apart by a test; baselines have none.
    """
    outcomes, damaged = _outcomes(places)
    known = _metrics(outcomes)
    if outcomes and metric not in known:
        raise ValueError(f"metric is {metric!r}; the runs have {', '.join(known)}")
    measured = [run for run in outcomes if run.has(metric)]
    ranked = experiments(measured, metric=metric)
    tournament = of_rankings([one for one in ranked if one.verdict.fair], measured)
    found: dict[str, Any] = finite(
        {
            "metric": metric,
            "metrics": known,
            "experiments": [_experiment(one) for one in ranked],
            "tournament": _tournament(tournament),
            "damaged": damaged,
        }
    )
    return found


def _outcomes(places: Sequence[str | Path]) -> tuple[list[Run], list[dict[str, str]]]:
    """Return all finished runs, and the names and reasons of those that cannot be read."""
    damaged: dict[Path, dict[str, str]] = {}
    sound: list[Run] = []
    for outcome in (each for place in places for each in _read(Path(place), damaged)):
        try:
            _facts(outcome)
        except Exception as error:  # a manifest may contain anything
            _record(damaged, outcome.folder, error)
        else:
            sound.append(outcome)
    try:  # read once more together, to detect copies of one run
        found = find(*(outcome.folder for outcome in sound)) if sound else []
    except Exception:  # one was deleted in the meantime
        found = sound
    return found, list(damaged.values())


def _read(place: Path, damaged: dict[Path, dict[str, str]]) -> list[Run]:
    """Return the finished runs in or below a folder, one by one if they cannot be read together."""
    try:
        return find(place)
    except Exception as error:
        run = RunFolder(place)
        if run.metrics.is_file():
            _record(damaged, place, error)
        if run.metrics.is_file() or run.recipe.is_file() or not place.is_dir():
            return []
    below = [each for each in sorted(place.iterdir()) if each.is_dir() and not each.name.startswith(".")]
    return [outcome for each in below for outcome in _read(each, damaged)]


def _record(damaged: dict[Path, dict[str, str]], folder: Path, error: Exception) -> None:
    """Record why a run cannot be read, without its path on the server."""
    name = folder.absolute().name
    reason = f"{type(error).__name__}: {error}" if not isinstance(error, ValueError) else str(error)
    damaged[folder.resolve()] = {"name": name, "reason": reason.replace(str(folder), name)}


def _experiment(one: Ranking) -> dict[str, Any]:
    """Return an experiment with its losses by score."""
    verdict = one.verdict
    rows = sorted(one.rows, key=lambda row: -row.score)
    return {
        "name": one.name,
        "fair": verdict.fair,
        "reasons": verdict.reasons,
        "notes": verdict.notes,
        "other_code": verdict.other_code,
        "test_looks": verdict.test_looks,
        "statistics": statistics_notes(one, "interval"),
        "rows": [_row(row) for row in rows],
    }


def _row(row: RankedLoss) -> dict[str, Any]:
    return {
        "loss": row.loss,
        "mean": row.score,
        "std": row.std,
        "runs": len(row.runs),
        "seconds": row.seconds,
        "baseline": row.is_baseline,
        "rank": row.rank,
        "group": row.group,
        "low": row.low,
        "high": row.high,
    }


def _tournament(found: Tournament) -> dict[str, Any]:
    """Return the tournament of the losses that all experiments have."""
    if len(found.rows) < 2:
        return {"experiments": [], "rows": [], "note": ""}
    rows = [row._asdict() for row in found.rows]
    return {"experiments": list(found.scores), "rows": rows, "note": left_out_note(found)}


def _run(outcome: Run) -> dict[str, Any]:
    return {**_facts(outcome), "curves": _curves(outcome)}


def _facts(outcome: Run) -> dict[str, Any]:
    """Return the columns of a run in the table."""
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
    }


def _curves(outcome: Run) -> dict[str, list[list[float]]]:
    """Return points [epoch, recall@1] of each part, at most a few hundred; empty if the log is damaged."""
    found: dict[str, list[list[float]]] = {}
    try:
        lines = [line for line in outcome.log if isinstance(line, Mapping)]
    except (ValueError, OSError):
        return found
    for line in lines:
        epoch = line.get("epoch")
        if not isinstance(epoch, int):
            continue
        metrics = line.get("metrics")
        for part, values in metrics.items() if isinstance(metrics, Mapping) else ():
            value = values.get(CURVE_METRIC) if isinstance(values, Mapping) else None
            if isinstance(value, (int, float)):
                found.setdefault(str(part), []).append([epoch + 1, float(value)])
    return {part: points[:: 1 + len(points) // CURVE_POINTS] for part, points in found.items()}


def _metrics(outcomes: Iterable[Run]) -> list[str]:
    """Return the metrics that all runs have."""
    sets = [
        [name for name, value in test.items() if isinstance(value, float)]
        for test in (outcome.metrics.get("test") for outcome in outcomes)
        if isinstance(test, Mapping)
    ]
    return [name for name in sets[0] if all(name in other for other in sets)] if sets else []
