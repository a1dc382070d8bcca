"""Whether one loss is better than another, or only luckier with these queries.

Two losses answer the same queries, so what is drawn again and again is the difference of their answers. Drawing
queries asks what other pictures of the same classes would say; drawing classes with all their queries asks what other
classes would, which is the question of a benchmark on unseen classes, and the wider interval. Neither knows what
another training would have given: for that there are seeds.
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

FEW = 10  # classes, below which draws of them say little
OVER = ("queries", "classes")
METRICS = ("recall@1", "map@r")  # those that runs keep for each query
SAMPLES = 10_000  # enough for small p among many pairs
CHUNK = 1 << 21  # draws held at a time

Values = NDArray[np.float64]


@dataclass(frozen=True)
class Difference:
    """How much better one is than another.

    Args:
        better, worse: Which; ``better`` has the larger mean.
        mean: Of the difference, over all queries.
        low, high: Where it lies in most samples.
        p: Two-sided: how rare a difference at least this far from 0 would be without one. After
            ``pairwise``, corrected for how many pairs were looked at (Holm).
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
    """Mean of first − second, its interval, and the two-sided p: (mean, low, high, p).

    Args:
        first, second: [queries], a number for each query, in the same order.
        classes: [queries], to draw classes; None draws queries.
        samples: How many draws.
        confidence: Share of the samples inside the interval.
        seed: Of the draws.

    >>> rng = np.random.default_rng(0)
    >>> easy, hard = rng.random(500) < 0.7, rng.random(500) < 0.5
    >>> mean, low, high, p = paired(easy.astype(float), hard.astype(float))
    >>> low < mean < high, p < 0.01
    (True, True)
    """
    drawn = means(np.stack([first, second], axis=1), classes=classes, samples=samples, seed=seed)
    return _summary(first.mean() - second.mean(), drawn[:, 0] - drawn[:, 1], confidence)


def means(table: Values, *, classes: NDArray[Any] | None = None, samples: int = SAMPLES, seed: int = 0) -> Values:
    """The mean of each column in each sample, [samples, columns]; a draw serves all columns.

    Args:
        table: [queries, columns].
        classes: [queries], to draw classes with all their queries; None draws queries.
        samples: How many draws.
        seed: Of the draws.
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
    """All pairs of losses, the best first; what a query found is averaged over seeds and folds before.

    Args:
        groups: {loss: its runs}; all were tested on the same pictures.
        metric: "recall@1" or "map@r".
        over: What is drawn: "queries" or "classes".
        best_only: Only pairs with the best loss.
        samples, confidence, seed: See ``paired``.
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
    """Where the mean of each loss lies in most samples of queries or classes."""
    table, classes = _units(groups, metric, over)
    drawn = means(table, classes=classes, samples=samples, seed=seed)
    tail = (1 - confidence) / 2
    low, high = np.quantile(drawn, [tail, 1 - tail], axis=0)
    return {name: (float(low[at]), float(high[at])) for at, name in enumerate(groups)}


def answers(groups: Mapping[str, Sequence[Outcome]], metric: str) -> tuple[Values, NDArray[Any] | None]:
    """What each query found with each loss, [queries, losses], and the class of each query where it is known."""
    one_of("metric", metric, METRICS)
    columns: list[Values] = []
    rows: NDArray[Any] | None = None
    classes: NDArray[Any] | None = None
    for runs in groups.values():
        values = []
        for run in runs:
            found = run.queries()
            if found is None:
                raise ValueError(f"{run.folder} did not keep what each query found: queries.safetensors is not there")
            order = np.argsort(found["rows"], kind="stable")
            own = found["rows"][order]
            if rows is None:
                rows = own
            if not np.array_equal(rows, own):
                raise ValueError(f"{run.folder} was tested on other pictures than the runs before it")
            values.append(found[metric][order].astype(np.float64))
            if classes is None and "labels" in found:
                classes = found["labels"][order]
        columns.append(np.mean(values, axis=0))
    if not columns:
        raise ValueError("groups is empty; needed is at least one loss")
    return np.stack(columns, axis=1), classes


def count_classes(groups: Mapping[str, Sequence[Outcome]]) -> int:
    """Classes of the queries, which all runs share; 0 where no run kept them."""
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
    # The sample at hand counts as one draw: no p is 0 after finitely many.
    aside = int(min(np.count_nonzero(drawn <= 0), np.count_nonzero(drawn >= 0)))
    return float(mean), float(low), float(high), min(1.0, 2 * (aside + 1) / (len(drawn) + 1))


def _holm(found: Sequence[Difference]) -> list[Difference]:
    """The same with p corrected for their number: the smallest times all, the next times one less, never falling."""
    corrected: dict[int, float] = {}
    largest = 0.0
    for done, at in enumerate(sorted(range(len(found)), key=lambda at: found[at].p)):
        largest = max(largest, min(1.0, found[at].p * (len(found) - done)))
        corrected[at] = largest
    return [
        Difference(one.better, one.worse, one.mean, one.low, one.high, corrected[at]) for at, one in enumerate(found)
    ]
