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
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import special

from nearfar.metrics.intervals import CrossedMeans, MeanSquares, Values, by_class, crossed_means, mean_squares
from nearfar.training.run.reader import Run
from nearfar.utils.validation import one_of

ALPHA = 0.05  # chance of telling any two equal losses apart
POWER = 0.8  # chance of finding the smallest detectable difference
MIN_CLASSES = 5  # with fewer classes or seeds there is no p-value: error rates were not shown to hold
MIN_SEEDS = 3
METRICS = ("recall@1", "map@r")  # kept for each query
ONE_LOSS = "there is one loss, and nothing to compare it with"


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
    """Losses that can or cannot be told apart.

    Args:
        ranks: 1 + the number of losses that are significantly better, by loss.
        bands: Largest sets of losses of which no two can be told apart, best first.
        differences: All pairs; those with the best loss first.
        detectable: The smallest difference that is found with a chance of 80 %; median over pairs.
    """

    ranks: Mapping[str, int]
    bands: Sequence[Sequence[str]]
    differences: Sequence[Difference]
    detectable: float

    def letters(self, loss: str) -> str:
        """The bands of a loss as letters; losses that share a letter cannot be told apart.

        Args:
            loss: Its label.
        """
        return "".join(letter(at) for at, band in enumerate(self.bands) if loss in band)


def compare_losses(losses: Sequence[str], table: Values) -> Groups:
    """Compare all pairs of losses by a metric, [classes, seeds, losses], as ``stack`` returns it."""
    classes, seeds = table.shape[:2]
    if len(losses) < 2:
        raise ValueError(ONE_LOSS)
    if seeds < MIN_SEEDS:
        raise ValueError(f"too few seeds: {seeds}, and at least {MIN_SEEDS} are needed to compare losses")
    if classes < MIN_CLASSES:
        raise ValueError(f"too few classes: {classes}, and at least {MIN_CLASSES} are needed to compare losses")
    order = np.argsort(-table.mean(axis=(0, 1)), kind="stable")
    losses = [losses[at] for at in order]
    means = pair_means(table[:, :, order])
    p, (low, high) = holm(means.p_values()), means.intervals()
    strictest = ALPHA / len(p)
    needed = special.stdtrit(means.freedom, 1 - strictest / 2) + special.stdtrit(means.freedom, POWER)
    detectable = needed * means.error
    apart = np.zeros((len(losses), len(losses)), dtype=bool)
    differences = []
    for at, (better, worse) in enumerate(combinations(range(len(losses)), 2)):
        numbers = (float(values[at]) for values in (means.mean, low, high, p, detectable))
        differences.append(Difference(losses[better], losses[worse], *numbers))
        apart[better, worse] = p[at] < ALPHA
    for middle in range(len(losses)):  # a > b and b > c imply a > c
        apart |= apart[:, [middle]] & apart[[middle]]
    ranks = {loss: 1 + int(better) for loss, better in zip(losses, apart.sum(axis=0), strict=True)}
    bands = [[losses[at] for at in band] for band in cliques(~(apart | apart.T))]
    return Groups(ranks, bands, differences, float(np.median(detectable)))


def pair_means(table: Values) -> CrossedMeans:
    """Mean differences of all pairs of losses with their errors."""
    squares = [mean_squares(table[:, :, [first]] - table[:, :, first + 1 :]) for first in range(table.shape[2] - 1)]
    parts = ("mean", "of_class", "of_seed", "of_rest")
    joined = {name: np.concatenate([getattr(square, name) for square in squares]) for name in parts}
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
    for first, second in combinations(range(len(together)), 2):
        if together[first, second]:
            continue
        split = [
            part
            for members in sets
            for part in ((members - {first}, members - {second}) if {first, second} <= members else (members,))
        ]
        sets = [members for members in dict.fromkeys(split) if not any(members < bigger for bigger in split)]
    return sorted(sorted(members) for members in sets)


def letter(position: int) -> str:
    """The letter of a band: a, b, …, z, aa', …"""
    return chr(ord("a") + position % 26) + "'" * (position // 26)


class ByClass(NamedTuple):
    """A metric of one loss."""

    table: Values  # [classes, seeds]; the plain mean is the mean over all queries. Folds of a seed are averaged
    seeds: tuple[int, ...]
    rows: NDArray[Any]  # of the dataset, that were tested

    def interval(self) -> tuple[float, float]:
        """The 95 % interval over classes, and over seeds if there are several."""
        low, high = crossed_means(mean_squares(self.table[:, :, None])).share_intervals()
        return float(low[0]), float(high[0])


def by_class_and_seed(runs: Sequence[Run], metric: str = "recall@1") -> ByClass:
    """Read a metric of each query of the runs of one loss."""
    one_of("metric", metric, METRICS)
    values: dict[int, list[Values]] = {}
    rows = classes = None
    for run in sorted(runs, key=lambda run: run.seed):
        queries = run.queries()
        if queries is None:
            raise ValueError(f"{run.folder} did not keep the metrics of each query: queries.safetensors is missing")
        order = np.argsort(queries["rows"], kind="stable")
        if rows is None or classes is None:
            rows, classes = queries["rows"][order], queries["labels"][order]
        if not np.array_equal(rows, queries["rows"][order]):
            raise ValueError(f"{run.folder} was tested on other images than the runs before it")
        values.setdefault(run.seed, []).append(queries[metric][order].astype(np.float64))
    assert rows is not None
    assert classes is not None
    columns = [np.mean(folds, axis=0) for folds in values.values()]
    return ByClass(by_class(np.stack(columns, axis=1), classes), tuple(values), rows)


def stack(losses: Mapping[str, ByClass]) -> Values:
    """A metric of losses that were tested on the same images with the same seeds, [classes, seeds, losses]."""
    name, first = next(iter(losses.items()))
    for other, metric in losses.items():
        if not np.array_equal(first.rows, metric.rows):
            raise ValueError(f"{other} was tested on other images than {name}")
        if metric.seeds != first.seeds:
            theirs, ours = (", ".join(map(str, values.seeds)) for values in (metric, first))
            raise ValueError(f"{other} has seeds {theirs}, and {name} has {ours}")
    return np.stack([metric.table for metric in losses.values()], axis=1).transpose(0, 2, 1)


def kendall_tau(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Agreement of two orders, from −1 to 1 (Kendall's τ-b)."""
    from scipy import stats

    if len(first) < 3:
        return None
    tau = float(stats.kendalltau(first, second).statistic)
    return None if np.isnan(tau) else tau
