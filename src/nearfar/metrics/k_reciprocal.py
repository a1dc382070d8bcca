"""Re-ranking with k-reciprocal neighbors: the distances of the paper, and ranks for metrics."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nearfar.metrics.inputs import QueryGallery
from nearfar.utils.progress import Progress

CANDIDATES = 100  # nearest items that are re-ranked
NEAR, NEARER, OLD = 20, 6, 0.3  # k₁, k₂ and λ of the paper
CPU_BYTES = 1 << 26  # of the similarities of some queries with all items

Matrix = NDArray[np.float64]


def reranked_positives(inputs: QueryGallery, ignored: Any, positives: Tensor, progress: Progress | None) -> Tensor:
    """Return the ranks of the positives of each query after its nearest items were re-ranked.

    The nearest 100 items are ordered by the distance of the paper, as in ``Index.search``; all others follow in their
    own order. Ignored items take part in the re-ranking and are removed from the ranking afterwards.

    Reference:
        Zhong et al.: Re-ranking Person Re-identification with k-reciprocal Encoding. CVPR 2017.
    """
    queries, gallery = inputs.queries, inputs.gallery or inputs.queries
    count, every = len(positives), torch.arange(len(inputs.gallery_classes), device=positives.device)
    ranks = torch.full((count, max(1, int(positives.max()))), torch.inf, dtype=torch.float64)
    items, measure = gallery.float64(every), "cosine" if queries.unit else "euclidean"
    classes = inputs.gallery_classes.cpu().numpy()
    for index in torch.split(torch.arange(count, device=every.device), max(1, CPU_BYTES // (8 * len(every)))):
        rows = queries.float64(index)
        similarity = queries.pairwise(rows, items)
        if inputs.gallery is None:
            similarity[torch.arange(len(index)), index] = -torch.inf  # a query is not its own candidate
        order = torch.sort(similarity, dim=1, descending=True, stable=True).indices.cpu().numpy()
        unseen = ignored(index, every).cpu().numpy()
        for place, query in enumerate(index.tolist()):
            candidates = order[place, : min(CANDIDATES, len(every) - (inputs.gallery is None))]
            points = torch.cat([rows[place : place + 1], items[torch.from_numpy(candidates)]]).cpu().numpy()
            candidates[:] = candidates[np.argsort(mixed(squared_distances(points, measure)), kind="stable")]
            kept = order[place][~unseen[place][order[place]]]
            hits = np.flatnonzero(classes[kept] == int(inputs.query_classes[query]))
            ranks[query, : len(hits)] = torch.from_numpy(hits).double()
            if progress is not None:
                progress(query + 1, count)
    return ranks.to(positives.device)


def squared_distances(points: Matrix, measure: str) -> Matrix:
    """Return the squared distances [n, n] of all pairs; for cosines, of vectors scaled to length one."""
    if measure == "cosine":
        points = points / np.linalg.norm(points, axis=1, keepdims=True).clip(min=1e-30)
    squares = (points * points).sum(axis=1)
    distances: Matrix = (squares[:, None] + squares - 2 * points @ points.T).clip(min=0)
    np.fill_diagonal(distances, 0)
    return distances


def mixed(distances: Matrix, *, neighbors: int = NEAR, averaged: int = NEARER, old: float = OLD) -> Any:
    """Return the paper's distance of the first point to all others."""
    count = len(distances)
    neighbors, averaged = min(neighbors, count - 1), min(averaged, count)
    distances = distances / distances.max(axis=1, keepdims=True).clip(min=1e-30)
    order = np.argsort(distances, axis=1, kind="stable")  # each point is its own nearest
    ranks = np.argsort(order, axis=1, kind="stable")
    wide = _mutual(ranks, neighbors)
    half = _mutual(ranks, max(1, round(neighbors / 2)))
    # A neighbor's own neighbors are included if two thirds of them are already in the set.
    shared = wide.astype(np.float64) @ half.T.astype(np.float64)  # [i, j]: number of j's neighbors that are also i's
    bring = wide & (3 * shared > 2 * half.sum(axis=1))
    sets = wide | (bring.astype(np.float64) @ half > 0)
    weights = np.where(sets, np.exp(-distances), 0.0)
    weights /= weights.sum(axis=1, keepdims=True)
    if averaged > 1:
        weights = weights[order[:, :averaged]].mean(axis=1)
    less = np.minimum(weights[0], weights[1:]).sum(axis=1)
    jaccard = 1 - less / (2 - less).clip(min=1e-30)  # rows sum to one
    return (1 - old) * jaccard + old * distances[0, 1:]


def _mutual(ranks: NDArray[np.int64], neighbors: int) -> NDArray[np.bool_]:
    """Whether two points are among each other's nearest neighbors, [n, n]."""
    close: NDArray[np.bool_] = ranks <= neighbors
    return close & close.T
