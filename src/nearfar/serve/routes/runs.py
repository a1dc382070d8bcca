"""Routes that compare training runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Query

from nearfar.serve.errors import ApiError, error_responses
from nearfar.serve.routes import API
from nearfar.serve.runs import leaderboard, listed


def router(places: Sequence[str | Path]) -> APIRouter:
    """Create the routes for runs and the leaderboard.

    Args:
        places: Folders of runs. Requests cannot name any other.
    """
    routes = APIRouter(prefix=API, tags=["runs"])

    @routes.get("/runs", responses=error_responses())
    def list_runs() -> dict[str, Any]:
        """Return the finished runs with their scores and curves."""
        return listed(places)

    @routes.get("/leaderboard", responses=error_responses())
    def show_leaderboard(
        metric: Annotated[str, Query(max_length=40, description="A metric of the test classes.")] = "recall@1",
    ) -> dict[str, Any]:
        """Rank the losses where the comparison is fair."""
        try:
            return leaderboard(places, metric)
        except ValueError as error:
            raise ApiError(422, str(error)) from None

    return routes
