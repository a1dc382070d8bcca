"""nearfar report"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from nearfar.cli.app import app
from nearfar.cli.tables import say
from nearfar.progress import bars


@app.command(name="report", short_help="Show a run on a page: curves, metrics, what it finds and where it fails.")
def report_run(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The run folder.")],
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="The page; report.html in RUN unless told.")] = None,
    map: Annotated[str, typer.Option(help="How the map is made: pca, tsne, or umap (needs umap-learn).")] = "pca",
    queries: Annotated[int, typer.Option(metavar="N", help="Queries to show with what they find.")] = 8,
    worst: Annotated[int, typer.Option(metavar="N", help="Queries to show that find their class worst.")] = 8,
    device: Annotated[str, typer.Option(help="Where to compute: cpu, cuda, cuda:1, …")] = "cpu",
    seed: Annotated[int, typer.Option(help="Seed of what is drawn.")] = 0,
) -> None:
    """Write one page that tells everything about a run. It is a single file and needs no network.

    Example: nearfar report runs/first --map tsne
    """
    from nearfar.training.report import report

    if not run.is_dir():
        raise FileNotFoundError(f"{run} is not there; needed is a run folder, as nearfar train leaves one")
    with bars() as watch:
        file = report(run, out=out, map=map, queries=queries, worst=worst, device=device, seed=seed, watch=watch)
    say(f"wrote {file}")
