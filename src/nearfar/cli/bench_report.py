"""nearfar bench report"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from nearfar.cli.bench import bench
from nearfar.cli.output import say
from nearfar.utils.progress import bars


@bench.command(name="report", short_help="Show runs on a page: ranks, plots, curves, time and memory.")
def report_runs(
    places: Annotated[
        list[Path],
        typer.Argument(metavar="PLACES…", help="Run folders, or folders that hold some, such as bench/digits."),
    ],
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", metavar="FILE", help="The page; leaderboard.html in the first place unless told."),
    ] = None,
    title: Annotated[str | None, typer.Option(help="What stands above it; the name of the first place.")] = None,
    metric: Annotated[str, typer.Option(help="Which number of the test: recall@1, map@r, nmi, …")] = "recall@1",
    anyway: Annotated[bool, typer.Option("--anyway", help="Rank what is unfair as well, marked UNFAIR.")] = False,
) -> None:
    """Write one page about many runs. It is a single file and needs no network.

    Losses are ranked within each experiment (data set, network, size, protocol), and only where the runs differ in the
    loss and its own settings alone; otherwise they are shown with the reasons, and not ranked.

    Example: nearfar bench report bench/digits -o digits.html
    """
    from nearfar.reports import leaderboard

    with bars() as watch:
        file = leaderboard.write(places, out, title=title, metric=metric, anyway=anyway, watch=watch)
    say(f"wrote {file}")
