"""nearfar tournament"""

from __future__ import annotations

from nearfar.cli.app import app
from nearfar.cli.bench_compare import Anyway, Format, Metric, Out, Over, Runs, show


@app.command(name="tournament", short_help="Rank losses over many experiments, as the thesis does.")
def hold_tournament(
    runs: Runs,
    metric: Metric = "recall@1",
    anyway: Anyway = False,
    format: Format = "text",
    over: Over = "classes",
    out: Out = None,
) -> None:
    """Rank losses in each experiment (data set, network, size of the embedding) and add the ranks up.

    Each experiment has to be fair on its own; several seeds or folds count by their mean. Equal scores share the better
    rank. The deviation is that of a sample, n − 1. "beats" and "loses" count pairs that differ clearly (p below 0.05).

    Example: nearfar tournament bench/digits

    Example: nearfar tournament bench/cub bench/cub_dims --format csv -o tournament.csv
    """
    from nearfar.bench.comparison import outcomes, ranking

    show(ranking.standings(outcomes.find(*runs), metric=metric, anyway=anyway, over=over), runs, format, out)
