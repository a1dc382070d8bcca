"""Rankings of losses, computed once as data.

The command line, the leaderboard report and the server render what this module computes: ``compare`` ranks the losses
of one experiment, ``experiments`` those of many, and ``standings`` averages ranks over experiments.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from nearfar.bench.comparison import significance, tables, tournament
from nearfar.bench.comparison.fairness import Verdict, judge
from nearfar.bench.comparison.outcomes import Outcome
from nearfar.bench.comparison.significance import Answers, Groups
from nearfar.bench.comparison.tournament import Friedman, Standing, by_experiment, by_label
from nearfar.utils.validation import one_of

PARTS = ("test", "validation")


@dataclass(frozen=True)
class RankedLoss:
    """A loss in a ranking: the mean over its runs, which differ in seed or fold alone."""

    loss: str  # its label
    runs: Sequence[Outcome]
    score: float  # mean of the metric, from 0 to 1
    std: float | None = None  # standard deviation of the metric over the runs; None with a single run
    low: float | None = None  # lower end of the 95 % interval; None without intervals
    high: float | None = None  # upper end of the interval
    # 1 + the number of losses that are significantly better; None for baselines and where losses could not be tested.
    rank: int | None = None
    group: str = ""  # letters; losses that share one cannot be told apart. Empty without ranks
    p: float | None = None  # p-value against the loss with the largest score; None for that loss and without ranks

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
        """Mean of another test metric; None if not all runs have it."""
        if not all(run.has(metric) for run in self.runs):
            return None
        return statistics.fmean(run.score(metric) for run in self.runs)


@dataclass(frozen=True)
class Sample:
    """What intervals and p-values are over."""

    classes: int  # number of test classes
    seeds: int  # number of seeds of each loss; 1 if the losses have different seeds


@dataclass(frozen=True)
class Agreement:
    """Whether validation classes order losses as the test classes do."""

    metric: str  # the validation metric: the one that selects epochs if all runs share it
    tau: float  # kendall's τ of its means and those of the test metric


@dataclass(frozen=True)
class LossRanking:
    """Losses compared by one metric.

    Args:
        metric: The metric.
        part: The classes it was measured on: "test" or "validation".
        rows: The losses, in the order of their scores if ``ranked``.
        verdict: Whether the comparison is fair, with the reasons.
        ranked: Whether the losses may be ranked: the comparison is fair, or ranks were requested anyway.
        sample: What the intervals are over; None without intervals.
        no_intervals: Why there are no intervals; empty if there are, or if none were requested.
        groups: Which losses can be told apart; None if they could not be tested.
        no_groups: Why losses could not be tested; empty if they were, or if it was not requested.
        agreement: Agreement of the validation and the test classes; None if losses do not have both.
    """

    metric: str
    part: str
    rows: Sequence[RankedLoss]
    verdict: Verdict
    ranked: bool
    sample: Sample | None = None
    no_intervals: str = ""
    groups: Groups | None = None
    no_groups: str = ""
    agreement: Agreement | None = None

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
    """The ranking of runs that share dataset, network, size of the embedding and protocol."""

    name: str  # what distinguishes it from the other experiments
    data: str  # the dataset
    network: str  # the backbone
    dim: int  # size of the embedding
    protocol: str  # the evaluation protocol
    ranking: LossRanking  # its losses

    @property
    def rows(self) -> Sequence[RankedLoss]:
        """The losses of the ranking."""
        return self.ranking.rows


@dataclass(frozen=True)
class Standings:
    """A tournament: ranks over experiments.

    Args:
        metric: The metric that is ranked.
        scores: All scores: {experiment: {loss: score}}.
        rows: Standings of the losses that all experiments have, best first; empty if not ranked.
        left_out: Losses that some experiment does not have.
        verdict: Whether every experiment is fair.
        ranked: Whether there are standings.
        style: "friedman" or "thesis".
        friedman: The test over datasets; None in the style of the thesis, and with one dataset or one loss.
        wins: (better, worse) for each pair that differs significantly, once per experiment; None if unknown.
        no_wins: Why ``wins`` is None.
    """

    metric: str
    scores: Mapping[str, Mapping[str, float]]
    rows: Sequence[Standing]
    left_out: Sequence[str]
    verdict: Verdict
    ranked: bool
    style: str = "friedman"
    friedman: Friedman | None = None
    wins: Sequence[tuple[str, str]] | None = None
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
    intervals: bool = True,
) -> LossRanking:
    """Rank losses by a metric. Runs that differ in seed or fold alone make one row.

    Losses have ranks where they can be tested: by a metric of each query, on enough test classes and with enough seeds.
    Those that cannot be told apart share a rank.

    Args:
        outcomes: Finished runs.
        metric: A key of metrics.json: "recall@1", "map@r", "nmi", …
        part: The classes to compare on: "test", or "validation" to choose settings without the test classes.
        anyway: Rank unfair comparisons as well; their tables are marked UNFAIR in every format.
        intervals: Whether to compute intervals, ranks and p-values, which takes the metrics of each query.

    Returns:
        The ranking. Its ``table`` can be written as text, CSV, LaTeX or HTML.

    Raises:
        ValueError: If no run is given, or a run does not have the metric.
    """
    outcomes = list(outcomes)
    one_of("part", part, PARTS)
    if not outcomes:
        raise ValueError("outcomes is empty; at least one run is needed")
    verdict = judge(outcomes)
    ranked = verdict.fair or anyway
    by_loss = by_label(outcomes)
    scores = {label: [run.score(metric, part) for run in runs] for label, runs in by_loss.items()}
    means = {label: statistics.fmean(values) for label, values in scores.items()}
    if ranked:
        by_loss = dict(sorted(by_loss.items(), key=lambda item: -means[item[0]]))
    trained = {label: runs for label, runs in by_loss.items() if not runs[0].is_baseline}
    ends: dict[str, tuple[float, float]] = {}
    sample, groups, no_intervals, no_groups = None, None, "", ""
    if intervals:
        try:
            _check_per_query(metric, part)
            answers = {label: significance.read_answers(label, runs, metric) for label, runs in by_loss.items()}
            alone = {label: significance.join([own]) for label, own in answers.items()}
            ends = {label: own.intervals()[label] for label, own in alone.items()}
            own = [alone[label] for label in trained or by_loss]
            sample = Sample(own[0].classes, min(len(each.seeds) for each in own))
        except ValueError as error:
            no_intervals = no_groups = str(error)
        else:
            groups, no_groups = _groups([answers[label] for label in trained]) if ranked else (None, "")
    p = {pair.worse: pair.p for pair in groups.differences if pair.better == next(iter(trained))} if groups else {}
    rows = []
    for label, runs in by_loss.items():
        std = statistics.stdev(scores[label]) if len(runs) > 1 else None
        low, high = ends.get(label, (None, None))
        rank, letters = (groups.ranks.get(label), groups.letters(label)) if groups else (None, "")
        rows.append(RankedLoss(label, runs, means[label], std, low, high, rank, letters, p.get(label)))
    agreement = _agreement(list(trained.values()), metric)
    return LossRanking(metric, part, rows, verdict, ranked, sample, no_intervals, groups, no_groups, agreement)


def experiments(
    outcomes: Iterable[Outcome], *, metric: str = "recall@1", anyway: bool = False, intervals: bool = True
) -> list[Experiment]:
    """Rank the losses of each experiment: each dataset, network, size of the embedding and protocol."""
    return [
        Experiment(name, **runs[0].place, ranking=compare(runs, metric=metric, anyway=anyway, intervals=intervals))
        for name, runs in by_experiment(outcomes).items()
    ]


def standings(
    outcomes: Iterable[Outcome], *, metric: str = "recall@1", anyway: bool = False, style: str = "friedman"
) -> Standings:
    """Hold a tournament: rank losses in each experiment by their scores.

    If losses can be tested in every experiment, significant differences are counted as wins.

    Args:
        outcomes: Finished runs of one or more experiments. The fairness of each experiment is checked separately.
        metric: The test metric to rank by.
        anyway: Rank unfair experiments as well; the table is then marked UNFAIR in every format.
        style: "friedman" (mid-ranks, a test over datasets and its critical difference) or "thesis" (sums of ranks).

    Returns:
        The standings.

    Raises:
        ValueError: If there is no trained run, or no loss that all experiments have.
    """
    outcomes = list(outcomes)
    one_of("style", style, tournament.STYLES)
    verdict = judge_experiments(outcomes)
    scores = tournament.scores(outcomes, metric)
    if not scores:
        raise ValueError("there is nothing to rank: no trained run is given")
    if not (verdict.fair or anyway):
        return Standings(metric, scores, (), (), verdict, ranked=False, style=style)
    ranked = rank_shared(scores, outcomes, metric=metric, verdict=verdict, style=style)
    if not ranked.rows:
        raise ValueError(f"there is nothing to rank: no loss is in all of {', '.join(scores)}")
    wins, no_wins = _wins(outcomes, metric)
    return replace(ranked, wins=wins, no_wins=no_wins)


def rank_shared(
    scores: Mapping[str, Mapping[str, float]],
    outcomes: Iterable[Outcome],
    *,
    metric: str,
    verdict: Verdict,
    style: str = "friedman",
) -> Standings:
    """Rank the losses that all experiments of ``scores`` have; no rows where they share none."""
    common, left_out = tournament.shared(scores)
    if not any(common.values()):
        return Standings(metric, scores, (), left_out, verdict, True, style)
    data = {name: runs[0].data for name, runs in by_experiment(outcomes).items()}
    rows = tournament.tournament(common, style=style, data=data)
    test = tournament.friedman(common, data) if style == "friedman" else None
    return Standings(metric, scores, rows, left_out, verdict, True, style, test)


def judge_experiments(outcomes: Iterable[Outcome]) -> Verdict:
    """Whether each experiment is fair by itself, as a tournament needs it."""
    verdicts = {name: judge(runs) for name, runs in by_experiment(outcomes).items()}

    def lines(part: str) -> list[str]:
        named = [(name, line) for name, verdict in verdicts.items() for line in getattr(verdict, part)]
        return [f"{name}: {line}" if len(verdicts) > 1 else line for name, line in named]

    fair = all(verdict.fair for verdict in verdicts.values())
    tried = dict.fromkeys(key for verdict in verdicts.values() for key in verdict.tried)
    waived = {what: reason for verdict in verdicts.values() for what, reason in verdict.waived.items()}
    looks = sum(verdict.test_looks for verdict in verdicts.values())
    return Verdict(fair, lines("reasons"), lines("notes"), tuple(tried), waived, looks)


def _check_per_query(metric: str, part: str = "test") -> None:
    """Raise a ValueError if runs do not keep a metric of each query."""
    if part != "test":
        raise ValueError(f"runs keep the metrics of each test query, not of {part} queries")
    if metric not in significance.METRICS:
        raise ValueError(f"runs keep {' and '.join(significance.METRICS)} of each query, not {metric}")


def _groups(trained: Sequence[Answers]) -> tuple[Groups | None, str]:
    """Which losses can be told apart, or why they cannot be tested."""
    if len(trained) < 2:
        return None, ""
    try:
        return significance.compare_losses(significance.join(trained)), ""
    except ValueError as error:
        return None, str(error)


def _agreement(losses: Sequence[Sequence[Outcome]], metric: str) -> Agreement | None:
    """Agreement of the validation and the test classes; None if a run does not have both."""
    rules = {run.selected_by for runs in losses for run in runs}
    rule = (rules.pop() if len(rules) == 1 else None) or metric
    if not all(run.has(rule, "validation") and run.has(metric) for runs in losses for run in runs):
        return None
    validation = [statistics.fmean(run.score(rule, "validation") for run in runs) for runs in losses]
    tau = significance.kendall_tau(validation, [statistics.fmean(run.score(metric) for run in runs) for runs in losses])
    return None if tau is None else Agreement(rule, tau)


def _wins(outcomes: Sequence[Outcome], metric: str) -> tuple[list[tuple[str, str]] | None, str]:
    """(better, worse) for each significant difference, once per experiment; or None, and why."""
    found = []
    try:
        _check_per_query(metric)
        for losses in tournament.entries(outcomes).values():
            pairs = significance.compare_losses(significance.read_results(losses, metric)).differences
            found += [(pair.better, pair.worse) for pair in pairs if pair.p < significance.ALPHA]
    except ValueError as error:
        return None, str(error)
    return found, ""
