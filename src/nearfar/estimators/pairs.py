"""Supervision of the classical methods: pairs, triplets and quadruplets, given or drawn from labels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from nearfar.estimators.base import LinearTransformer

Array = NDArray[Any]


@dataclass(kw_only=True, eq=False, repr=False)
class ConstraintMethod(LinearTransformer):
    """Base class of the methods that learn from constraints, which are drawn from labels or given.

    Args:
        n_constraints: Pairs of each kind, or comparisons, drawn from labels; by default 20 times the square of the
            number of classes, from 1,000 to 100,000.
        random_state: Seed of whatever is drawn.
    """

    _requires_y = True

    n_constraints: int | None = None
    random_state: Any = None


def check_pairs(pairs: Any, n: int) -> tuple[Array, Array]:
    """Return given pairs as similar and dissimilar pairs of row numbers."""
    if all(hasattr(pairs, name) for name in ("left", "right", "same")):
        pairs = np.stack(
            [np.asarray(getattr(pairs, name)).astype(np.int64) for name in ("left", "right", "same")], axis=1
        )
    rows = _rows(pairs, 3, "pairs")
    same = rows[:, 2]
    if not np.isin(same, (-1, 0, 1)).all():
        raise ValueError(
            f"the third column of pairs holds {np.unique(same)[:5]}; 1 marks a similar pair, 0 or -1 another"
        )
    _check_range(rows[:, :2], n, "pairs")
    return rows[same == 1, :2], rows[same != 1, :2]


def check_tuples(tuples: ArrayLike, width: int, n: int, name: str) -> Array:
    """Return given triplets (anchor, nearer, farther) or quadruplets (a, b nearer than c, d) of row numbers."""
    rows = _rows(tuples, width, name)
    _check_range(rows, n, name)
    return rows


def draw_pairs(labels: Array, count: int | None, random: np.random.RandomState) -> tuple[Array, Array]:
    """Draw similar and dissimilar pairs from labels, without comparing all pairs."""
    sizes = np.bincount(labels)
    wanted = count if count is not None else min(max(20 * len(sizes) ** 2, 1000), 100_000)
    order = np.argsort(labels, kind="stable")
    starts = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    members = np.flatnonzero(sizes[labels] > 1)
    similar = np.empty((0, 2), dtype=np.int64)
    if len(members):
        left = members[random.randint(len(members), size=2 * wanted)]
        size, start = sizes[labels[left]], starts[labels[left]]
        place = np.empty_like(order)
        place[order] = np.arange(len(order))
        shift = 1 + (random.random_sample(len(left)) * (size - 1)).astype(np.int64)
        right = order[start + (place[left] - start + shift) % size]  # another member of the class
        similar = _distinct(left, right)[:wanted]
    left, right = random.randint(len(labels), size=(2, 4 * wanted))
    other = labels[left] != labels[right]
    return similar, _distinct(left[other], right[other])[:wanted]


def draw_triplets(labels: Array, count: int | None, random: np.random.RandomState) -> Array:
    """Draw triplets (anchor, another of its class, one of another class) from labels."""
    similar, dissimilar = draw_pairs(labels, count, random)
    if not len(similar) or not len(dissimilar):
        return np.empty((0, 3), dtype=np.int64)
    farther = random.randint(len(labels), size=(len(similar), 8))
    valid = labels[farther] != labels[similar[:, :1]]
    kept = valid.any(axis=1)
    chosen = farther[np.arange(len(farther)), valid.argmax(axis=1)]
    return np.asarray(np.column_stack([similar, chosen])[kept])


def chunks_of(pairs: Array, n: int) -> Array:
    """Return the chunk of each sample: samples linked by similar pairs share one; -1 for samples without a pair."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    graph = coo_array((np.ones(len(pairs)), (pairs[:, 0], pairs[:, 1])), shape=(n, n))
    chunks = connected_components(graph, directed=False)[1]
    alone = np.bincount(chunks)[chunks] == 1
    return np.where(alone, -1, chunks)


def _rows(values: ArrayLike, width: int, name: str) -> Array:
    rows = np.asarray(values)
    if rows.ndim != 2 or rows.shape[1] != width or not len(rows):
        raise ValueError(f"{name} has shape {rows.shape}; it must be (count, {width}) with at least one row")
    if rows.dtype.kind not in "iub":
        raise TypeError(f"{name} has dtype {rows.dtype}; row numbers must be integers")
    return rows.astype(np.int64)


def _check_range(rows: Array, n: int, name: str) -> None:
    if rows.min() < 0 or rows.max() >= n:
        raise ValueError(f"{name} names row {rows.min() if rows.min() < 0 else rows.max()}; rows are 0 to {n - 1}")


def _distinct(left: Array, right: Array) -> Array:
    """Return the pairs once each, in the order in which they were drawn."""
    pairs = np.column_stack([np.minimum(left, right), np.maximum(left, right)])
    _, first = np.unique(pairs[:, 0] * (pairs.max(initial=0) + 1) + pairs[:, 1], return_index=True)
    return pairs[np.sort(first)]
