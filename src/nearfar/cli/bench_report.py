"""nearfar bench report"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from nearfar.cli.bench import bench
from nearfar.cli.output import say
from nearfar.utils.progress import bars


@bench.command(name="report", short_help="Write a leaderboard page: ranks, charts, curves, time and memory.")
def report_runs(
    places: Annotated[
        list[Path],
        typer.Argument(metavar="RUNS…", help="Run folders, folders that hold some, or packed grids (.zip)."),
    ],
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", metavar="FILE", help="The page; leaderboard.html in the first folder by default."),
    ] = None,
    title: Annotated[str | None, typer.Option(help="The title; the name of the first folder by default.")] = None,
    metric: Annotated[str, typer.Option(help="The metric of the test classes: recall@1, map@r, nmi, …")] = "recall@1",
    anyway: Annotated[bool, typer.Option("--anyway", help="Rank unfair comparisons as well, marked UNFAIR.")] = False,
) -> None:
    """Write a leaderboard of many runs: a single HTML file that needs no network.

    Losses are ranked within each experiment (dataset, network, size, protocol), and only if the runs differ in nothing
    but the loss and its own settings. Otherwise they are listed without ranks, with the reasons.

    Example: nearfar bench report bench/digits -o digits.html
    """
    from nearfar.reports import leaderboard

    with bars() as watch:
        file = leaderboard.write(places, out, title=title, metric=metric, anyway=anyway, watch=watch)
    say(f"wrote {file}")
