"""Rankings of losses, computed once as data: command line, leaderboard and server render them."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from nearfar.bench.comparison import significance, tables
from nearfar.bench.comparison.fairness import Verdict, judge
from nearfar.bench.comparison.runs import repetitions
from nearfar.bench.comparison.significance import Groups
from nearfar.training.run.reader import Run
from nearfar.utils.validation import one_of

PARTS = ("test", "validation")


@dataclass(frozen=True)
class RankedLoss:
    """A loss in a ranking: the mean over its runs, which differ in seed or fold alone.

    Args:
        loss: Its label.
        runs: Its runs.
        score: Mean of the metric, from 0 to 1.
        std: Standard deviation of the metric over the runs; None with a single run.
        low: Lower end of the 95 % interval; None without intervals.
        high: Upper end of the interval.
        rank: 1 + the number of losses that are significantly better; None for baselines and where losses could not be
            tested.
        group: Letters; losses that share one cannot be told apart. Empty without ranks.
        p: The p-value against the loss with the largest score; None for that loss and without ranks.
    """

    loss: str
    runs: Sequence[Run]
    score: float
    std: float | None = None
    low: float | None = None
    high: float | None = None
    rank: int | None = None
    group: str = ""
    p: float | None = None

    @property
    def is_baseline(self) -> bool:
        """Whether nothing was trained."""
        return self.runs[0].is_baseline

    @property
    def seconds(self) -> float:
        """Mean training time of the runs."""
        return statistics.fmean(run.seconds for run in self.runs)

    @property
    def memory(self) -> float | None:
        """Peak memory of the runs in MiB; None if it was not measured."""
        return max((run.memory for run in self.runs if run.memory is not None), default=None)

    def mean(self, metric: str) -> float | None:
        """Mean of another test metric; None if not all runs have it.

        Args:
            metric: Its name in metrics.json.
        """
        if not all(run.has(metric) for run in self.runs):
            return None
        return statistics.fmean(run.score(metric) for run in self.runs)


@dataclass(frozen=True)
class Ranking:
    """Losses compared by one metric.

    Args:
        metric: The metric.
        part: The classes it was measured on: "test" or "validation".
        rows: The losses, in the order of their scores if ``ranked``.
        verdict: Whether the comparison is fair, with the reasons.
        ranked: Whether the losses may be ranked: the comparison is fair, or ranks were requested anyway.
        name: What distinguishes it from the other experiments of a tournament.
        classes: Number of classes that the intervals are over; None without intervals.
        seeds: Number of seeds that the intervals are over; 1 if the losses have different seeds.
        no_intervals: Why there are no intervals; empty if there are, or if none were requested.
        groups: Which losses can be told apart; None if they could not be tested.
        no_groups: Why losses could not be tested; empty if they were, or if it was not requested.
        agreement: Kendall's τ of the means on validation and on test classes; None if losses do not have both.
        agreement_metric: The validation metric of it: the one that selects epochs if all runs share it.
    """

    metric: str
    part: str
    rows: Sequence[RankedLoss]
    verdict: Verdict
    ranked: bool
    name: str = ""
    classes: int | None = None
    seeds: int = 0
    no_intervals: str = ""
    groups: Groups | None = None
    no_groups: str = ""
    agreement: float | None = None
    agreement_metric: str = ""

    @property
    def trained(self) -> list[RankedLoss]:
        """The rows without baselines."""
        return [row for row in self.rows if not row.is_baseline]

    @property
    def best(self) -> RankedLoss | None:
        """The trained loss with the largest score."""
        return max(self.trained, key=lambda row: row.score, default=None)

    @property
    def place(self) -> dict[str, Any]:
        """Dataset, network, size of the embedding and protocol of the first loss, and of all in a tournament."""
        return self.rows[0].runs[0].place

    @property
    def table(self) -> tables.Table:
        """The ranking as a table in percent."""
        return tables.of_ranking(self)

    def row(self, loss: str) -> RankedLoss | None:
        """The row of a loss, or None.

        Args:
            loss: Its label.
        """
        return next((row for row in self.rows if row.loss == loss), None)


def compare(
    runs: Iterable[Run],
    *,
    metric: str = "recall@1",
    part: str = "test",
    anyway: bool = False,
    other_code: str | None = None,
    intervals: bool = True,
) -> Ranking:
    """Rank losses by a metric. Runs that differ in seed or fold alone make one row.

    Losses have ranks where they can be tested: by a metric of each query, on enough test classes and with enough seeds.
    Those that cannot be told apart share a rank.

    Args:
        runs: Finished runs.
        metric: A key of metrics.json: "recall@1", "map@r", "nmi", …
        part: The classes to compare on: "test", or "validation" to choose settings without the test classes.
        anyway: Rank unfair comparisons as well; their tables are marked UNFAIR in every format.
        other_code: Why runs of other code may be ranked; printed with the ranking.
        intervals: Whether to compute intervals, ranks and p-values, which takes the metrics of each query.

    Returns:
        The ranking. Its ``table`` can be written as text, CSV, LaTeX or HTML.

    Raises:
        ValueError: If no run is given, or a run does not have the metric.
    """
    runs = list(runs)
    one_of("part", part, PARTS)
    if not runs:
        raise ValueError("runs is empty; at least one run is needed")
    verdict = judge(runs, other_code=other_code)
    ranked = verdict.fair or anyway
    by_loss = by_label(runs)
    scores = {label: [run.score(metric, part) for run in group] for label, group in by_loss.items()}
    means = {label: statistics.fmean(values) for label, values in scores.items()}
    if ranked:
        by_loss = dict(sorted(by_loss.items(), key=lambda item: -means[item[0]]))
    trained = [label for label, group in by_loss.items() if not group[0].is_baseline]
    ends: dict[str, tuple[float, float]] = {}
    classes, seeds, groups, no_intervals, no_groups = None, 0, None, "", ""
    if intervals:
        try:
            _check_per_query(metric, part)
            by_class = {label: significance.by_class_and_seed(group, metric) for label, group in by_loss.items()}
            ends = {label: values.interval() for label, values in by_class.items()}
            counts = [by_class[label].table.shape for label in trained or by_loss]
            classes, seeds = counts[0][0], min(shape[1] for shape in counts)
        except ValueError as error:
            no_intervals = no_groups = str(error)
        else:
            if ranked and len(trained) > 1:
                try:
                    tested = {label: by_class[label] for label in trained}
                    groups = significance.compare_losses(trained, significance.stack(tested))
                except ValueError as error:
                    no_groups = str(error)
    p = {pair.worse: pair.p for pair in groups.differences if pair.better == trained[0]} if groups else {}
    rows = []
    for label, group in by_loss.items():
        std = statistics.stdev(scores[label]) if len(group) > 1 else None
        low, high = ends.get(label, (None, None))
        rank, letters = (groups.ranks.get(label), groups.letters(label)) if groups else (None, "")
        rows.append(RankedLoss(label, group, means[label], std, low, high, rank, letters, p.get(label)))
    tau, rule = _agreement([by_loss[label] for label in trained], metric)
    return Ranking(
        metric,
        part,
        rows,
        verdict,
        ranked,
        classes=classes,
        seeds=seeds,
        no_intervals=no_intervals,
        groups=groups,
        no_groups=no_groups,
        agreement=tau,
        agreement_metric=rule,
    )


def experiments(
    runs: Iterable[Run], *, metric: str = "recall@1", anyway: bool = False, other_code: str | None = None
) -> list[Ranking]:
    """Rank the losses of each experiment: each dataset, network, size of the embedding and protocol."""
    return [
        replace(compare(group, metric=metric, anyway=anyway, other_code=other_code), name=name)
        for name, group in by_experiment(runs).items()
    ]


def judge_all(rankings: Sequence[Ranking]) -> Verdict:
    """The verdicts of experiments as one: each has to be fair by itself."""
    verdicts = [ranking.verdict for ranking in rankings]

    def lines(part: str) -> list[str]:
        named = [(ranking.name, line) for ranking in rankings for line in getattr(ranking.verdict, part)]
        return [f"{name}: {line}" if len(rankings) > 1 else line for name, line in named]

    fair = all(verdict.fair for verdict in verdicts)
    tried = dict.fromkeys(key for verdict in verdicts for key in verdict.tried)
    other_code = next((verdict.other_code for verdict in verdicts if verdict.other_code), "")
    looks = sum(verdict.test_looks for verdict in verdicts)
    return Verdict(fair, lines("reasons"), lines("notes"), tuple(tried), other_code, looks)


def by_experiment(runs: Iterable[Run]) -> dict[str, list[Run]]:
    """Group runs by experiment: dataset, network, size of the embedding and protocol."""
    runs = list(runs)
    places = [tuple(map(str, run.place.values())) for run in runs]
    shown = [at for at in range(4) if len({place[at] for place in places}) > 1] or [0, 1, 2]
    groups: dict[str, list[Run]] = {}
    for place, run in zip(places, runs, strict=True):
        groups.setdefault(" ".join(place[at] for at in shown), []).append(run)
    return groups


def by_label(runs: Iterable[Run]) -> dict[str, list[Run]]:
    """Group runs that differ in seed or fold alone, under labels that distinguish the groups."""
    groups = list(repetitions(runs).values())
    return dict(zip(labels(groups), groups, strict=True))


def labels(groups: Sequence[Sequence[Run]]) -> list[str]:
    """A distinct label for each group of repetitions."""
    names = []
    for runs in groups:
        same_name = [_facts(other[0]) for other in groups if other[0].loss == runs[0].loss]
        facts = _facts(runs[0])
        distinct = [
            f"{key}={facts.get(key, 'default')}"
            for key in dict.fromkeys(key for other in same_name for key in other)
            if any(other.get(key) != same_name[0].get(key) for other in same_name)
        ]
        names.append(f"{runs[0].loss} ({', '.join(distinct)})" if distinct else runs[0].loss)
    with_folders = [
        name if names.count(name) == 1 else f"{name} [{runs[0].name}]" for name, runs in zip(names, groups, strict=True)
    ]
    return [
        label if with_folders.count(label) == 1 else f"{name} [{runs[0].folder}]"
        for label, name, runs in zip(with_folders, names, groups, strict=True)
    ]


def _facts(run: Run) -> dict[str, Any]:
    """What can distinguish runs of one loss: its settings, those that the grid varies, and the experiment."""
    settings: Mapping[str, Any] = {} if run.is_baseline else run.tables.get("loss", {})
    tried = {key.rpartition(".")[2]: value for key, value in run.settings.items() if not key.startswith("loss.")}
    return {**settings, **tried, **run.place, "normalize": run.tables.get("network", {}).get("normalize", True)}


def _check_per_query(metric: str, part: str) -> None:
    """Raise a ValueError if runs do not keep a metric of each query."""
    if part != "test":
        raise ValueError(f"runs keep the metrics of each test query, not of {part} queries")
    if metric not in significance.METRICS:
        raise ValueError(f"runs keep {' and '.join(significance.METRICS)} of each query, not {metric}")


def _agreement(losses: Sequence[Sequence[Run]], metric: str) -> tuple[float | None, str]:
    """Kendall's τ of the validation and the test classes, and the validation metric."""
    rules = {run.selected_by for runs in losses for run in runs}
    rule = (rules.pop() if len(rules) == 1 else None) or metric
    if not all(run.has(rule, "validation") and run.has(metric) for runs in losses for run in runs):
        return None, rule
    validation = [statistics.fmean(run.score(rule, "validation") for run in runs) for runs in losses]
    test = [statistics.fmean(run.score(metric) for run in runs) for runs in losses]
    return significance.kendall_tau(validation, test), rule
