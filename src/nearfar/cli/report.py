"""nearfar report"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from nearfar.cli.app import app
from nearfar.cli.output import say
from nearfar.utils.atomic import write_text
from nearfar.utils.progress import bars


@app.command(name="report", short_help="Show a run on a page, or runs beside what the papers print.")
def report_run(
    runs: Annotated[
        list[Path] | None, typer.Argument(metavar="RUN", help="The run folder; with --papers any number of them.")
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="The page; report.html in RUN unless told.")] = None,
    papers: Annotated[
        bool, typer.Option("--papers", help="A table: our numbers beside the papers'. Without RUN, what they print.")
    ] = False,
    table: Annotated[
        str | None, typer.Option(metavar="NAME", help="With --papers: print that table, such as thesis:7c.")
    ] = None,
    metric: Annotated[str, typer.Option(help="With --papers: which number.")] = "recall@1",
    format: Annotated[str, typer.Option(help="With --papers: text, csv, latex or html.")] = "text",
    map: Annotated[str, typer.Option(help="How the map is made: pca, tsne, or umap (needs umap-learn).")] = "pca",
    queries: Annotated[int, typer.Option(metavar="N", help="Queries to show with what they find.")] = 8,
    worst: Annotated[int, typer.Option(metavar="N", help="Queries to show that find their class worst.")] = 8,
    device: Annotated[str, typer.Option(help="Where to compute: auto, cpu, cuda, cuda:1, …")] = "cpu",
    seed: Annotated[int, typer.Option(help="Seed of what is drawn.")] = 0,
) -> None:
    """Write one page that tells everything about a run. It is a single file and needs no network.

    Example: nearfar report runs/first --map tsne

    Example: nearfar report --papers bench/cub
    """
    if papers or table is not None:
        _beside_papers(runs or [], out, table, metric, format)
        return
    from nearfar.reports.run_report import report

    if not runs or len(runs) > 1:
        raise ValueError(f"{len(runs or [])} run folders are given; a page shows one, and --papers any number")
    run = runs[0]
    if not run.is_dir():
        raise FileNotFoundError(f"{run} is not there; needed is a run folder, as nearfar train leaves one")
    with bars() as watch:
        file = report(run, out=out, map=map, queries=queries, worst=worst, device=device, seed=seed, watch=watch)
    say(f"wrote {file}")


def _beside_papers(runs: list[Path], out: Path | None, table: str | None, metric: str, format: str) -> None:
    from nearfar.bench.comparison import outcomes, published
    from nearfar.reports import tables

    if table is not None:
        found = published.printed(table)
    else:
        found = published.beside(outcomes.find(*runs), metric=metric) if runs else published.catalogue()
    written = tables.write(found, format)
    if out is None:
        print(written)
    else:
        write_text(out, written + "\n")
        say(f"wrote {out}")
