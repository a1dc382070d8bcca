"""The sections of a leaderboard, each as HTML, empty where there is nothing to say."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from nearfar.bench.comparison.fairness import Verdict
from nearfar.bench.comparison.outcomes import Outcome
from nearfar.bench.comparison.ranking import Experiment, RankedLoss
from nearfar.bench.comparison.tables import UNFAIR, interval_notes
from nearfar.bench.comparison.tournament import Standing
from nearfar.reports import shell
from nearfar.reports.charts import Line, line_chart, whiskers
from nearfar.reports.run_data import metric_points
from nearfar.reports.run_sections import nice
from nearfar.reports.shell import Cell
from nearfar.reports.tuning import duration

Colors = Mapping[str, int]
BESIDE = ("recall@2", "recall@4", "recall@8", "recall@10", "recall@100", "recall@1000", "map@r", "nmi")
WITHOUT = "Frozen features are in the tables."
MOST_OPEN = 6  # charts of one kind that are shown at once; more can be unfolded


def colors(found: Sequence[Experiment]) -> dict[str, int]:
    """A colour for each loss, the same in all charts; baselines are grey."""
    losses = dict.fromkeys(row.loss for one in found for row in ordered(one) if not row.is_baseline)
    named = {loss: 1 + place % (shell.COLORS - 1) for place, loss in enumerate(losses)}
    return named | {row.loss: shell.COLORS for one in found for row in ordered(one) if row.is_baseline}


def ordered(one: Experiment) -> list[RankedLoss]:
    """Rows with baselines last; best first if ranked, else by name."""
    return sorted(one.rows, key=lambda row: (row.is_baseline, -row.score if one.ranking.ranked else 0.0, row.loss))


def curves(runs: Sequence[Outcome], metric: str) -> tuple[str, list[tuple[float, float]]]:
    """The convergence of a loss: the part that was measured after epochs, and its mean over repetitions."""
    logs = [run.history() for run in runs]
    for part in ("validation", "test"):
        every = [dict(metric_points(log, part, metric)) for log in logs]
        epochs = sorted(set.intersection(*map(set, every))) if every else []
        if len(epochs) > 1:
            return part, [(epoch, statistics.fmean(points[epoch] for points in every)) for epoch in epochs]
    return "", []


def verdict(judged: Verdict, anyway: bool, left_out: Sequence[str]) -> str:
    """Whether this may be compared at all, and why not."""
    if judged.fair:
        title, sign, kind = "A fair comparison", "✓", "verdict"
        what = ", ".join(["the loss and its own settings", *judged.tried])
        told = f"Within each experiment, runs differ in {what}, and in nothing else that counts."
    else:
        title, sign, kind = "Not a fair comparison", "✗", "verdict unfair"
        told = "Runs differ in more than the loss and its own settings. " + (
            "They are ranked all the same, because it was asked for." if anyway else "They are shown, but not ranked."
        )
    content = _list(judged.reasons)
    if judged.notes or left_out:
        lines = [*left_out, *judged.notes]
        content += f"<details><summary>Worth knowing ({len(lines)})</summary>{_list(lines)}</details>"
    stamp = UNFAIR if not judged.fair else ""
    mark = f'<span class="sign" aria-hidden="true">{sign}</span> '
    return shell.section(title, told, content, kind=kind, stamp=stamp, mark=mark)


def figures(found: Sequence[Experiment], standings: Sequence[Standing], metric: str, ranked: bool) -> str:
    """The numbers one looks for first."""
    entries = []
    best = max((one.ranking.best for one in found if one.ranking.best), key=lambda row: row.score, default=None)
    if ranked and standings and len(found) > 1:
        more = f"average rank {standings[0].average:.2f} in {len(standings[0].ranks)} experiments"
        entries.append(("First in the tournament", standings[0].loss, more))
    if best is not None and ranked:
        run = best.runs[0]
        entries.append(
            (f"Highest {nice(metric)}", f"{100 * best.score:.1f} %", f"{best.loss}, {run.network}, {run.dim}-d")
        )
    runs = [run for one in found for row in ordered(one) for run in row.runs]
    losses = {row.runs[0].loss for one in found for row in ordered(one) if not row.is_baseline}
    entries.append(("Losses", str(len(losses)), f"in {len(found)} experiment{'s' if len(found) > 1 else ''}"))
    seeds = len({run.seed for run in runs})
    entries.append(("Runs", str(len(runs)), f"{seeds} seed{'s' if seeds > 1 else ''}"))
    entries.append(("Trained for", duration(sum(run.seconds for run in runs)), "all runs together"))
    return shell.figures(entries)


def tournament(standings: Sequence[Standing], names: Sequence[str], left: str, stamp: str) -> str:
    """Who ranks where, over all experiments."""
    if not standings or len(names) < 2:
        return ""
    heads = ["loss", "place", "total", "average", "std", *names]
    places = [1 + sum(other.total < row.total for other in standings) for row in standings]
    rows: list[list[Cell | str]] = [
        [
            row.loss,
            shell.number(place, 0),
            shell.number(row.total, 0),
            shell.number(row.average, 2),
            shell.number(None if math.isnan(row.std) else row.std, 2),
            *(shell.number(rank, 0) for rank in row.ranks),
        ]
        for place, row in zip(places, standings, strict=True)
    ]
    told = f"Ranks by experiment, added up: the smallest total comes first; equal scores share the better rank.{left}"
    kinds = ["best" if place == 1 else "" for place in places]
    content = shell.table(heads, rows, numbers=range(1, len(heads)), kinds=kinds)
    return shell.section("Tournament", told, content, stamp=stamp)


def overview(found: Sequence[Experiment], metric: str, stamp: str) -> str:
    """Losses by experiments, as one table."""
    if len(found) < 2:
        return ""
    losses = list(dict.fromkeys(row.loss for one in found for row in ordered(one)))
    rows: list[list[Cell | str]] = []
    kinds = []
    for loss in losses:
        own = [one.ranking.row(loss) for one in found]
        cells = []
        for row in own:
            cell = shell.number(row.score if row else None, 1, percent=True)
            strong = row is not None and row.rank == 1
            cells.append(Cell(cell.text, cell.key, f"<strong>{cell.text}</strong>") if strong else cell)
        rows.append([loss, *cells])
        kinds.append("base" if any(row is not None and row.is_baseline for row in own) else "")
    order = sorted(range(len(rows)), key=lambda at: kinds[at] == "base")
    content = shell.table(
        ["loss", *(one.name for one in found)],
        [rows[at] for at in order],
        numbers=range(1, len(found) + 1),
        kinds=[kinds[at] for at in order],
    )
    return shell.section(f"{nice(metric)} at a glance", "Of the test classes, in percent.", content, stamp=stamp)


def leaderboard(found: Sequence[Experiment], metric: str, anyway: bool) -> str:
    """All numbers, a table for each experiment; the one of most losses is open."""
    tables = []
    largest = max(found, key=lambda one: len(one.rows))
    for one in found:
        stamp = f'<span class="stamp">{UNFAIR}</span>' if not one.ranking.verdict.fair and anyway else ""
        drawn = _experiment(one, metric)
        said = interval_notes(one.ranking, "intervals")
        notes = "".join(f'<p class="soft">{escape(note[:1].upper() + note[1:])}.</p>' for note in said)
        if len(found) == 1:
            tables.append(drawn + notes)
            continue
        opened = " open" if one is largest else ""
        tables.append(f"<details{opened}><summary>{escape(one.name)}{stamp}</summary>{drawn}{notes}</details>")
    told = "Of the test classes. Press a head to sort. Time is that of one training; memory is the most it held."
    stamp = UNFAIR if anyway and any(not one.ranking.verdict.fair for one in found) else ""
    return shell.section("Leaderboard", told, "".join(tables), stamp=stamp)


def _experiment(one: Experiment, metric: str) -> str:
    rows = ordered(one)
    trained = [row for row in rows if not row.is_baseline] or rows  # a baseline far below would make all others alike
    low = min([row.score if row.low is None else row.low for row in trained])
    high = max([row.score if row.high is None else row.high for row in trained])
    beside = [name for name in BESIDE if name != metric and any(row.mean(name) is not None for row in rows)]
    columns = {
        "loss": [Cell(row.loss) for row in rows],
        "rank": [shell.number(row.rank, 0) for row in rows],
        f"{nice(metric)}, %": [shell.number(row.score, 2, percent=True) for row in rows],
        "± of runs": [shell.number(row.std, 2, percent=True) for row in rows],
        "95 % interval": [_interval(row) for row in rows],
        f"{100 * low:.0f} – {100 * high:.0f} %": [_whiskers(row, low, high) for row in rows],
        "p": [_chance(row.p) for row in rows],
        "time": [Cell(duration(row.seconds), row.seconds) if row.seconds else Cell("–", None) for row in rows],
        "memory, MiB": [shell.number(row.memory, 0) for row in rows],
        **{f"{nice(name)}, %": [shell.number(row.mean(name), 1, percent=True) for row in rows] for name in beside},
        "runs": [shell.number(len(row.runs), 0) for row in rows],
        "epochs": [shell.number(row.runs[0].epochs, 0) if not row.is_baseline else Cell("–", None) for row in rows],
    }
    kept = {head: cells for head, cells in columns.items() if any(cell.key is not None for cell in cells)}
    heads = list(kept)
    texts = ("loss", list(columns)[5])
    kinds = ["base" if row.is_baseline else "best" if row.rank == 1 else "" for row in rows]
    lines: list[list[Cell | str]] = [[kept[head][at] for head in heads] for at in range(len(rows))]
    numbers = [at for at, head in enumerate(heads) if head not in texts]
    return shell.table(heads, lines, numbers=numbers, kinds=kinds)


def _interval(row: RankedLoss) -> Cell:
    if row.low is None or row.high is None:
        return Cell("–", None)
    return Cell(f"{100 * row.low:.1f} – {100 * row.high:.1f}", row.low)


def _whiskers(row: RankedLoss, low: float, high: float) -> Cell:
    """The interval on the scale of its table: of all losses, from the lowest end to the highest."""
    if row.low is None or row.high is None or high <= low:
        return Cell("", None)
    if row.high <= low:
        return Cell("below", row.score)
    return Cell("", row.score, whiskers(*((value - low) / (high - low) for value in (row.low, row.score, row.high))))


def by_dim(found: Sequence[Experiment], metric: str, colored: Colors, stamp: str) -> str:
    """The metric by the size of the embedding: Figures 28 to 30 of the thesis."""
    drawn = []
    for (data, protocol, network), group in _grouped(found, "data", "protocol", "network").items():
        dims = sorted({one.dim for one in group})
        if len(dims) < 2:
            continue
        lines = _lines(group, colored, {one.dim: math.log2(one.dim) for one in group})
        name = _title(found, data=data, protocol=protocol, network=network) or network
        ticks = [(math.log2(dim), str(dim)) for dim in dims]
        chart = line_chart(lines, title=name, x="size of the embedding", y=metric, percent=True, ticks=ticks)
        drawn.append((name, chart))
    told = f"Longer embeddings hold more, and cost more to keep and to search. {WITHOUT}"
    return shell.section("By size of the embedding", told, shell.charts(drawn), stamp=stamp) if drawn else ""


def by_setting(found: Sequence[Experiment], metric: str, stamp: str) -> str:
    """The metric by each setting that a grid tries values of: a line for each loss and choice of the other settings."""
    drawn = []
    for one in found:
        for key in dict.fromkeys(key for row in ordered(one) for key in row.runs[0].settings):
            rows = [row for row in ordered(one) if key in row.runs[0].settings]
            places = _places([row.runs[0].settings[key] for row in rows])
            if len(places) < 2:
                continue
            lines: dict[str, list[tuple[float, float]]] = {}
            for row in rows:
                run = row.runs[0]
                others = [f"{_last(other)}={value}" for other, value in run.settings.items() if other != key]
                point = places[str(run.settings[key])], row.score
                lines.setdefault(", ".join([run.loss, *others]), []).append(point)
            best = sorted(lines.items(), key=lambda item: -max(score for _, score in item[1]))
            named = [
                Line(word, sorted(points), color=1 + at % (shell.COLORS - 1), dots=True)
                for at, (word, points) in enumerate(best)
            ]
            name = f"{one.name} · {_last(key)}" if len(found) > 1 else _last(key)
            ticks = [(place, word) for word, place in places.items()]
            drawn.append((name, line_chart(named, title=name, x=key, y=metric, percent=True, ticks=ticks)))
    told = "What the grid tries values of, on the test classes: to be looked at. Choose on validation classes (tune)."
    return shell.section("By setting", told, shell.charts(drawn), stamp=stamp) if drawn else ""


def by_network(found: Sequence[Experiment], metric: str, colored: Colors, stamp: str) -> str:
    """The metric by network: Figure 31 of the thesis."""
    drawn = []
    for (data, protocol, dim), group in _grouped(found, "data", "protocol", "dim").items():
        if len(group) < 2:
            continue
        means = {one.network: sum(row.score for row in one.rows) / len(one.rows) for one in group}
        order = sorted(means, key=lambda network: means[network])
        lines = _lines(group, colored, {one.dim: 0.0 for one in group}, order)
        name = " · ".join(part for part in (_title(found, data=data, protocol=protocol), f"{dim} dimensions") if part)
        ticks = [(float(place), network) for place, network in enumerate(order)]
        chart = line_chart(lines, title=name, x="network", y=metric, percent=True, ticks=ticks)
        drawn.append((name, chart))
    told = "The same losses on different networks: numbers of different networks tell nothing about losses. " + WITHOUT
    return shell.section("By network", told, shell.charts(drawn), stamp=stamp) if drawn else ""


def convergence(found: Sequence[Experiment], metric: str, colored: Colors, stamp: str) -> str:
    """How fast losses learn, by what their epochs were selected by where that is one metric."""
    rules = {run.selected_by for one in found for row in ordered(one) if not row.is_baseline for run in row.runs}
    rule = rules.pop() if len(rules) == 1 else None
    metric = rule or metric
    drawn, parts = [], set()
    for one in found:
        lines = []
        for row in ordered(one):
            part, points = curves(row.runs, metric)
            if points:
                parts.add(part)
                lines.append(Line(row.loss, points, color=colored[row.loss]))
        lines.sort(key=lambda line: -line.points[-1][1])
        if lines:
            chart = line_chart(lines, title=f"Convergence, {one.name}", x="epoch", y=metric, percent=True)
            drawn.append((one.name, chart))
    if not drawn:
        return ""
    told = f"{nice(metric)} of the {' or '.join(sorted(parts, reverse=True))} classes after epochs."
    if rule is not None:
        told += " It selects the epoch that counts."
    if "test" in parts:
        told += " Nothing was selected on the test classes: where they are shown, the last epoch counts."
    content = shell.charts(drawn[:MOST_OPEN])
    if len(drawn) > MOST_OPEN:
        more = shell.charts(drawn[MOST_OPEN:])
        content += f"<details><summary>{len(drawn) - MOST_OPEN} more</summary>{more}</details>"
    return shell.section("Convergence", told, content, stamp=stamp)


def _lines(
    group: Sequence[Experiment], colored: Colors, places: Mapping[int, float], order: Sequence[str] = ()
) -> list[Line]:
    """A line for each loss through its experiments; places on the x axis go by size, or by the order of networks.

    A loss that has one place alone is left to the tables, unless all are like that.
    """
    found: dict[str, list[tuple[float, float]]] = {}
    for one in group:
        for row in ordered(one):
            if row.is_baseline:
                continue
            x = float(order.index(one.network)) if order else places[one.dim]
            found.setdefault(row.loss, []).append((x, row.score))
    most = max(map(len, found.values()), default=0)
    found = {loss: points for loss, points in found.items() if len(points) > 1 or most == 1}
    ends = sorted(found.items(), key=lambda item: -item[1][-1][1])
    return [Line(loss, sorted(points), color=colored[loss], dots=True) for loss, points in ends]


def _places(values: Sequence[Any]) -> dict[str, float]:
    """Where values stand on an axis: numbers in order, all else as it comes.

    >>> _places([10, 2, 10]), _places(["hard", "all"])
    ({'2': 0.0, '10': 1.0}, {'hard': 0.0, 'all': 1.0})
    """
    if all(isinstance(value, (int, float)) for value in values):
        values = sorted(values)
    return {word: float(place) for place, word in enumerate(dict.fromkeys(map(str, values)))}


def _last(key: str) -> str:
    return key.rpartition(".")[2]


def _grouped(found: Sequence[Experiment], *keys: str) -> dict[tuple[str, ...], list[Experiment]]:
    groups: dict[tuple[str, ...], list[Experiment]] = {}
    for one in found:
        groups.setdefault(tuple(str(getattr(one, key)) for key in keys), []).append(one)
    return groups


def _title(found: Sequence[Experiment], **parts: str) -> str:
    """Of some facts, those that are not the same everywhere."""
    return " · ".join(value for key, value in parts.items() if len({str(getattr(one, key)) for one in found}) > 1)


def _list(lines: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in lines)}</ul>" if lines else ""


def _chance(p: float | None) -> shell.Cell:
    """No p is 0; what is too small for three digits says so."""
    return shell.Cell("< 0.001", p) if p is not None and p < 0.001 else shell.number(p, 3)
