"""Routes that compare runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Query

from nearfar.serve.errors import Refusal
from nearfar.serve.routes.common import API, refusals
from nearfar.serve.runs import leaderboard, listed


def router(places: Sequence[str | Path]) -> APIRouter:
    """Runs and who leads; folders are those the server was started with, never any that a request names."""
    routes = APIRouter(prefix=API, tags=["runs"])

    @routes.get("/runs", responses=refusals())
    def list_runs() -> dict[str, Any]:
        """The finished runs with their scores and curves."""
        return listed(places)

    @routes.get("/leaderboard", responses=refusals())
    def show_leaderboard(
        metric: Annotated[str, Query(max_length=40, description="Of the test classes.")] = "recall@1",
    ) -> dict[str, Any]:
        """Losses by rank, and whether the comparison is fair."""
        try:
            return leaderboard(places, metric)
        except ValueError as error:
            raise Refusal(422, str(error)) from None

    return routes
