"""Which losses can be told apart, and which differences are within chance.

Losses are tested on the same classes with the same seeds, so what is compared are differences by class and seed. Both
are samples: a comparison should hold for other classes and for other seeds. ``metrics.intervals`` estimates the error
of each difference. p-values of all pairs are corrected for their number (Holm), so that the chance of telling any two
equal losses apart is at most ALPHA. docs/benchmarks/significance.md has the simulated error rates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import special

from nearfar.bench.comparison.outcomes import Outcome
from nearfar.metrics.intervals import CrossedMeans, MeanSquares, Values, by_class, crossed_means, mean_squares
from nearfar.utils.validation import one_of

ALPHA = 0.05  # chance of telling any two equal losses apart
POWER = 0.8  # chance of finding the smallest detectable difference
MIN_CLASSES = 5  # with fewer classes or seeds there is no p-value: error rates were not shown to hold
MIN_SEEDS = 3
METRICS = ("recall@1", "map@r")  # kept for each query


@dataclass(frozen=True)
class LossResults:
    """A metric of losses by class and seed."""

    losses: tuple[str, ...]  # the labels of the losses
    table: Values  # [classes, seeds, losses]; the plain mean is the mean over all queries. Folds of a seed are averaged
    seeds: tuple[int, ...]

    @property
    def classes(self) -> int:
        """The number of classes."""
        return len(self.table)

    def intervals(self, confidence: float = 0.95) -> dict[str, tuple[float, float]]:
        """Interval of each loss over classes, and over seeds if there are several."""
        low, high = crossed_means(mean_squares(self.table)).share_intervals(confidence)
        return {loss: (float(low[at]), float(high[at])) for at, loss in enumerate(self.losses)}

    @property
    def too_few(self) -> str:
        """Why there can be no p-values; empty if there can."""
        if len(self.losses) < 2:
            return "there is one loss, and nothing to compare it with"
        if len(self.seeds) < MIN_SEEDS:
            return f"too few seeds: {len(self.seeds)}, and at least {MIN_SEEDS} are needed to compare losses"
        if self.classes < MIN_CLASSES:
            return f"too few classes: {self.classes}, and at least {MIN_CLASSES} are needed to compare losses"
        return ""


@dataclass(frozen=True)
class Difference:
    """The difference between two losses."""

    better: str  # the loss with the larger mean
    worse: str  # the other loss
    mean: float
    low: float  # lower end of its 95 % interval, not corrected for the number of pairs
    high: float  # upper end of the interval
    p: float  # two-sided p-value, corrected for the number of pairs
    detectable: float  # the smallest true difference that would be found with a chance of POWER


@dataclass(frozen=True)
class Groups:
    """Losses that can or cannot be told apart."""

    ranks: Mapping[str, int]  # 1 + the number of losses that are significantly better, by loss
    bands: Sequence[Sequence[str]]  # largest sets of losses of which no two can be told apart, best first
    differences: Sequence[Difference]  # all pairs; those with the best loss first
    detectable: float  # the smallest difference that is found with a chance of POWER; median over pairs

    def letters(self, loss: str) -> str:
        """The bands of a loss as letters; losses that share a letter cannot be told apart."""
        return "".join(letter(at) for at, band in enumerate(self.bands) if loss in band)


def compare_losses(results: LossResults) -> Groups:
    """Compare all pairs of losses."""
    if results.too_few:
        raise ValueError(results.too_few)
    order = np.argsort(-results.table.mean(axis=(0, 1)), kind="stable")
    losses = [results.losses[at] for at in order]
    found = pair_means(results.table[:, :, order])
    p, (low, high) = holm(found.p_values()), found.intervals()
    strictest = ALPHA / len(p)
    needed = special.stdtrit(found.freedom, 1 - strictest / 2) + special.stdtrit(found.freedom, POWER)
    detectable = needed * found.error
    apart = np.zeros((len(losses), len(losses)), dtype=bool)
    differences = []
    for at, (better, worse) in enumerate(combinations(range(len(losses)), 2)):
        numbers = (float(each[at]) for each in (found.mean, low, high, p, detectable))
        differences.append(Difference(losses[better], losses[worse], *numbers))
        apart[better, worse] = p[at] < ALPHA
    for middle in range(len(losses)):  # a > b and b > c imply a > c
        apart |= apart[:, [middle]] & apart[[middle]]
    ranks = {loss: 1 + int(better) for loss, better in zip(losses, apart.sum(axis=0), strict=True)}
    bands = [[losses[at] for at in band] for band in cliques(~(apart | apart.T))]
    return Groups(ranks, bands, differences, float(np.median(detectable)))


def pair_means(table: Values) -> CrossedMeans:
    """Mean differences of all pairs of losses with their errors."""
    found = [mean_squares(table[:, :, [first]] - table[:, :, first + 1 :]) for first in range(table.shape[2] - 1)]
    parts = ("mean", "of_class", "of_seed", "of_rest")
    joined = {name: np.concatenate([getattr(each, name) for each in found]) for name in parts}
    return crossed_means(MeanSquares(**joined, classes=table.shape[0], seeds=table.shape[1]), related=True)


def holm(p: Values) -> Values:
    """Correct p-values for their number by the method of Holm."""
    order = np.argsort(p, kind="stable")
    corrected = np.empty_like(p)
    corrected[order] = np.minimum(1.0, np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1)))
    return corrected


def cliques(together: NDArray[np.bool_]) -> list[list[int]]:
    """Largest sets of items that are all together, in the order of their members."""
    sets: list[frozenset[int]] = [frozenset(range(len(together)))]
    for one, other in combinations(range(len(together)), 2):
        if together[one, other]:
            continue
        split = [
            part for each in sets for part in ((each - {one}, each - {other}) if {one, other} <= each else (each,))
        ]
        sets = [each for each in dict.fromkeys(split) if not any(each < bigger for bigger in split)]
    return sorted(sorted(each) for each in sets)


def letter(position: int) -> str:
    """The letter of a band: a, b, …, z, aa', …"""
    return chr(ord("a") + position % 26) + "'" * (position // 26)


def read_results(groups: Mapping[str, Sequence[Outcome]], metric: str = "recall@1") -> LossResults:
    """Read a metric of losses by class and seed."""
    return join([read_answers(loss, runs, metric) for loss, runs in groups.items()])


@dataclass(frozen=True)
class Answers:
    """A metric of each query of one loss."""

    loss: str  # its label
    rows: NDArray[Any]  # [queries], rows of the dataset
    classes: NDArray[Any]  # [queries], the class of each
    values: Mapping[int, Values]  # [queries] by seed


def read_answers(loss: str, runs: Sequence[Outcome], metric: str = "recall@1") -> Answers:
    """Read a metric of each query. Folds of one seed are averaged."""
    one_of("metric", metric, METRICS)
    values: dict[int, list[Values]] = {}
    rows = classes = None
    for run in sorted(runs, key=lambda run: run.seed):
        found = run.queries()
        if found is None:
            raise ValueError(f"{run.folder} did not keep the metrics of each query: queries.safetensors is missing")
        order = np.argsort(found["rows"], kind="stable")
        if rows is None:
            rows, classes = found["rows"][order], found["labels"][order]
        if not np.array_equal(rows, found["rows"][order]):
            raise ValueError(f"{run.folder} was tested on other images than the runs before it")
        values.setdefault(run.seed, []).append(found[metric][order].astype(np.float64))
    assert rows is not None
    assert classes is not None
    return Answers(loss, rows, classes, {seed: np.mean(each, axis=0) for seed, each in values.items()})


def join(answers: Sequence[Answers]) -> LossResults:
    """Results of losses by class and seed."""
    if not answers:
        raise ValueError("answers is empty; needed is at least one loss")
    first = answers[0]
    for other in answers:
        if not np.array_equal(first.rows, other.rows):
            raise ValueError(f"{other.loss} was tested on other images than {first.loss}")
        if other.values.keys() != first.values.keys():
            raise ValueError(f"{other.loss} has seeds {_seeds(other)}, and {first.loss} has {_seeds(first)}")
    columns = [each.values[seed] for each in answers for seed in first.values]
    table = by_class(np.stack(columns, axis=1), first.classes)
    table = table.reshape(len(table), len(answers), len(first.values)).transpose(0, 2, 1)
    return LossResults(tuple(each.loss for each in answers), table, tuple(first.values))


def kendall_tau(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Agreement of two orders, from −1 to 1 (Kendall's τ-b)."""
    from scipy import stats

    if len(first) < 3:
        return None
    tau = float(stats.kendalltau(first, second).statistic)
    return None if np.isnan(tau) else tau


def _seeds(answers: Answers) -> str:
    return ", ".join(map(str, answers.values))
