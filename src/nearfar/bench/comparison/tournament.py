"""Tournaments: ranks of losses over experiments, and the Friedman test over datasets.

Experiments on one dataset (sizes of the embedding, networks) share its classes, so they are not independent: their
ranks are averaged, and the datasets are what the test counts (Demšar 2006). The thesis adds up ranks over all
experiments (its Table 11).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nearfar.bench.comparison import tables
from nearfar.bench.comparison.fairness import Verdict
from nearfar.bench.comparison.ranking import Ranking, experiments, judge_all
from nearfar.bench.comparison.significance import ALPHA, ONE_LOSS
from nearfar.training.run.reader import Run
from nearfar.utils.validation import one_of

STYLES = ("friedman", "thesis")
PERMUTATIONS = 10_000  # of the Friedman test

Scores = Mapping[str, Mapping[str, float]]  # by experiment and loss


class Standing(NamedTuple):
    """A loss in a tournament."""

    loss: str  # its label
    total: float  # sum of its ranks
    average: float  # mean of its ranks; in the style "friedman" the mean over datasets
    std: float  # standard deviation of its ranks with n − 1 degrees of freedom; NaN for a single experiment
    ranks: tuple[float, ...]  # its rank in each experiment


@dataclass(frozen=True)
class Tournament:
    """Ranks of losses over experiments, with a test whether any losses differ in rank over datasets.

    Args:
        metric: The metric that is ranked.
        scores: All scores: {experiment: {loss: score}}.
        rows: The losses that all experiments have, best first, with their ranks; empty if not ranked.
        left_out: Losses that some experiment does not have.
        verdict: Whether every experiment is fair.
        ranked: Whether there are ranks.
        style: "friedman" or "thesis".
        datasets: Number of datasets.
        statistic: Friedman's statistic, corrected for ties; None in the style of the thesis, and with one dataset or
            one loss.
        p: Its p-value, by permutation of the ranks within each dataset.
        critical: Average ranks that differ by less cannot be told apart (Nemenyi).
        wins: (better, worse) for each pair that differs significantly, once per experiment; None if unknown.
        no_wins: Why ``wins`` is None.
    """

    metric: str
    scores: Scores
    rows: Sequence[Standing] = ()
    left_out: Sequence[str] = ()
    verdict: Verdict = field(default_factory=lambda: Verdict(fair=True))
    ranked: bool = True
    style: str = "friedman"
    datasets: int = 0
    statistic: float | None = None
    p: float | None = None
    critical: float | None = None
    wins: Sequence[tuple[str, str]] | None = None
    no_wins: str = ""

    @property
    def table(self) -> tables.Table:
        """The ranks as a table, or the scores in percent if they are not ranked."""
        return tables.of_tournament(self)


def tournament(
    entries: Iterable[Run] | Scores,
    *,
    metric: str = "recall@1",
    anyway: bool = False,
    other_code: str | None = None,
    style: str = "friedman",
    data: Mapping[str, str] | None = None,
) -> Tournament:
    """Rank losses in each experiment by their scores, and average their ranks.

    The best score has rank 1. Losses with the same total keep their order. If the losses of runs can be tested in every
    experiment, significant differences are counted as wins.

    Args:
        entries: Finished runs of one or more experiments, whose fairness is checked separately; or scores
            ``{experiment: {loss: score}}``, where larger is better and each experiment has all losses.
        metric: The test metric of runs to rank by: "recall@1", "map@r", "nmi", …
        anyway: Rank unfair experiments as well; the table is then marked UNFAIR in every format.
        other_code: Why runs of other code may be ranked; printed with the table.
        style: "friedman": equal scores share the middle of their ranks, averages are over datasets, and there is a test
            over datasets with its critical difference. "thesis": equal scores share the better rank, two first places
            are followed by the third, and averages are over experiments.
        data: The dataset of each experiment, for scores; by default each has its own.

    Returns:
        The tournament, with a row for each loss.

    Raises:
        ValueError: If there is no trained run, no loss that all experiments have, a loss is missing from an experiment
            of scores, or a score is not a finite number.

    >>> found = tournament({
    ...     "resnet50/64": {"triplet": 57.6, "margin": 59.7, "proxy_anchor": 62.9},
    ...     "resnet50/512": {"triplet": 63.5, "margin": 63.5, "proxy_anchor": 69.5},
    ... })
    >>> for row in found.rows:
    ...     print(row.loss, row.total, row.average, round(row.std, 2))
    proxy_anchor 2.0 1.0 0.0
    margin 4.5 2.25 0.35
    triplet 5.5 2.75 0.35
    """
    one_of("style", style, STYLES)
    if isinstance(entries, Mapping):
        return _rank(Tournament(metric, entries, style=style), entries, data)
    runs = list(entries)
    if not all(isinstance(run, Run) for run in runs):
        raise TypeError("entries are neither runs nor a mapping {experiment: {loss: score}}")
    ranked = of_rankings(experiments(runs, metric=metric, anyway=anyway, other_code=other_code), runs, style=style)
    if not ranked.scores:
        raise ValueError("there is nothing to rank: no trained run is given")
    if ranked.ranked and not ranked.rows:
        raise ValueError(f"there is nothing to rank: no loss is in all of {', '.join(ranked.scores)}")
    return ranked


def of_rankings(rankings: Sequence[Ranking], runs: Sequence[Run], *, style: str = "friedman") -> Tournament:
    """Rank the losses that all experiments have; no rows where they share none. ``runs`` give the order of equals."""
    rankings = [ranking for ranking in rankings if ranking.trained]
    position = {id(run): at for at, run in enumerate(runs)}
    names = _names(rankings)
    scores = {}
    for ranking in rankings:
        rows = sorted(ranking.trained, key=lambda row: min(position[id(run)] for run in row.runs))
        scores[ranking.name] = {names[ranking.name, row.loss]: row.score for row in rows}
    metric = rankings[0].metric if rankings else ""
    ranked = all(ranking.ranked for ranking in rankings)
    tournament = Tournament(metric, scores, verdict=judge_all(rankings), ranked=ranked, style=style)
    if not ranked:
        return tournament
    every = list(dict.fromkeys(loss for losses in scores.values() for loss in losses))
    common = [loss for loss in every if all(loss in losses for losses in scores.values())]
    tournament = replace(tournament, left_out=[loss for loss in every if loss not in common])
    if not common:
        return tournament
    untested = next((ranking for ranking in rankings if ranking.groups is None), None)
    significant = [
        (names[ranking.name, pair.better], names[ranking.name, pair.worse])
        for ranking in rankings
        for pair in (ranking.groups.differences if ranking.groups is not None else ())
        if pair.p < ALPHA
    ]
    wins, no_wins = (significant, "") if untested is None else (None, untested.no_groups or ONE_LOSS)
    tournament = replace(tournament, wins=wins, no_wins=no_wins)
    shared = {name: {loss: losses[loss] for loss in common} for name, losses in scores.items()}
    data = {ranking.name: ranking.place["data"] for ranking in rankings}
    return _rank(tournament, shared, data)


def _rank(tournament: Tournament, scores: Scores, data: Mapping[str, str] | None) -> Tournament:
    """Fill in the rows, and in the style "friedman" the test of equal losses over datasets."""
    from scipy import stats

    losses = _checked(scores)
    table = np.array([[-float(experiment[loss]) for experiment in scores.values()] for loss in losses])
    thesis = tournament.style == "thesis"
    ranks = stats.rankdata(table, method="min" if thesis else "average", axis=0).astype(np.float64)
    names = [name if data is None else data[name] for name in scores]
    # [losses, datasets], the mean rank in the experiments of each dataset.
    by_data = np.stack([ranks[:, np.array(names) == name].mean(axis=1) for name in dict.fromkeys(names)], axis=1)
    averages = (ranks if thesis else by_data).mean(axis=1)
    rows = []
    for loss, ranks_of_loss, average in zip(losses, ranks.tolist(), averages.tolist(), strict=True):
        std = statistics.stdev(ranks_of_loss) if len(names) > 1 else math.nan
        rows.append(Standing(loss, sum(ranks_of_loss), average, std, tuple(ranks_of_loss)))
    count, blocks = by_data.shape
    order = sorted(rows, key=lambda row: row.total if thesis else row.average)
    tournament = replace(tournament, rows=order, datasets=blocks)
    if thesis or blocks < 2 or count < 2:
        return tournament
    middle = (count + 1) / 2
    spread = np.square(by_data - middle).sum()

    def statistic(tables: NDArray[np.float64]) -> NDArray[np.float64]:
        sums = (count - 1) * np.square((tables - middle).sum(axis=-2)).sum(axis=-1)
        return sums / spread if spread > 0 else np.zeros_like(sums)

    observed = float(statistic(by_data.T))
    drawn = statistic(
        np.random.default_rng(0).permuted(np.broadcast_to(by_data.T, (PERMUTATIONS, blocks, count)), axis=-1)
    )
    p = (1 + int((drawn >= observed * (1 - 1e-12)).sum())) / (1 + PERMUTATIONS)
    studentized = float(stats.studentized_range.ppf(1 - ALPHA, count, np.inf))
    critical = studentized / math.sqrt(2) * math.sqrt(count * (count + 1) / (6 * blocks))
    return replace(tournament, statistic=observed, p=p, critical=critical)


def _checked(scores: Scores) -> list[str]:
    """The losses of all experiments, each of which has them all."""
    if not all(isinstance(losses, Mapping) for losses in scores.values()):
        raise TypeError("scores is not a mapping of mappings; needed is {experiment: {loss: score}}")
    if not scores:
        raise ValueError("scores is empty; needed is at least one experiment")
    losses = list(dict.fromkeys(loss for experiment in scores.values() for loss in experiment))
    for name, experiment in scores.items():
        missing = [loss for loss in losses if loss not in experiment]
        if missing:
            raise ValueError(f"experiment {name!r} has no score of {', '.join(missing)}; each needs all losses")
        for loss, score in experiment.items():
            if not _is_number(score):
                raise ValueError(f"the score of {loss!r} in {name!r} is {score!r}; a finite number is needed")
    if not losses:
        raise ValueError("scores has no loss; needed is {experiment: {loss: score}}")
    return losses


def _names(rankings: Sequence[Ranking]) -> dict[tuple[str, str], str]:
    """A name for each loss of each experiment that has the same settings of the loss in all of them.

    A loss whose settings differ between experiments is several losses, unless studies of the same number of trials
    chose them.
    """
    rows = [(ranking.name, row.loss, _settings(row.runs[0])) for ranking in rankings for row in ranking.trained]
    names = {}
    for experiment, label, settings in rows:
        of_label = [others for _, other, others in rows if other == label]
        differing = [
            f"{key}={settings.get(key, 'default')}"
            for key in dict.fromkeys(key for others in of_label for key in others)
            if any(others.get(key) != settings.get(key) for others in of_label)
        ]
        names[experiment, label] = f"{label} ({', '.join(differing)})" if differing else label
    return names


def _settings(run: Run) -> dict[str, Any]:
    """The settings of a loss that identify it: how many trials chose them, or else their values."""
    tuning = run.tables.get("tuning", {})
    if tuning.get("chosen_by") == "study":
        return {"trials": tuning.get("trials")}
    settings = {key: value for key, value in run.tables.get("loss", {}).items() if key != "name"}
    return settings | {"multiplier": run.tables.get("optimizer", {}).get("loss_multiplier")}


def _is_number(score: Any) -> bool:
    """Whether a value is a finite number of any library; booleans and text are not."""
    if isinstance(score, (bool, str, bytes)):
        return False
    try:
        return math.isfinite(float(score))
    except (TypeError, ValueError):
        return False
