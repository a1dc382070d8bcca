"""nearfar bench compare"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from nearfar.cli.bench import bench

Runs = Annotated[
    list[Path], typer.Argument(metavar="RUNS…", help="Run folders, folders that hold some, or packed grids (.zip).")
]
Metric = Annotated[str, typer.Option(help="The metric: recall@1, map@r, nmi, …")]
Part = Annotated[str, typer.Option(help="The classes to compare on: test, or validation to choose settings.")]
Anyway = Annotated[bool, typer.Option("--anyway", help="Rank unfair comparisons as well, marked UNFAIR.")]
Format = Annotated[str, typer.Option(help="text, csv, latex or html.")]
Over = Annotated[str, typer.Option(help="What is drawn for intervals and p-values: classes or queries.")]
Out = Annotated[Path | None, typer.Option("-o", "--out", metavar="FILE", help="Write to a file.")]


@bench.command(name="compare", short_help="Rank losses, if their runs differ in the loss alone.")
def compare_runs(
    runs: Runs,
    metric: Metric = "recall@1",
    part: Part = "test",
    anyway: Anyway = False,
    format: Format = "text",
    over: Over = "classes",
    out: Out = None,
) -> None:
    """Rank losses by a metric of the test classes. Runs that differ only in seed or fold make one row.

    If runs differ in more than the loss and its own settings, the table is printed without ranks, with the differences
    that make the comparison unfair, and the exit code is 1. --anyway ranks them and marks the table UNFAIR.

    Example: nearfar bench compare bench/digits

    Example: nearfar bench compare runs/one runs/two --metric map@r --format latex -o table.tex

    Example: nearfar bench compare docs/results/cub_mining.zip --part validation
    """
    from nearfar.bench.comparison import loss_ranking, outcomes

    found = loss_ranking.compare(outcomes.find(*runs), metric=metric, part=part, anyway=anyway, over=over)
    show(found, runs, format, out)


def show(found: object, runs: list[Path], format: str, out: Path | None) -> None:
    """Write a ranking or standings, and name unfinished runs; exit code 1 if the comparison is not ranked."""
    from nearfar.bench.comparison import outcomes
    from nearfar.bench.comparison.loss_ranking import LossRanking, Standings
    from nearfar.cli.output import say
    from nearfar.reports.table_page import write
    from nearfar.utils.atomic import write_text

    assert isinstance(found, (LossRanking, Standings))
    written = write(found.table, format)
    if out is None:
        print(written)
    else:
        write_text(out, written + "\n")
        say(f"wrote {out}")
    for folder in outcomes.unfinished(*runs):
        print(f"nearfar: left out {folder}: the run is not finished", file=sys.stderr)
    if not found.ranked:
        print("nearfar: not ranked, as the comparison is unfair; --anyway ranks it nevertheless", file=sys.stderr)
        raise typer.Exit(1)
