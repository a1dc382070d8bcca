"""nearfar tournament"""

from __future__ import annotations

from nearfar.cli.app import app
from nearfar.cli.bench import show
from nearfar.cli.options import Anyway, Format, Metric, Out, Over, Runs


@app.command(name="tournament", short_help="Rank losses over many experiments, as the thesis does.")
def hold_tournament(
    runs: Runs,
    metric: Metric = "recall@1",
    anyway: Anyway = False,
    format: Format = "text",
    over: Over = "classes",
    out: Out = None,
) -> None:
    """Rank losses in each experiment (dataset, network, size of the embedding) and add up their ranks.

    Each experiment has to be fair by itself. Scores are means over seeds and folds. Equal scores share the better rank.
    The standard deviation has n − 1 degrees of freedom. "beats" and "loses" count significant differences (p < 0.05).

    Example: nearfar tournament bench/digits

    Example: nearfar tournament bench/cub bench/cub_dims --format csv -o tournament.csv
    """
    from nearfar.bench.comparison import loss_ranking, outcomes

    show(loss_ranking.standings(outcomes.find(*runs), metric=metric, anyway=anyway, over=over), runs, format, out)
