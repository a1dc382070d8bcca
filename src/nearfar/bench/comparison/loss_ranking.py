"""Rankings of losses, computed once as data.

The command line, the leaderboard report and the server render what this module computes: ``compare`` ranks the losses
of one experiment, ``experiments`` those of many, and ``standings`` adds ranks up over experiments.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from nearfar.bench.comparison import significance, tables, tournament
from nearfar.bench.comparison.fairness import Verdict, judge
from nearfar.bench.comparison.outcomes import Outcome
from nearfar.bench.comparison.tournament import Standing, by_experiment, by_label
from nearfar.utils.validation import one_of

PARTS = ("test", "validation")
ALPHA = 0.05  # p-values below it count as a win
QUERY_SAMPLES = 2000  # draws of queries, of which there are many more than classes


@dataclass(frozen=True)
class RankedLoss:
    """A loss in a ranking: the mean over its runs, which differ in seed or fold alone.

    Args:
        loss: Its label.
        runs: Its runs.
        rank: From 1; equal scores share the better rank. None for baselines and in unfair comparisons.
        score: Mean of the metric, from 0 to 1.
        std: Standard deviation of the metric over the runs; None with a single run.
        low: Lower end of the 95 % interval; None without intervals.
        high: Upper end of the interval.
        p: p-value against the best trained loss; None for the best loss and without intervals.
    """

    loss: str
    runs: Sequence[Outcome]
    rank: int | None
    score: float
    std: float | None = None
    low: float | None = None
    high: float | None = None
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
class Resampling:
    """How intervals and p-values were drawn.

    Args:
        over: What was drawn: "classes" or "queries".
        samples: Number of draws.
        classes: Number of test classes; 0 if unknown.
    """

    over: str
    samples: int
    classes: int = 0

    @property
    def too_few_classes(self) -> bool:
        """Whether there are too few classes for reliable intervals."""
        return self.over == "classes" and self.classes < significance.FEW


@dataclass(frozen=True)
class LossRanking:
    """Losses compared by one metric.

    Args:
        metric: The metric.
        part: The classes it was measured on: "test" or "validation".
        rows: The losses, best first if ``ranked``.
        verdict: Whether the comparison is fair, with the reasons.
        ranked: Whether the losses have ranks. An unfair comparison has none unless they were requested.
        resampling: How intervals were drawn; None without intervals.
        no_intervals: Why there are no intervals; empty if there are, or if none were requested.
    """

    metric: str
    part: str
    rows: Sequence[RankedLoss]
    verdict: Verdict
    ranked: bool
    resampling: Resampling | None = None
    no_intervals: str = ""

    @property
    def best(self) -> RankedLoss | None:
        """The trained loss with the largest score."""
        return max((row for row in self.rows if not row.is_baseline), key=lambda row: row.score, default=None)

    @property
    def table(self) -> tables.ResultTable:
        """The ranking as a table in percent."""
        return tables.of_ranking(self)

    def row(self, loss: str) -> RankedLoss | None:
        """The row of a loss, or None.

        Args:
            loss: Its label.
        """
        return next((row for row in self.rows if row.loss == loss), None)


@dataclass(frozen=True)
class Experiment:
    """The ranking of runs that share dataset, network, size of the embedding and protocol.

    Args:
        name: What distinguishes it from the other experiments.
        data: The dataset.
        network: The backbone.
        dim: Size of the embedding.
        protocol: The evaluation protocol.
        ranking: Its losses.
    """

    name: str
    data: str
    network: str
    dim: int
    protocol: str
    ranking: LossRanking

    @property
    def rows(self) -> Sequence[RankedLoss]:
        """The losses of the ranking."""
        return self.ranking.rows


@dataclass(frozen=True)
class Standings:
    """A tournament: ranks added up over experiments.

    Args:
        metric: The metric that is ranked.
        scores: All scores: {experiment: {loss: score}}.
        rows: Standings of the losses that all experiments have, best first; empty if not ranked.
        left_out: Losses that some experiment does not have.
        verdict: Whether every experiment is fair.
        ranked: Whether there are standings.
        wins: (better, worse) for each pair that differs significantly, once per experiment; None if unknown.
        resampling: How p-values were drawn; None without them.
        no_wins: Why ``wins`` is None.
    """

    metric: str
    scores: Mapping[str, Mapping[str, float]]
    rows: Sequence[Standing]
    left_out: Sequence[str]
    verdict: Verdict
    ranked: bool
    wins: Sequence[tuple[str, str]] | None = None
    resampling: Resampling | None = None
    no_wins: str = ""

    @property
    def table(self) -> tables.ResultTable:
        """The standings as a table, or the scores in percent if they are not ranked."""
        return tables.of_standings(self)


def compare(
    outcomes: Iterable[Outcome],
    *,
    metric: str = "recall@1",
    part: str = "test",
    anyway: bool = False,
    over: str = "classes",
    samples: int = significance.SAMPLES,
    intervals: bool = True,
) -> LossRanking:
    """Rank losses by a metric. Runs that differ in seed or fold alone make one row.

    Args:
        outcomes: Finished runs.
        metric: A key of metrics.json: "recall@1", "map@r", "nmi", …
        part: The classes to compare on: "test", or "validation" to choose settings without the test classes.
        anyway: Rank unfair comparisons as well; their tables are marked UNFAIR in every format.
        over: What is drawn for intervals and p-values: "classes" or "queries".
        samples: Number of draws.
        intervals: Whether to compute intervals and p-values at all.

    Returns:
        The ranking. Its ``table`` can be written as text, CSV, LaTeX or HTML.

    Raises:
        ValueError: If no run is given, or a run does not have the metric.
    """
    outcomes = list(outcomes)
    one_of("over", over, significance.OVER)
    one_of("part", part, PARTS)
    if not outcomes:
        raise ValueError("outcomes is empty; at least one run is needed")
    verdict = judge(outcomes)
    ranked = verdict.fair or anyway
    groups = by_label(outcomes)
    scores = {label: [run.score(metric, part) for run in runs] for label, runs in groups.items()}
    means = {label: statistics.fmean(values) for label, values in scores.items()}
    if ranked:
        groups = dict(sorted(groups.items(), key=lambda item: -means[item[0]]))
    trained = [label for label, runs in groups.items() if not runs[0].is_baseline]
    ends: Mapping[str, tuple[float, float]] = {}
    p_values: Mapping[str, float] = {}
    resampling, problem = None, ""
    if intervals:
        try:
            _check_resampled(metric, part)
            ends = significance.intervals(groups, metric=metric, over=over, samples=samples)
            p_values = _against_best(groups, trained, metric, over, samples) if ranked else {}
            resampling = Resampling(over, samples, significance.count_classes(groups))
        except ValueError as error:
            ends, problem = {}, str(error)
    rows = []
    for label, runs in groups.items():
        rank = 1 + sum(means[other] > means[label] for other in trained) if ranked and label in trained else None
        std = statistics.stdev(scores[label]) if len(runs) > 1 else None
        low, high = ends.get(label, (None, None))
        rows.append(RankedLoss(label, runs, rank, means[label], std, low, high, p_values.get(label)))
    return LossRanking(metric, part, rows, verdict, ranked, resampling, problem)


def experiments(
    outcomes: Iterable[Outcome],
    *,
    metric: str = "recall@1",
    anyway: bool = False,
    intervals: bool = True,
) -> list[Experiment]:
    """Rank the losses of each experiment: each dataset, network, size of the embedding and protocol.

    Intervals are over classes, or over queries if the runs did not keep their classes.

    Args:
        outcomes: Finished runs that have the metric.
        metric: The test metric to rank by.
        anyway: Rank unfair experiments as well.
        intervals: Whether to compute intervals and p-values.

    Returns:
        The experiments, in the order of their first runs.
    """
    found = []
    for name, runs in by_experiment(outcomes).items():
        ranking = compare(runs, metric=metric, anyway=anyway, intervals=intervals)
        if ranking.no_intervals:  # old runs did not keep the classes of their queries
            other = compare(runs, metric=metric, anyway=anyway, over="queries", samples=QUERY_SAMPLES)
            ranking = ranking if other.no_intervals else other
        found.append(Experiment(name, **runs[0].place, ranking=ranking))
    return found


def standings(
    outcomes: Iterable[Outcome],
    *,
    metric: str = "recall@1",
    anyway: bool = False,
    over: str = "classes",
    samples: int = significance.SAMPLES,
) -> Standings:
    """Hold a tournament: rank losses in each experiment and add up their ranks.

    If the runs kept the metrics of each query, significant differences between losses are counted as wins (paired
    draws, p-values corrected within an experiment).

    Args:
        outcomes: Finished runs of one or more experiments. The fairness of each experiment is checked separately.
        metric: The test metric to rank by.
        anyway: Rank unfair experiments as well; the table is then marked UNFAIR in every format.
        over: What is drawn for p-values: "classes" or "queries".
        samples: Number of draws.

    Returns:
        The standings.

    Raises:
        ValueError: If there is no trained run, or no loss that all experiments have.
    """
    outcomes = list(outcomes)
    one_of("over", over, significance.OVER)
    verdict = judge_experiments(outcomes)
    scores = tournament.scores(outcomes, metric)
    if not scores:
        raise ValueError("there is nothing to rank: no trained run is given")
    if not (verdict.fair or anyway):
        return Standings(metric, scores, (), (), verdict, ranked=False)
    common, left_out = tournament.shared(scores)
    if not any(common.values()):
        raise ValueError(f"there is nothing to rank: no loss is in all of {', '.join(common)}")
    wins, resampling, problem = None, None, ""
    try:
        _check_resampled(metric)
        wins = _wins(outcomes, metric, over, samples)
        resampling = Resampling(over, samples)
    except ValueError as error:
        problem = str(error)
    rows = tournament.tournament(common)
    return Standings(metric, scores, rows, left_out, verdict, True, wins, resampling, problem)


def judge_experiments(outcomes: Iterable[Outcome]) -> Verdict:
    """Whether each experiment is fair by itself, as a tournament needs it.

    Args:
        outcomes: Finished runs.

    Returns:
        One verdict; its lines name the experiment if there are several.
    """
    verdicts = {name: judge(runs) for name, runs in by_experiment(outcomes).items()}

    def lines(part: str) -> list[str]:
        named = [(name, line) for name, verdict in verdicts.items() for line in getattr(verdict, part)]
        return [f"{name}: {line}" if len(verdicts) > 1 else line for name, line in named]

    fair = all(verdict.fair for verdict in verdicts.values())
    tried = dict.fromkeys(key for verdict in verdicts.values() for key in verdict.tried)
    return Verdict(fair, lines("reasons"), lines("notes"), tuple(tried))


def _check_resampled(metric: str, part: str = "test") -> None:
    """Raise a ValueError if runs do not keep a metric of each query."""
    if part != "test":
        raise ValueError(f"runs keep the metrics of each test query, not of {part} queries")
    if metric not in significance.METRICS:
        raise ValueError(f"runs keep {' and '.join(significance.METRICS)} of each query, not {metric}")


def _against_best(
    groups: Mapping[str, Sequence[Outcome]], trained: Sequence[str], metric: str, over: str, samples: int
) -> dict[str, float]:
    """p-values of the trained losses against the best of them."""
    if not trained:
        return {}
    own = {label: groups[label] for label in trained}
    found = significance.pairwise(own, metric=metric, over=over, best_only=True, samples=samples)
    return {pair.worse: pair.p for pair in found}


def _wins(outcomes: Sequence[Outcome], metric: str, over: str, samples: int) -> list[tuple[str, str]]:
    """(better, worse) for each significant difference, once per experiment."""
    found = []
    for runs in by_experiment(outcomes).values():
        groups = by_label(run for run in runs if not run.is_baseline)
        pairs = significance.pairwise(groups, metric=metric, over=over, samples=samples) if groups else []
        found += [(pair.better, pair.worse) for pair in pairs if pair.p < ALPHA]
    return found
