"""nearfar tournament"""

from __future__ import annotations

from typing import Annotated

from typer import Option

from nearfar.cli.app import app
from nearfar.cli.bench import show, table_file
from nearfar.cli.options import Anyway, ChartFormat, Force, Metric, OtherCode, Out, Runs

Style = Annotated[str, Option(help="friedman, or thesis for sums of ranks as in its Table 11.")]


@app.command(name="tournament", short_help="Rank losses over many experiments and datasets.")
def hold_tournament(
    runs: Runs,
    metric: Metric = "recall@1",
    style: Style = "friedman",
    anyway: Anyway = False,
    other_code: OtherCode = None,
    format: ChartFormat = "text",
    out: Out = None,
    force: Force = False,
) -> None:
    """Rank losses in each experiment (dataset, network, size of the embedding) and average their ranks.

    Each experiment has to be fair by itself. Scores are means over seeds and folds. Equal scores share the middle of
    their ranks. The Friedman test and the critical difference of Nemenyi are over datasets: experiments on one dataset
    are averaged first. "beats" and "loses" count significant differences within experiments.

    Example: nearfar tournament bench/digits

    Example: nearfar tournament bench/cub bench/cars196 bench/sop --format svg -o ranks.svg

    Example: nearfar tournament bench/cub bench/cub_dims --style thesis --format csv -o tournament.csv
    """
    from nearfar.bench import find
    from nearfar.bench.comparison.tournament import tournament

    out = table_file(out, format, runs, force=force)
    found = find(*runs)
    show(tournament(found, metric=metric, anyway=anyway, other_code=other_code, style=style), runs, format, out)
