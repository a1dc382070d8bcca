"""The leaderboard: many runs on one page, ranked where the comparison is fair."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from nearfar.bench.comparison import tables
from nearfar.bench.comparison.ranking import RankedLoss, Ranking, experiments, judge_all
from nearfar.bench.comparison.runs import find, unfinished
from nearfar.bench.comparison.tables import Column, Table, Value
from nearfar.bench.comparison.tournament import Tournament, of_rankings
from nearfar.reports.charts import Line, interval_chart, line_chart, rank_chart, whiskers
from nearfar.reports.pages import COLORS, metric_name, render
from nearfar.training.run.packed import SUFFIX
from nearfar.training.run.reader import Run
from nearfar.utils import formatting
from nearfar.utils.atomic import write_text
from nearfar.utils.folders import claim_file
from nearfar.utils.progress import Watch

NAME = "leaderboard.html"
ORDER = ("data", "protocol", "network", "dim")  # of experiments
OTHER_METRICS = ("recall@2", "recall@4", "recall@8", "recall@10", "recall@100", "recall@1000", "map@r", "nmi")

Chart = tuple[str, str]  # title and SVG


def html(
    runs: Iterable[Run],
    *,
    title: str = "Leaderboard",
    metric: str = "recall@1",
    anyway: bool = False,
    other_code: str | None = None,
    left_out: Sequence[str] = (),
    metrics: Sequence[str] = (),
    watch: Watch = lambda work: None,
) -> str:
    """The leaderboard of finished runs as a page; if a server has one for each of some metrics, with links to these."""
    every = list(runs)
    tested = [run for run in every if run.has(metric)]
    if not tested:
        raise ValueError(f"there is nothing to show: none of {len(every)} runs has {metric!r} of the test classes")
    if missing := len(every) - len(tested):
        left_out = [*left_out, f"{missing} runs have no {metric} of the test classes"]
    progress = watch("comparing")
    if progress is not None:
        progress(0, 1)
    rankings = experiments(tested, metric=metric, anyway=anyway, other_code=other_code)
    verdict = judge_all(rankings)
    rankings.sort(key=lambda ranking: [ranking.place[key] for key in ORDER])
    ranks = of_rankings(rankings, tested)
    tournament = ranks if len(ranks.rows) > 1 else None
    colors = _colors(rankings)
    names = [[ranking.place[key] for ranking in rankings] for key in ("data", "network", "protocol")]
    return render(
        "leaderboard.html",
        title,
        lead=" · ".join(dict.fromkeys(name for column in names for name in column)),
        script=True,
        metric=metric,
        metrics=metrics,
        anyway=anyway,
        verdict=verdict,
        notes=[*left_out, *verdict.notes],
        stamp=tables.UNFAIR if anyway and not verdict.fair else "",
        figures=_figures(rankings, tournament, metric, ranked=ranks.ranked),
        tournament=_tournament(tournament) if tournament is not None and len(tournament.scores) > 1 else None,
        tournament_notes=tables.tournament_notes(tournament) if tournament is not None else [],
        tournament_chart=tournament_chart(tournament) if tournament is not None else "",
        overview=_overview(rankings) if len(rankings) > 1 else None,
        experiments=_experiments(rankings, metric, anyway),
        by_dim=_by_dim(rankings, metric, colors),
        by_network=_by_network(rankings, metric, colors),
        by_setting=_by_setting(rankings, metric),
        convergence=_convergence(rankings, metric, colors),
    )


def write(
    places: Sequence[str | Path],
    out: str | Path | None = None,
    *,
    title: str | None = None,
    metric: str = "recall@1",
    anyway: bool = False,
    other_code: str | None = None,
    force: bool = False,
    watch: Watch = lambda work: None,
) -> Path:
    """Write the leaderboard of the runs in some folders."""
    if not places:
        raise ValueError("places is empty; needed are run folders, folders that hold some, or packed grids")
    first = Path(places[0])
    packed = first.suffix == SUFFIX and first.is_file()
    runs = find(*places)
    out = out if out is not None else first.with_suffix(".html") if packed else first / NAME
    file = claim_file(out, "leaderboard", places, force=force)
    missing = [f"{folder} is not finished" for folder in unfinished(*places)]
    named = title or (first.stem if packed else first.absolute().name)
    page = html(
        runs,
        title=named,
        metric=metric,
        anyway=anyway,
        other_code=other_code,
        left_out=missing,
        watch=watch,
    )
    write_text(file, page)
    return file


def ranking_chart(ranking: Ranking) -> str:
    """The scores of losses with their intervals, and bands of losses that cannot be told apart."""
    rows = sorted(ranking.rows, key=lambda row: (row.is_baseline, -row.score))
    bands = [band for band in ranking.groups.bands if len(band) > 1] if ranking.groups is not None else []
    return interval_chart(rows, bands, title=f"{ranking.metric} with intervals", x=ranking.metric)


def tournament_chart(tournament: Tournament) -> str:
    """The critical-difference diagram of a tournament; without bars if there is no test."""
    ranks = {row.loss: row.average for row in tournament.rows}
    return rank_chart(ranks, tournament.critical, title=f"Average ranks by {tournament.metric}")


def _ordered(ranking: Ranking) -> list[RankedLoss]:
    """The rows with baselines last; best first if ranked, by name otherwise."""
    return sorted(ranking.rows, key=lambda row: (row.is_baseline, -row.score if ranking.ranked else 0.0, row.loss))


def _colors(rankings: Sequence[Ranking]) -> dict[str, int]:
    """A color for each loss, the same in all charts. Baselines are gray."""
    rows = [row for ranking in rankings for row in _ordered(ranking)]
    losses = dict.fromkeys(row.loss for row in rows if not row.is_baseline)
    colors = {loss: 1 + position % (COLORS - 1) for position, loss in enumerate(losses)}
    return colors | {row.loss: COLORS for row in rows if row.is_baseline}


def _figures(
    rankings: Sequence[Ranking], tournament: Tournament | None, metric: str, *, ranked: bool
) -> list[tuple[str, str, str]]:
    """The most important numbers: name, value and remark."""
    entries = []
    if tournament is not None and len(rankings) > 1:
        first = tournament.rows[0]
        remark = f"average rank {first.average:.2f} in {len(first.ranks)} experiments"
        entries.append(("Best average rank", first.loss, remark))
    best = max((ranking.best for ranking in rankings if ranking.best), key=lambda row: row.score, default=None)
    if best is not None and ranked:
        run = best.runs[0]
        remark = f"{best.loss}, {run.network}, {run.dim}-d"
        entries.append((f"Highest {metric_name(metric)}", formatting.percent(best.score), remark))
    if len(rankings) == 1 and (groups := rankings[0].groups) is not None:
        firsts = sum(rank == 1 for rank in groups.ranks.values())
        entries.append(("In the best group", f"{firsts} of {len(groups.ranks)}", "no loss is significantly better"))
    runs = [run for ranking in rankings for row in ranking.rows for run in row.runs]
    losses = {row.runs[0].loss for ranking in rankings for row in ranking.rows if not row.is_baseline}
    entries.append(("Losses", str(len(losses)), f"in {formatting.plural(len(rankings), 'experiment')}"))
    entries.append(("Runs", str(len(runs)), formatting.plural(len({run.seed for run in runs}), "seed")))
    entries.append(("Training time", formatting.duration(sum(run.seconds for run in runs)), "all runs together"))
    return entries


def _tournament(tournament: Tournament) -> Table:
    """The ranks over all experiments."""
    columns = [Column("loss"), Column("average rank", 2), Column("std", 2)]
    columns += [Column(name, 1, show="{:g}".format) for name in tournament.scores]
    return Table("Tournament", columns, [[row.loss, row.average, row.std, *row.ranks] for row in tournament.rows])


def _overview(rankings: Sequence[Ranking]) -> Table:
    """Scores of all losses in all experiments; baselines last."""
    baselines = {row.loss for ranking in rankings for row in ranking.rows if row.is_baseline}
    losses = dict.fromkeys(row.loss for ranking in rankings for row in _ordered(ranking))
    rows = []
    for loss in sorted(losses, key=lambda loss: loss in baselines):
        scores = [ranking.row(loss) for ranking in rankings]
        rows.append([loss, *(None if row is None else (row.score, row.rank == 1) for row in scores)])
    columns = [Column("loss"), *(Column(ranking.name, 1, show=_first_strong) for ranking in rankings)]
    return Table("Overview", columns, rows, kinds=["base" if row[0] in baselines else "" for row in rows])


def _first_strong(score_and_first: tuple[float, bool]) -> str:
    """A score, emphasized if its loss ranks first."""
    score, is_first = score_and_first
    text = formatting.percent(score, unit=False)
    return Markup("<strong>{}</strong>").format(text) if is_first else text


def _experiments(rankings: Sequence[Ranking], metric: str, anyway: bool) -> list[dict[str, Any]]:
    """A table for each experiment; that of the most losses is open."""
    largest = max(rankings, key=lambda ranking: len(ranking.rows))
    return [
        {
            "name": ranking.name,
            "stamp": tables.UNFAIR if anyway and not ranking.verdict.fair else "",
            "is_open": ranking is largest,
            "table": _table(ranking, metric),
            "chart": ranking_chart(ranking) if ranking.ranked and ranking.classes is not None else "",
            "notes": tables.statistics_notes(ranking, "intervals"),
        }
        for ranking in rankings
    ]


def _table(ranking: Ranking, metric: str) -> Table:
    """All numbers of the losses of an experiment; columns without any are left out."""
    rows = _ordered(ranking)
    trained = [row for row in rows if not row.is_baseline] or rows  # a low baseline would compress the others
    low = min(row.score if row.low is None else row.low for row in trained)
    high = max(row.score if row.high is None else row.high for row in trained)
    scale = f"{formatting.percent(low, 0, unit=False)} – {formatting.percent(high, 0)}"

    def drawn(interval: tuple[float, float, float]) -> str:
        """The interval of a loss on the scale of the table."""
        score, *ends = interval
        shares = [(value - low) / (high - low) for value in (ends[0], score, ends[1])]
        return "below" if ends[1] <= low else Markup(whiskers(*shares))

    columns: dict[Column, Sequence[Value]] = {
        Column("loss"): [row.loss for row in rows],
        Column("rank", 0): [row.rank for row in rows],
        Column(f"{metric_name(metric)}, %", 2, percent=True): [row.score for row in rows],
        Column("± of runs", 2, percent=True): [row.std for row in rows],
        Column("95 % interval", 1, show=lambda ends: formatting.interval(*ends)): [
            None if row.low is None else (row.low, row.high) for row in rows
        ],
        Column(scale, show=drawn, missing=""): [
            None if row.low is None or high <= low else (row.score, row.low, row.high) for row in rows
        ],
        Column("group"): [row.group or None for row in rows],
        Column("p", 3): [row.p for row in rows],
        Column("time", 1, show=formatting.duration): [row.seconds or None for row in rows],
        Column("memory, MiB", 0, show="{:,.0f}".format): [row.memory for row in rows],
        **{
            Column(f"{metric_name(name)}, %", 1, percent=True): [row.mean(name) for row in rows]
            for name in OTHER_METRICS
            if name != metric
        },
        Column("runs", 0): [len(row.runs) for row in rows],
        Column("epochs", 0): [None if row.is_baseline else row.runs[0].epochs for row in rows],
    }
    kinds = ["base" if row.is_baseline else "best" if row.rank == 1 else "" for row in rows]
    return Table(ranking.name, *tables.filled(columns), kinds=kinds)


def _by_dim(rankings: Sequence[Ranking], metric: str, colors: Mapping[str, int]) -> list[Chart]:
    """The metric by size of the embedding (Figures 28 to 30 of the thesis)."""
    charts = []
    for (data, protocol, network), group in _grouped(rankings, "data", "protocol", "network").items():
        dims = sorted({ranking.place["dim"] for ranking in group})
        if len(dims) < 2:
            continue
        lines = _lines([(math.log2(ranking.place["dim"]), ranking) for ranking in group], colors)
        name = _title(rankings, data=data, protocol=protocol, network=network) or network
        ticks = [(math.log2(dim), str(dim)) for dim in dims]
        chart = line_chart(lines, title=name, x="size of the embedding", y=metric, percent=True, ticks=ticks)
        charts.append((name, chart))
    return charts


def _by_network(rankings: Sequence[Ranking], metric: str, colors: Mapping[str, int]) -> list[Chart]:
    """The metric by network, ordered by the mean over losses (Figure 31 of the thesis)."""
    charts = []
    for (data, protocol, dim), group in _grouped(rankings, "data", "protocol", "dim").items():
        if len(group) < 2:
            continue
        group = sorted(group, key=lambda ranking: statistics.fmean(row.score for row in ranking.rows))
        lines = _lines([(float(position), ranking) for position, ranking in enumerate(group)], colors)
        name = " · ".join(
            part for part in (_title(rankings, data=data, protocol=protocol), f"{dim} dimensions") if part
        )
        ticks = [(float(position), ranking.place["network"]) for position, ranking in enumerate(group)]
        charts.append((name, line_chart(lines, title=name, x="network", y=metric, percent=True, ticks=ticks)))
    return charts


def _by_setting(rankings: Sequence[Ranking], metric: str) -> list[Chart]:
    """The metric by each setting that a grid varies, with a line for each loss and choice of the other settings."""
    charts = []
    for ranking in rankings:
        for key in dict.fromkeys(key for row in _ordered(ranking) for key in row.runs[0].settings):
            rows = [row for row in _ordered(ranking) if key in row.runs[0].settings]
            positions = _positions([row.runs[0].settings[key] for row in rows])
            if len(positions) < 2:
                continue
            points: dict[str, list[tuple[float, float]]] = {}
            for row in rows:
                run = row.runs[0]
                others = [f"{_last(other)}={value}" for other, value in run.settings.items() if other != key]
                line = points.setdefault(", ".join([run.loss, *others]), [])
                line.append((positions[str(run.settings[key])], row.score))
            best = sorted(points.items(), key=lambda item: -max(score for _, score in item[1]))
            lines = [
                Line(label, sorted(curve), color=1 + position % (COLORS - 1), dots=True)
                for position, (label, curve) in enumerate(best)
            ]
            name = f"{ranking.name} · {_last(key)}" if len(rankings) > 1 else _last(key)
            ticks = [(position, value) for value, position in positions.items()]
            charts.append((name, line_chart(lines, title=name, x=key, y=metric, percent=True, ticks=ticks)))
    return charts


def _convergence(rankings: Sequence[Ranking], metric: str, colors: Mapping[str, int]) -> dict[str, Any]:
    """Curves by epoch, of the metric that selects epochs if all runs share it."""
    rules = {run.selected_by for ranking in rankings for row in ranking.rows if not row.is_baseline for run in row.runs}
    rule = rules.pop() if len(rules) == 1 else None
    metric = rule or metric
    charts, parts = [], set()
    for ranking in rankings:
        lines = []
        for row in _ordered(ranking):
            part, points = _curve(row.runs, metric)
            if points:
                parts.add(part)
                lines.append(Line(row.loss, points, color=colors[row.loss]))
        if lines:
            lines.sort(key=lambda line: -line.points[-1][1])
            chart = line_chart(lines, title=f"Convergence, {ranking.name}", x="epoch", y=metric, percent=True)
            charts.append((ranking.name, chart))
    shown = sorted(parts, reverse=True)
    return {"charts": charts, "metric": metric, "parts": shown, "selects": rule is not None}


def _curve(runs: Sequence[Run], metric: str) -> tuple[str, list[tuple[float, float]]]:
    """The part that was measured after epochs, and the mean of its metric over the runs of a loss."""
    for part in ("validation", "test"):
        every = [dict(run.curve(part, metric)) for run in runs]
        epochs = sorted(set.intersection(*map(set, every))) if every else []
        if len(epochs) > 1:
            return part, [(epoch, statistics.fmean(points[epoch] for points in every)) for epoch in epochs]
    return "", []


def _lines(group: Sequence[tuple[float, Ranking]], colors: Mapping[str, int]) -> list[Line]:
    """A line for each trained loss through its experiments, which have positions on the x axis.

    A loss with a single point is left to the tables, unless all losses have one.
    """
    points_of: dict[str, list[tuple[float, float]]] = {}
    for x, ranking in group:
        for row in _ordered(ranking):
            if not row.is_baseline:
                points_of.setdefault(row.loss, []).append((x, row.score))
    most = max(map(len, points_of.values()), default=0)
    points_of = {loss: points for loss, points in points_of.items() if len(points) > 1 or most == 1}
    by_end = sorted(points_of.items(), key=lambda item: -item[1][-1][1])
    return [Line(loss, sorted(points), color=colors[loss], dots=True) for loss, points in by_end]


def _positions(values: Sequence[Any]) -> dict[str, float]:
    """Positions of values on an axis: numbers in order, others as they come.

    >>> _positions([10, 2, 10]), _positions(["hard", "all"])
    ({'2': 0.0, '10': 1.0}, {'hard': 0.0, 'all': 1.0})
    """
    if all(isinstance(value, (int, float)) for value in values):
        values = sorted(values)
    return {text: float(position) for position, text in enumerate(dict.fromkeys(map(str, values)))}


def _last(key: str) -> str:
    return key.rpartition(".")[2]


def _grouped(rankings: Sequence[Ranking], *keys: str) -> dict[tuple[str, ...], list[Ranking]]:
    groups: dict[tuple[str, ...], list[Ranking]] = {}
    for ranking in rankings:
        groups.setdefault(tuple(str(ranking.place[key]) for key in keys), []).append(ranking)
    return groups


def _title(rankings: Sequence[Ranking], **parts: str) -> str:
    """The parts that are not the same in all experiments."""
    return " · ".join(
        value for key, value in parts.items() if len({str(ranking.place[key]) for ranking in rankings}) > 1
    )
