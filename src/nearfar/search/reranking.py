"""Query expansion and re-ranking with k-reciprocal neighbors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from nearfar.search.backends import NO_ID
from nearfar.search.storage import Ids, Vectors

if TYPE_CHECKING:
    from nearfar.search.index import Index

RERANKINGS = ("k_reciprocal",)
POWER = 3.0  # a neighbor's weight in an expanded query is this power of its similarity
CANDIDATES, TIMES = 100, 4  # items that are re-ranked: at least 100, and at least 4 times k
NEAR, NEARER, OLD = 20, 6, 0.3  # k₁, k₂ and λ of the paper

Matrix = NDArray[np.float64]


def expanded(index: Index, query: Vectors, count: int, allowed: Ids | None, exclude: int | None) -> Vectors:
    """Return the mean of a query and its nearest neighbors, weighted by the cube of their cosine.

    Args:
        index: The index.
        query: The query [1, d].
        count: Number of neighbors.
        allowed: Only these ids, in ascending order; None for all.
        exclude: Id of an item to leave out.

    Returns:
        The expanded query [1, d].

    Reference:
        Radenović et al.: Fine-tuning CNN Image Retrieval with No Human Annotation. TPAMI 2019 (α-weighted expansion).
    """
    _, ids = index.nearest(query, count + (exclude is not None), allowed=allowed)
    _, near = index.storage.table.known(_others(ids[0], exclude)[:count])
    points = np.concatenate([query, near]).astype(np.float64)
    units = points / np.linalg.norm(points, axis=1, keepdims=True).clip(min=1e-30)
    weights = (units @ units[0]).clip(min=0) ** POWER
    mean: Vectors = (weights @ points / max(weights.sum(), 1e-30)).astype(np.float32)[None]
    return mean


def k_reciprocal(
    index: Index, query: Vectors, k: int, *, allowed: Ids | None = None, exclude: int | None = None
) -> tuple[Vectors, Ids]:
    """Return the k nearest items, with those first whose own neighbors are also neighbors of the query.

    Args:
        index: The index.
        query: The query [1, d].
        k: Number of neighbors.
        allowed: Only these ids, in ascending order; None for all.
        exclude: Id of an item to leave out.

    Returns:
        Scores and ids [1, k]. A score is one minus the paper's distance, λ·d + (1 − λ)·Jaccard.

    Differences:
        Reciprocal neighbors are determined among the nearest 100 (or 4·k) items, not in the whole index.

    Reference:
        Zhong et al.: Re-ranking Person Re-identification with k-reciprocal Encoding. CVPR 2017.
    """
    _, found = index.nearest(query, max(CANDIDATES, TIMES * k) + (exclude is not None), allowed=allowed)
    ids, near = index.storage.table.known(_others(found[0], exclude))
    scores, order = np.empty(0, dtype=np.float32), np.empty(0, dtype=np.int64)
    if len(ids):
        points = np.concatenate([query, near]).astype(np.float64)
        distances = mixed(squared_distances(points, index.measure))
        order = np.argsort(distances, kind="stable")[:k]
        scores = (1 - distances[order]).astype(np.float32)
    return scores[None], ids[order][None]


def _others(ids: Ids, exclude: int | None) -> list[int]:
    return [id for id in ids.tolist() if id not in (NO_ID, exclude)]


def squared_distances(points: Matrix, measure: str) -> Matrix:
    """Return the squared distances [n, n] of all pairs; for cosines, of vectors scaled to length one.

    Args:
        points: The points [n, d].
        measure: "cosine" or "euclidean".
    """
    if measure == "cosine":
        points = points / np.linalg.norm(points, axis=1, keepdims=True).clip(min=1e-30)
    squares = (points * points).sum(axis=1)
    found: Matrix = (squares[:, None] + squares - 2 * points @ points.T).clip(min=0)
    np.fill_diagonal(found, 0)
    return found


def mixed(distances: Matrix, *, near: int = NEAR, nearer: int = NEARER, old: float = OLD) -> Any:
    """Return the paper's distance of the first point to all others.

    Args:
        distances: Distances [n, n] of all points.
        near: k₁, the number of neighbors of each point.
        nearer: k₂, the number of neighbors that are averaged.
        old: λ, the weight of the original distance.

    Returns:
        Distances [n − 1].

    Example:
        >>> line = np.array([[0.0], [1.0], [2.0], [9.0]])
        >>> mixed(squared_distances(line, "euclidean"), near=2, nearer=1).argsort().tolist()
        [0, 1, 2]
    """
    count = len(distances)
    near, nearer = min(near, count - 1), min(nearer, count)
    distances = distances / distances.max(axis=1, keepdims=True).clip(min=1e-30)
    order = np.argsort(distances, axis=1, kind="stable")  # each point is its own nearest
    ranks = np.argsort(order, axis=1, kind="stable")
    wide = _mutual(ranks, near)
    half = _mutual(ranks, max(1, round(near / 2)))
    # A neighbor's own neighbors are included if two thirds of them are already in the set.
    shared = wide.astype(np.float64) @ half.T.astype(np.float64)  # [i, j]: number of j's neighbors that are also i's
    bring = wide & (3 * shared > 2 * half.sum(axis=1))
    sets = wide | (bring.astype(np.float64) @ half > 0)
    weights = np.where(sets, np.exp(-distances), 0.0)
    weights /= weights.sum(axis=1, keepdims=True)
    if nearer > 1:
        weights = weights[order[:, :nearer]].mean(axis=1)
    less = np.minimum(weights[0], weights[1:]).sum(axis=1)
    jaccard = 1 - less / (2 - less).clip(min=1e-30)  # rows sum to one
    return (1 - old) * jaccard + old * distances[0, 1:]


def _mutual(ranks: NDArray[np.int64], near: int) -> NDArray[np.bool_]:
    """Whether two points are among each other's nearest neighbors, [n, n]."""
    close: NDArray[np.bool_] = ranks <= near
    return close & close.T
