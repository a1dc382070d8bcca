"""nearfar report"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from nearfar.cli import complete
from nearfar.cli.app import app
from nearfar.cli.options import Device, Force, Format, Metric, Seed
from nearfar.cli.output import output_file, print_text, say
from nearfar.utils.progress import bars


@app.command(name="report", short_help="Write a page about a run, or compare runs with the papers.")
def report_run(
    runs: Annotated[
        list[Path] | None,
        Argument(
            metavar="RUN", help="The run folder; with --papers any number of them.", autocompletion=complete.results
        ),
    ] = None,
    out: Annotated[
        Path | None, Option("-o", "--out", metavar="FILE", help="The page; report.html in RUN by default.")
    ] = None,
    papers: Annotated[
        bool, Option("--papers", help="Compare with published numbers. Without RUN, list the published tables.")
    ] = False,
    table: Annotated[
        str | None, Option(metavar="NAME", help="With --papers: print that table, such as thesis:7c.")
    ] = None,
    metric: Metric = "recall@1",
    format: Format = "text",
    map: Annotated[str, Option(help="Projection of the map: pca, tsne, or umap (needs umap-learn).")] = "pca",
    queries: Annotated[int, Option(metavar="N", help="Random queries to show with their nearest neighbors.")] = 8,
    worst: Annotated[int, Option(metavar="N", help="Queries with the lowest average precision to show.")] = 8,
    device: Device = "cpu",
    seed: Seed = 0,
    force: Force = False,
) -> None:
    """Write a report of one run: a single HTML file that needs no network.

    Example: nearfar report runs/first --map tsne

    Example: nearfar report --papers bench/cub
    """
    if papers or table is not None:
        _beside_papers(runs or [], out, table, metric, format, force)
        return
    from nearfar.reports.run_report import report

    if not runs or len(runs) > 1:
        raise ValueError(f"{len(runs or [])} run folders are given; a report shows one, and --papers any number")
    run = runs[0]
    if not run.is_dir():
        raise FileNotFoundError(f"{run} does not exist; needed is a run folder written by nearfar train")
    with bars() as watch:
        file = report(
            run, out=out, map=map, queries=queries, worst=worst, device=device, seed=seed, force=force, watch=watch
        )
    say(f"wrote {file}")


def _beside_papers(
    runs: list[Path], out: Path | None, table: str | None, metric: str, format: str, force: bool
) -> None:
    from nearfar.bench import find
    from nearfar.bench.comparison import published
    from nearfar.reports import table_page

    out = output_file(out, "table" if format == "html" else None, *runs, force=force)
    if table is not None:
        found = published.printed(table)
    else:
        found = published.beside(find(*runs), metric=metric) if runs else published.catalog()
    print_text(out, table_page.write(found, format))
