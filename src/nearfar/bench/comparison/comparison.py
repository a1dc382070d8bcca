"""Runs as one table: ranked where that is fair, and with the reasons where it is not."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from nearfar.bench.comparison import significance, tournament
from nearfar.bench.comparison.fairness import Verdict, judge
from nearfar.bench.comparison.outcomes import Outcome, repetitions
from nearfar.bench.comparison.tables import Cell, Column, Table
from nearfar.utils.validation import one_of

Groups = dict[str, list[Outcome]]

CLEAR = 0.05
PARTS = ("test", "validation")
REFUSED = "not ranked: the comparison is unfair"


@dataclass(frozen=True)
class Comparison:
    """A table and whether its rows may be ranked.

    Args:
        table: Marked as unfair where it is ranked all the same.
        verdict: With the reasons.
        ranked: Whether the rows have ranks.
    """

    table: Table
    verdict: Verdict
    ranked: bool


def compare(
    outcomes: Iterable[Outcome],
    *,
    metric: str = "recall@1",
    part: str = "test",
    anyway: bool = False,
    over: str = "classes",
    samples: int = significance.SAMPLES,
) -> Comparison:
    """Losses by a metric of the test, best first; runs that differ in seed or fold alone make one row.

    Args:
        outcomes: Finished runs.
        metric: As in metrics.json: "recall@1", "map@r", "nmi", …
        part: Whose metric: "test", or "validation" to choose settings without a look at the test.
        anyway: Rank what is unfair as well; the table then says UNFAIR in every format.
        over: What is drawn for intervals and p: "classes" or "queries".
        samples: How many draws.
    """
    outcomes = list(outcomes)
    one_of("over", over, significance.OVER)
    one_of("part", part, PARTS)
    if not outcomes:
        raise ValueError("there is nothing to compare: no run is given")
    verdict = judge(outcomes)
    ranked = verdict.fair or anyway
    groups = named(outcomes)
    means = {name: statistics.fmean(run.score(metric, part) for run in runs) for name, runs in groups.items()}
    if ranked:
        groups = dict(sorted(groups.items(), key=lambda item: -means[item[0]]))
    trained = [name for name, runs in groups.items() if not runs[0].is_baseline]
    if part == "test":
        spans, against, notes = _drawn(groups, trained if ranked else [], metric, over, samples)
    else:
        spans, against, notes = {}, {}, [f"no intervals: runs keep what each query of the test found, not of {part}"]
    rows: list[Sequence[Cell]] = []
    columns = _columns(groups, metric, drawn=bool(spans), paired=bool(against) and ranked)
    for name, runs in groups.items():
        better = [other for other in trained if means[other] > means[name]]
        facts = {
            "rank": len(better) + 1 if ranked and name in trained else None,
            "loss": name,
            **runs[0].place,
            metric: 100 * means[name],
            "std": 100 * statistics.stdev(run.score(metric, part) for run in runs) if len(runs) > 1 else None,
            "low": 100 * spans[name][0] if name in spans else None,
            "high": 100 * spans[name][1] if name in spans else None,
            "p": against.get(name) if ranked else None,
            "runs": len(runs),
            "seconds": statistics.fmean(run.seconds for run in runs),
            "MiB": max((run.memory for run in runs if run.memory is not None), default=None),
        }
        rows.append([facts[column.name] for column in columns])
    notes = [*notes, *verdict.notes] if ranked else [REFUSED, *notes, *verdict.notes]
    title = f"{metric} of the {part} classes, in percent"
    unfair = verdict.reasons if not verdict.fair else ()
    return Comparison(Table(title, columns, rows, notes, unfair), verdict, ranked)


def named(outcomes: Iterable[Outcome]) -> Groups:
    """Runs by what to call them: the loss, and what else tells them apart."""
    groups = list(repetitions(outcomes).values())
    words = tournament.labels(groups)
    return dict(zip(words, groups, strict=True))


def standings(
    outcomes: Iterable[Outcome],
    *,
    metric: str = "recall@1",
    anyway: bool = False,
    over: str = "classes",
    samples: int = significance.SAMPLES,
) -> Comparison:
    """The tournament of some runs: total, average and deviation of ranks over experiments.

    Where runs kept what each query found, "beats" counts how often a loss is better than another with p below 0.05
    (paired draws, corrected within an experiment), and "loses" how often another is better than it.

    Args:
        outcomes: Finished runs of one or more experiments, which are judged one by one.
        metric: What is ranked.
        anyway: Rank what is unfair as well; the table then says UNFAIR in every format.
        over: What is drawn for p: "classes" or "queries".
        samples: How many draws.
    """
    outcomes = list(outcomes)
    one_of("over", over, significance.OVER)
    verdict = tournament.judged(outcomes)
    scores = tournament.scores(outcomes, metric)
    if not scores:
        raise ValueError("there is nothing to rank: no trained run is given")
    title = f"Tournament over {len(scores)} experiment{'s' if len(scores) > 1 else ''} by {metric}"
    unfair = verdict.reasons if not verdict.fair else ()
    if not (verdict.fair or anyway):
        columns: list[Column] = [Column("loss"), *(Column(name, 2) for name in scores)]
        losses = list(dict.fromkeys(loss for each in scores.values() for loss in each))
        percent = [[_percent(each.get(loss)) for each in scores.values()] for loss in losses]
        rows: list[Sequence[Cell]] = [[loss, *cells] for loss, cells in zip(losses, percent, strict=True)]
        return Comparison(Table(title, columns, rows, [REFUSED, *verdict.notes], unfair), verdict, False)
    columns = [Column("loss"), Column("total", 0), Column("average", 2), Column("std", 2)]
    scores, left = tournament.shared(scores)
    if not any(scores.values()):
        raise ValueError(f"there is nothing to rank: no loss is in all of {', '.join(scores)}")
    won, notes = _won(outcomes, metric, over, samples)
    notes = [left, *notes] if left else notes
    columns += [Column("beats", 0), Column("loses", 0)] if won is not None else []
    columns += [Column(name, 0) for name in scores]
    rows = []
    ranking = tournament.tournament(scores)
    ranked = {row.loss for row in ranking}
    between = [pair for pair in won or () if ranked.issuperset(pair)]
    for row in ranking:
        counts = [] if won is None else [sum(row.loss == pair[at] for pair in between) for at in (0, 1)]
        rows.append([row.loss, row.total, row.average, row.std, *counts, *row.ranks])
    return Comparison(Table(title, columns, rows, [*notes, *verdict.notes], unfair), verdict, True)


def _won(
    outcomes: Sequence[Outcome], metric: str, over: str, samples: int
) -> tuple[list[tuple[str, str]] | None, list[str]]:
    """Who is clearly better than whom, once for each experiment; None with the reason where it is not known."""
    if metric not in significance.METRICS:
        return None, [f"no p: runs keep {' and '.join(significance.METRICS)} of each query, not {metric}"]
    found = []
    for runs in tournament.experiments(outcomes).values():
        groups = named(run for run in runs if not run.is_baseline)
        try:
            pairs = significance.pairwise(groups, metric=metric, over=over, samples=samples) if groups else []
        except ValueError as error:
            return None, [f"no p: {error}"]
        found += [(one.better, one.worse) for one in pairs if one.p < CLEAR]
    return found, [f"beats, loses: pairs with p below {CLEAR}, by {samples:,} paired draws of {over} (Holm)"]


def _columns(groups: Groups, metric: str, *, drawn: bool, paired: bool) -> list[Column]:
    """Those that have something to say about these runs."""
    found = [Column("rank", 0), Column("loss")]
    places = [runs[0].place for runs in groups.values()]
    for word in places[0]:
        if len({place[word] for place in places}) > 1:
            found.append(Column(word, 0 if word == "dim" else None))
    found.append(Column(metric, 2))
    if any(len(runs) > 1 for runs in groups.values()):
        found += [Column("std", 2), Column("runs", 0)]
    found += [Column("low", 2), Column("high", 2)] if drawn else []
    found += [Column("p", 4)] if paired else []
    return [*found, Column("seconds", 1), Column("MiB", 0)]


def _drawn(
    groups: Groups, trained: Sequence[str], metric: str, over: str, samples: int
) -> tuple[Mapping[str, tuple[float, float]], dict[str, float], list[str]]:
    """Intervals, p against the best trained loss, and what to say about them."""
    if metric not in significance.METRICS:
        return {}, {}, [f"no intervals: runs keep {' and '.join(significance.METRICS)} of each query, not {metric}"]
    try:
        spans = significance.intervals(groups, metric=metric, over=over, samples=samples)
        best = {name: groups[name] for name in trained}
        found = significance.pairwise(best, metric=metric, over=over, best_only=True, samples=samples) if best else []
    except ValueError as error:
        return {}, {}, [f"no intervals: {error}"]
    note = f"low and high: 95 % of {samples:,} draws of {over}"
    words = "; p: against the best, by paired draws, corrected for their number (Holm)" if found else ""
    notes = [note + words]
    if over == "classes" and (count := significance.count_classes(groups)) < significance.FEW:
        notes.append(f"the test has {count} classes: draws of so few make intervals too narrow and p too small")
    return spans, {one.worse: one.p for one in found}, notes


def _percent(value: float | None) -> float | None:
    return None if value is None else 100 * value
