"""Second thoughts about neighbours: query expansion, and k-reciprocal neighbours."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from nearfar.search.backends import NOTHING
from nearfar.search.storage.table import Ids, Vectors

if TYPE_CHECKING:
    from nearfar.search.lookup import Lookup

RERANKINGS = ("k_reciprocal",)
POWER = 3.0  # of a neighbour's similarity, its weight in an expanded query
CANDIDATES, TIMES = 100, 4  # that are ranked anew: at least so many, and so many times k
NEAR, NEARER, OLD = 20, 6, 0.3  # k₁, k₂ and λ of the paper

Matrix = NDArray[np.float64]


def expanded(index: Lookup, query: Vectors, count: int, allowed: Ids | None, own: int | None) -> Vectors:
    """The mean of a query [1, d] and its nearest neighbours, weighed by the cube of their cosine.

    Reference:
        Radenović et al.: Fine-tuning CNN Image Retrieval with No Human Annotation. TPAMI 2019 (α-weighted expansion).
    """
    _, ids = index.nearest(query, count + (own is not None), allowed=allowed)
    _, near = index._shelf.table.known(_others(ids[0], own)[:count])
    points = np.concatenate([query, near]).astype(np.float64)
    units = points / np.linalg.norm(points, axis=1, keepdims=True).clip(min=1e-30)
    weights = (units @ units[0]).clip(min=0) ** POWER
    mean: Vectors = (weights @ points / max(weights.sum(), 1e-30)).astype(np.float32)[None]
    return mean


def k_reciprocal(
    index: Lookup, query: Vectors, k: int, *, allowed: Ids | None = None, own: int | None = None
) -> tuple[Vectors, Ids]:
    """The k nearest of a query [1, d], first those whose own neighbours are the query's neighbours too.

    Scores are one minus the paper's distance, λ·d + (1 − λ)·Jaccard.

    Difference
        Who is whose neighbour is looked at among the nearest hundred (or 4·k) items, not in the whole index.

    Reference:
        Zhong et al.: Re-ranking Person Re-identification with k-reciprocal Encoding. CVPR 2017.
    """
    spare = own is not None
    _, found = index.nearest(query, max(CANDIDATES, TIMES * k) + spare, allowed=allowed)
    ids, near = index._shelf.table.known(_others(found[0], own))
    scores, order = np.empty(0, dtype=np.float32), np.empty(0, dtype=np.int64)
    if len(ids):
        points = np.concatenate([query, near]).astype(np.float64)
        distances = mixed(squared_distances(points, index.measure))
        order = np.argsort(distances, kind="stable")[:k]
        scores = (1 - distances[order]).astype(np.float32)
    return scores[None], ids[order][None]


def _others(ids: Ids, own: int | None) -> list[int]:
    """What was found, but for the query itself."""
    return [id for id in ids.tolist() if id not in (NOTHING, own)]


def squared_distances(points: Matrix, measure: str) -> Matrix:
    """Of all points with each other, [n, n]; between directions where cosines are compared."""
    if measure == "cosine":
        points = points / np.linalg.norm(points, axis=1, keepdims=True).clip(min=1e-30)
    squares = (points * points).sum(axis=1)
    found: Matrix = (squares[:, None] + squares - 2 * points @ points.T).clip(min=0)
    np.fill_diagonal(found, 0)
    return found


def mixed(distances: Matrix, *, near: int = NEAR, nearer: int = NEARER, old: float = OLD) -> Any:
    """The paper's distance of the first point to all others, [n − 1], from the distances of all, [n, n].

    >>> line = np.array([[0.0], [1.0], [2.0], [9.0]])
    >>> mixed(squared_distances(line, "euclidean"), near=2, nearer=1).argsort().tolist()
    [0, 1, 2]
    """
    count = len(distances)
    near, nearer = min(near, count - 1), min(nearer, count)
    distances = distances / distances.max(axis=1, keepdims=True).clip(min=1e-30)
    order = np.argsort(distances, axis=1, kind="stable")  # each is its own nearest
    ranks = np.argsort(order, axis=1, kind="stable")
    wide = _mutual(ranks, near)
    half = _mutual(ranks, max(1, round(near / 2)))
    # A neighbour brings its own, where two thirds of them are known already.
    shared = wide.astype(np.float64) @ half.T.astype(np.float64)  # [i, j]: how many of j's are i's
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
    """Whether two are among each other's nearest so many, [n, n]; each with itself."""
    close: NDArray[np.bool_] = ranks <= near
    return close & close.T
