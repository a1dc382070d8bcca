"""Confidence intervals of metrics: what other classes and other trainings would give.

Queries of one class are alike, so the classes of a test are its sample, not the queries. Trainings with different seeds
are a second sample, crossed with the classes. ``crossed_means`` estimates the error of a mean over both, and intervals
are those of Student's t. docs/benchmarks/significance.md has its error rates.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from nearfar.utils.tensors import ArrayInput, as_array
from nearfar.utils.validation import number

PRIOR = 2.0  # degrees of freedom of the usual spread of seeds; benchmarks/significance.py shows what it does

Values = NDArray[np.float64]


class Interval(NamedTuple):
    """A mean and its confidence interval over classes.

    Attributes:
        mean: Mean over the queries.
        low: Lower end of the interval; NaN with a single class.
        high: Upper end of the interval; NaN with a single class.
        classes: Number of classes.
    """

    mean: float
    low: float
    high: float
    classes: int


@dataclass(frozen=True)
class CrossedMeans:
    """Means over classes and seeds, and how well they are known."""

    mean: Values
    error: Values
    freedom: Values

    def intervals(self, confidence: float = 0.95) -> tuple[Values, Values]:
        """Lower and upper ends of the intervals."""
        from scipy import special

        half = special.stdtrit(self.freedom, (1 + confidence) / 2) * self.error
        return self.mean - half, self.mean + half

    def share_intervals(self, confidence: float = 0.95) -> tuple[Values, Values]:
        """Lower and upper ends of intervals of shares, whose values are from 0 to 1.

        They are intervals of the logit, so that they end within 0 and 1 and are longer towards 0.5: with a few classes
        they contain the true mean more often than symmetric ones.
        """
        from scipy import special

        half = special.stdtrit(self.freedom, (1 + confidence) / 2) * self.error
        slope = self.mean * (1 - self.mean)
        half = np.divide(half, slope, out=np.zeros_like(half), where=slope > 0)
        middle = special.logit(np.clip(self.mean, 0.0, 1.0))
        return special.expit(middle - half), special.expit(middle + half)

    def p_values(self) -> Values:
        """Two-sided p-values of means that differ from 0; 1 for a mean of exactly 0."""
        from scipy import special

        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = np.abs(self.mean) / self.error
        p: Values = 2 * special.stdtr(self.freedom, -np.where(self.mean == 0.0, 0.0, ratio))
        return p


@dataclass(frozen=True)
class MeanSquares:
    """Mean squares of a table of classes and seeds, as parts of the variance of its mean."""

    mean: Values
    of_class: Values
    of_seed: Values  # 0 with one seed
    of_rest: Values  # which the other two contain; 0 with one seed
    classes: int
    seeds: int


def mean_squares(table: Values) -> MeanSquares:
    """Compute the mean squares of two crossed random effects: x = mean + class + seed + rest."""
    classes, seeds, columns = table.shape
    mean = table.mean(axis=(0, 1))
    by_class = table.mean(axis=1) - mean
    of_class = np.square(by_class).sum(axis=0) / (classes * (classes - 1))
    if seeds == 1:
        return MeanSquares(mean, of_class, np.zeros(columns), np.zeros(columns), classes, seeds)
    by_seed = table.mean(axis=0) - mean
    of_seed = np.square(by_seed).sum(axis=0) / (seeds * (seeds - 1))
    rest = table - by_class[:, None] - by_seed - mean
    of_rest = np.square(rest).sum(axis=(0, 1)) / ((classes - 1) * (seeds - 1) * classes * seeds)
    return MeanSquares(mean, of_class, of_seed, of_rest, classes, seeds)


def crossed_means(squares: MeanSquares, *, related: bool = False) -> CrossedMeans:
    """Estimate means over classes and seeds, both of which are samples.

    The variance of a mean is estimated without bias by of_class + of_seed − of_rest, and is at least the larger of the
    first two. Its degrees of freedom are those of Satterthwaite. With one seed it is that of the classes alone.

    In ``related`` columns, such as differences of losses, a few seeds agree or disagree by chance, so the part of the
    seeds is moved towards the usual one (moderated variance, Smyth 2004): PRIOR more degrees of freedom.
    """
    from scipy import special

    of_class, of_seed, of_rest = squares.of_class, squares.of_seed, squares.of_rest
    class_freedom, seed_freedom = squares.classes - 1.0, max(squares.seeds - 1.0, 1.0)
    if related and squares.seeds > 1 and len(of_seed) > 1:
        usual = np.median(of_seed) * seed_freedom / special.chdtri(seed_freedom, 0.5)  # the median is below the mean
        of_seed = (seed_freedom * of_seed + PRIOR * usual) / (seed_freedom + PRIOR)
        seed_freedom = seed_freedom + PRIOR
    variance = np.maximum(of_class + of_seed - of_rest, np.maximum(of_class, of_seed))
    spread = of_class**2 / class_freedom + of_seed**2 / seed_freedom + of_rest**2 / (class_freedom * seed_freedom)
    freedom = np.divide(variance**2, spread, out=np.full(len(spread), class_freedom), where=spread > 0)
    return CrossedMeans(squares.mean, np.sqrt(variance), freedom)


def by_class(values: Values, classes: NDArray[Any]) -> Values:
    """Values of queries as one value for each class, whose plain mean is the mean over queries.

    Classes differ in size, so the mean over queries is a ratio of sums over classes. The value of a class is the
    linear term of that ratio: μ + (size / mean size) · (mean of the class − μ).
    """
    _, codes = np.unique(classes, return_inverse=True)
    sizes = np.bincount(codes).astype(np.float64)[:, None]
    sums = np.stack([np.bincount(codes, weights=column) for column in values.T], axis=1)
    mean = values.mean(axis=0)
    per_class: Values = mean + (sums - sizes * mean) / sizes.mean()
    return per_class


def class_intervals(
    values: Mapping[str, ArrayInput], classes: ArrayInput, *, confidence: float = 0.95
) -> dict[str, Interval]:
    """Compute intervals of metrics of one embedding: what other classes would give.

    They do not cover the variation between trainings, which takes several seeds (``nearfar.bench.compare``).

    Args:
        values: [queries] for each metric: one value from 0 to 1 for each query. NaN marks a query without a value; it
            is ignored.
        classes: [queries], the class of each query.
        confidence: Share of intervals that contain the true mean.

    Returns:
        An interval for each metric.

    Raises:
        ValueError: If an array has the wrong shape, contains infinity or only NaN.

    Example:
        >>> import torch
        >>> values = {"recall@1": torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 1.0, 1.0, 1.0])}
        >>> interval = class_intervals(values, torch.tensor([0, 0, 1, 1, 2, 2, 3, 3]))["recall@1"]
        >>> interval.mean, round(interval.low, 3), round(interval.high, 3), interval.classes
        (0.75, 0.206, 0.972, 4)
    """
    number("confidence", confidence, low=0.0, high=1.0, open_low=True)
    if not values:
        raise ValueError("values is empty; at least one array is required")
    labels = _array("classes", classes)
    intervals = {}
    for name, metric in values.items():
        column = _array(name, metric).astype(np.float64)
        if column.ndim != 1 or column.shape != labels.shape:
            raise ValueError(f"{name} has shape {column.shape}, and classes {labels.shape}; both need [queries]")
        if np.isinf(column).any():
            raise ValueError(f"{name} contains infinity in {int(np.isinf(column).sum())} of {len(column)} entries")
        kept = ~np.isnan(column)
        if not kept.any():
            raise ValueError(f"{name} has no query with a value: each of its {len(column)} entries is NaN")
        table = by_class(column[kept, None], labels[kept])
        mean, low, high = float(column[kept].mean()), math.nan, math.nan
        if len(table) > 1:
            ends = crossed_means(mean_squares(table[:, None])).share_intervals(confidence)
            low, high = (float(end[0]) for end in ends)
        intervals[name] = Interval(mean, low, high, len(table))
    return intervals


def _array(name: str, values: ArrayInput) -> NDArray[Any]:
    values = as_array(name, values)
    if not isinstance(values, (Tensor, np.ndarray)):
        raise TypeError(f"{name} is a {type(values).__name__}; a torch.Tensor or NumPy array is required")
    array: NDArray[Any] = values.detach().cpu().numpy() if isinstance(values, Tensor) else values
    return array
