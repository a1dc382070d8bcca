"""Routes for training runs: their list, and the leaderboard page."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import HTMLResponse

from nearfar.bench.comparison.runs import originals, read
from nearfar.reports import leaderboard, pages
from nearfar.serve.costly import CostlyWork
from nearfar.serve.errors import ApiError, error_responses
from nearfar.serve.routes import API
from nearfar.serve.security import client_of
from nearfar.training.run.folder import RunFolder, finite
from nearfar.training.run.provenance import LABELS
from nearfar.training.run.reader import Run
from nearfar.utils.deadline import check
from nearfar.utils.folders import DAMAGED

KEPT = 16  # responses, until a run changes
HEADERS = {"content-security-policy": f"{pages.policy(script=True)}; base-uri 'none'; frame-ancestors 'none'"}

Folders = tuple[tuple[Path, tuple[Any, ...]], ...]  # of runs, with what tells whether a finished one has changed


def router(places: Sequence[str | Path], costly: CostlyWork) -> APIRouter:
    """Create the routes for runs and the leaderboard."""
    routes = APIRouter(tags=["runs"])

    @lru_cache(maxsize=KEPT)
    def content(folders: Folders, metric: str | None) -> str:
        return list_runs(folders) if metric is None else leaderboard_page(folders, metric)

    async def answer(request: Request, metric: str | None) -> str:
        return await costly(client_of(request.scope), ("runs", metric), lambda: content(run_folders(places), metric))

    @routes.get(f"{API}/runs", response_model=dict[str, Any], responses=error_responses(503))
    async def show_runs(request: Request) -> Response:
        """Return the finished runs with their scores."""
        return Response(await answer(request, None), media_type="application/json")

    @routes.get("/leaderboard", response_class=HTMLResponse, responses=error_responses(503))
    async def show_leaderboard(
        request: Request,
        metric: Annotated[str, Query(max_length=40, description="A metric of the test classes.")] = "recall@1",
    ) -> Response:
        """Return a page that ranks the losses where the comparison is fair."""
        try:
            return HTMLResponse(await answer(request, metric), headers=HEADERS)
        except ValueError as error:
            raise ApiError(422, str(error)) from None

    return routes


def run_folders(places: Sequence[str | Path]) -> Folders:
    """Find run folders, with names, sizes and dates of their files if the run has finished."""
    folders: dict[Path, tuple[Path, tuple[Any, ...]]] = {}
    for place in places:
        for folder, below, names in os.walk(place, followlinks=True):
            check()
            files = RunFolder(folder)
            if files.recipe.name in names or LABELS in names:
                below.clear()
                finished = files.metrics.name in names
                facts = tuple(_facts_of(files.folder / name) for name in sorted(names)) if finished else ()
                folders[files.folder.resolve()] = files.folder, facts
            below[:] = sorted(name for name in below if not name.startswith(".") and DAMAGED not in name)
    return tuple(folders.values())


def list_runs(folders: Folders) -> str:
    """Return the finished runs, and the names of unfinished and damaged ones, as JSON."""
    runs, unfinished, damaged = _read(folders)
    listed = {
        "runs": [_facts(run) for run in runs],
        "unfinished": unfinished,
        "damaged": [{"name": name, "reason": reason} for name, reason in damaged],
        "metrics": _metrics(runs),
    }
    return json.dumps(finite(listed), ensure_ascii=False, allow_nan=False)


def leaderboard_page(folders: Folders, metric: str) -> str:
    """Return the leaderboard of the finished runs, which names the others."""
    runs, unfinished, damaged = _read(folders)
    left_out = [f"{name} is not finished" for name in unfinished]
    left_out += [f"{name} cannot be read: {reason}" for name, reason in damaged]
    if not runs:
        return pages.render("base.html", "Leaderboard", lead=". ".join(["No run has finished yet", *left_out]))
    metrics = _metrics(runs)
    if metric not in metrics:
        raise ValueError(f"metric is {metric!r}; the runs have {', '.join(metrics)}")
    return leaderboard.html(runs, metric=metric, left_out=left_out, metrics=metrics)


def _read(folders: Folders) -> tuple[list[Run], list[str], list[tuple[str, str]]]:
    """Return finished runs, names of unfinished ones, and names and reasons of those that cannot be read."""
    runs, damaged = [], []
    for folder, facts in folders:
        if not facts:
            continue
        try:
            run = read(folder)
            _ = _facts(run), run.log, run.queries()
        except Exception as error:  # files may contain anything
            reason = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
            damaged.append((Run(folder).name, reason.replace(str(folder), Run(folder).name)))  # no path on the server
        else:
            runs.append(run)
    return originals(runs), [Run(folder).name for folder, facts in folders if not facts], damaged


def _facts_of(file: Path) -> tuple[Any, ...]:
    try:
        status = file.stat()
    except OSError as error:
        return file.name, error.errno
    return file.name, status.st_ino, status.st_size, status.st_mtime_ns


def _facts(run: Run) -> dict[str, Any]:
    """Return what a list shows of a run."""
    test = run.metrics.get("test")
    scores = test.items() if isinstance(test, Mapping) else ()
    return {
        "name": run.name,
        "loss": run.loss,
        **run.place,
        "seed": run.seed,
        "seconds": run.seconds,
        "memory": run.memory,
        "scores": {name: value for name, value in scores if isinstance(value, float)},
    }


def _metrics(runs: Sequence[Run]) -> list[str]:
    """Return the metrics that all runs have."""
    scores = [_facts(run)["scores"] for run in runs]
    return [name for name in scores[0] if all(name in other for other in scores)] if scores else []
