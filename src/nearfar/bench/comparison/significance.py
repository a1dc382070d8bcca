"""Bootstrap intervals and p-values for differences between losses.

Two losses are tested on the same queries, so their difference is resampled. Drawing queries estimates what other images
of the same classes would give. Drawing classes with all their queries estimates what other classes would give, which is
the question of a benchmark on unseen classes, and gives wider intervals. Neither accounts for the variation between
trainings, which several seeds measure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearfar.bench.comparison.outcomes import Outcome
from nearfar.utils.validation import number, one_of, whole

FEW = 10  # classes; with fewer, resampling them is not reliable
OVER = ("queries", "classes")
METRICS = ("recall@1", "map@r")  # kept for each query
SAMPLES = 10_000  # enough for small p-values among many pairs
CHUNK = 1 << 21  # drawn indices held in memory at a time

Values = NDArray[np.float64]


@dataclass(frozen=True)
class Difference:
    """The difference between two losses.

    Args:
        better: The loss with the larger mean.
        worse: The other loss.
        mean: Mean difference over all queries.
        low: Lower end of its interval.
        high: Upper end of its interval.
        p: Two-sided p-value. ``pairwise`` corrects it for the number of pairs (Holm).
    """

    better: str
    worse: str
    mean: float
    low: float
    high: float
    p: float


def paired(
    first: Values,
    second: Values,
    *,
    classes: NDArray[Any] | None = None,
    samples: int = SAMPLES,
    confidence: float = 0.95,
    seed: int = 0,
) -> tuple[float, float, float, float]:
    """Paired bootstrap of the mean of ``first − second``.

    Args:
        first: [queries], a value for each query.
        second: [queries], in the same order.
        classes: [queries], to draw classes; None draws queries.
        samples: Number of draws.
        confidence: Share of the draws inside the interval.
        seed: Seed of the draws.

    Returns:
        Mean, lower and upper end of its interval, and the two-sided p-value.

    >>> rng = np.random.default_rng(0)
    >>> easy, hard = rng.random(500) < 0.7, rng.random(500) < 0.5
    >>> mean, low, high, p = paired(easy.astype(float), hard.astype(float))
    >>> low < mean < high, p < 0.01
    (True, True)
    """
    drawn = means(np.stack([first, second], axis=1), classes=classes, samples=samples, seed=seed)
    return _summary(first.mean() - second.mean(), drawn[:, 0] - drawn[:, 1], confidence)


def means(table: Values, *, classes: NDArray[Any] | None = None, samples: int = SAMPLES, seed: int = 0) -> Values:
    """Bootstrap means of several columns; each draw is used for all columns.

    Args:
        table: [queries, columns].
        classes: [queries], to draw classes with all their queries; None draws queries.
        samples: Number of draws.
        seed: Seed of the draws.

    Returns:
        [samples, columns].
    """
    whole("samples", samples)
    table = np.asarray(table, dtype=np.float64)
    if not len(table) or not np.isfinite(table).all():
        raise ValueError(f"table has {len(table)} queries; at least one is needed, and all numbers finite")
    if classes is None:
        sums, sizes = table, np.ones(len(table))
    else:
        if len(classes) != len(table):
            raise ValueError(f"classes has {len(classes)} entries; needed is one for each of {len(table)} queries")
        _, codes = np.unique(classes, return_inverse=True)
        sizes = np.bincount(codes).astype(np.float64)
        sums = np.stack([np.bincount(codes, weights=column) for column in table.T], axis=1)
    rng, units = np.random.default_rng(seed), len(sizes)
    parts, step = [], max(1, CHUNK // units)
    for start in range(0, samples, step):
        height = min(step, samples - start)
        drawn = rng.integers(units, size=(height, units)) + np.arange(height)[:, None] * units
        times = np.bincount(drawn.ravel(), minlength=height * units).reshape(height, units).astype(np.float64)
        parts.append((times @ sums) / (times @ sizes)[:, None])
    return np.concatenate(parts)


def pairwise(
    groups: Mapping[str, Sequence[Outcome]],
    *,
    metric: str = "recall@1",
    over: str = "classes",
    best_only: bool = False,
    samples: int = SAMPLES,
    confidence: float = 0.95,
    seed: int = 0,
) -> list[Difference]:
    """Differences between all pairs of losses. The values of each query are averaged over seeds and folds first.

    Args:
        groups: ``{loss: runs}``; all were tested on the same images.
        metric: "recall@1" or "map@r".
        over: What is drawn: "queries" or "classes".
        best_only: Compare only with the best loss.
        samples: Number of draws.
        confidence: Share of the draws inside the intervals.
        seed: Seed of the draws.

    Returns:
        The differences, those with the best loss first.
    """
    number("confidence", confidence, low=0.0, high=1.0, open_low=True)
    names = list(groups)
    table, classes = _units(groups, metric, over)
    drawn = means(table, classes=classes, samples=samples, seed=seed)
    found = []
    order = np.argsort(-table.mean(axis=0), kind="stable").tolist()
    for better, worse in combinations(order, 2):
        if best_only and better != order[0]:
            break
        mean = float(table[:, better].mean() - table[:, worse].mean())
        summary = _summary(mean, drawn[:, better] - drawn[:, worse], confidence)
        found.append(Difference(names[better], names[worse], *summary))
    return _holm(found)


def intervals(
    groups: Mapping[str, Sequence[Outcome]],
    *,
    metric: str = "recall@1",
    over: str = "classes",
    samples: int = SAMPLES,
    confidence: float = 0.95,
    seed: int = 0,
) -> dict[str, tuple[float, float]]:
    """Bootstrap interval of the mean of each loss.

    Args:
        groups: ``{loss: runs}``; all were tested on the same images.
        metric: "recall@1" or "map@r".
        over: What is drawn: "queries" or "classes".
        samples: Number of draws.
        confidence: Share of the draws inside the intervals.
        seed: Seed of the draws.

    Returns:
        ``{loss: (low, high)}``.
    """
    table, classes = _units(groups, metric, over)
    drawn = means(table, classes=classes, samples=samples, seed=seed)
    tail = (1 - confidence) / 2
    low, high = np.quantile(drawn, [tail, 1 - tail], axis=0)
    return {name: (float(low[at]), float(high[at])) for at, name in enumerate(groups)}


def answers(groups: Mapping[str, Sequence[Outcome]], metric: str) -> tuple[Values, NDArray[Any] | None]:
    """The metric of each query with each loss, averaged over seeds and folds.

    Args:
        groups: ``{loss: runs}``; all were tested on the same images.
        metric: "recall@1" or "map@r".

    Returns:
        [queries, losses], and the class of each query, or None if no run kept it.

    Raises:
        ValueError: If a run did not keep its queries, or was tested on other images.
    """
    one_of("metric", metric, METRICS)
    columns: list[Values] = []
    rows: NDArray[Any] | None = None
    classes: NDArray[Any] | None = None
    for runs in groups.values():
        values = []
        for run in runs:
            found = run.queries()
            if found is None:
                raise ValueError(f"{run.folder} did not keep the metrics of each query: queries.safetensors is missing")
            order = np.argsort(found["rows"], kind="stable")
            own = found["rows"][order]
            if rows is None:
                rows = own
            if not np.array_equal(rows, own):
                raise ValueError(f"{run.folder} was tested on other images than the runs before it")
            values.append(found[metric][order].astype(np.float64))
            if classes is None and "labels" in found:
                classes = found["labels"][order]
        columns.append(np.mean(values, axis=0))
    if not columns:
        raise ValueError("groups is empty; needed is at least one loss")
    return np.stack(columns, axis=1), classes


def count_classes(groups: Mapping[str, Sequence[Outcome]]) -> int:
    """The number of classes of the queries; 0 if no run kept them.

    Args:
        groups: ``{loss: runs}``; all were tested on the same images.
    """
    for run in (run for runs in groups.values() for run in runs):
        found = run.queries() or {}
        if "labels" in found:
            return len(np.unique(found["labels"]))
    return 0


def _units(groups: Mapping[str, Sequence[Outcome]], metric: str, over: str) -> tuple[Values, NDArray[Any] | None]:
    one_of("over", over, OVER)
    table, classes = answers(groups, metric)
    if over == "classes" and classes is None:
        raise ValueError("over is 'classes'; these runs did not keep the labels of their queries")
    return table, classes if over == "classes" else None


def _summary(mean: float, drawn: Values, confidence: float) -> tuple[float, float, float, float]:
    tail = (1 - confidence) / 2
    low, high = np.quantile(drawn, [tail, 1 - tail])
    # The observed sample counts as one draw, so that no p-value is 0.
    aside = int(min(np.count_nonzero(drawn <= 0), np.count_nonzero(drawn >= 0)))
    return float(mean), float(low), float(high), min(1.0, 2 * (aside + 1) / (len(drawn) + 1))


def _holm(found: Sequence[Difference]) -> list[Difference]:
    """Correct p-values for their number by the method of Holm."""
    corrected: dict[int, float] = {}
    largest = 0.0
    for done, at in enumerate(sorted(range(len(found)), key=lambda at: found[at].p)):
        largest = max(largest, min(1.0, found[at].p * (len(found) - done)))
        corrected[at] = largest
    return [
        Difference(one.better, one.worse, one.mean, one.low, one.high, corrected[at]) for at, one in enumerate(found)
    ]
