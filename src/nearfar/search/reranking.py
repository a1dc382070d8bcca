"""Query expansion and re-ranking with k-reciprocal neighbors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from nearfar.metrics.k_reciprocal import CANDIDATES, mixed, squared_distances
from nearfar.search.backends.base import NO_ID
from nearfar.search.storage import Ids, Vectors

if TYPE_CHECKING:
    from nearfar.search.index import Index

POWER = 3.0  # a neighbor's weight in an expanded query is this power of its similarity
TIMES = 4  # at least so many times k items are re-ranked


def expanded(index: Index, query: Vectors, count: int, allowed: Ids | None, exclude: int | None) -> Vectors:
    """Return the mean of a query and its nearest neighbors, weighted by the cube of their cosine.

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

    Differences:
        Reciprocal neighbors are determined among the nearest 100 (or 4·k) items, not in the whole index.

    Reference:
        Zhong et al.: Re-ranking Person Re-identification with k-reciprocal Encoding. CVPR 2017.
    """
    _, candidates = index.nearest(query, max(CANDIDATES, TIMES * k) + (exclude is not None), allowed=allowed)
    ids, near = index.storage.table.known(_others(candidates[0], exclude))
    scores, order = np.empty(0, dtype=np.float32), np.empty(0, dtype=np.int64)
    if len(ids):
        points = np.concatenate([query, near]).astype(np.float64)
        distances = mixed(squared_distances(points, index.measure))
        order = np.argsort(distances, kind="stable")[:k]
        scores = (1 - distances[order]).astype(np.float32)
    return scores[None], ids[order][None]


def _others(ids: Ids, exclude: int | None) -> list[int]:
    return [id for id in ids.tolist() if id not in (NO_ID, exclude)]
