"""Second thoughts about neighbours: query expansion, and k-reciprocal neighbours."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from nearfar.search.table import Ids, Vectors

if TYPE_CHECKING:
    from nearfar.search.index import Index

RERANKINGS = ("k_reciprocal",)
POWER = 3.0  # of a neighbour's similarity, its weight in an expanded query


def expanded(index: Index, query: Vectors, count: int, allowed: Ids | None, own: int | None) -> Vectors:
    """The mean of a query [1, d] and its nearest neighbours, weighed by the cube of their cosine.

    Reference
        Radenović et al.: Fine-tuning CNN Image Retrieval with No Human Annotation. TPAMI 2019 (α-weighted expansion).
    """
    _, ids = index.nearest(query, count + (own is not None), allowed=allowed)
    near = [id for id in ids[0].tolist() if id >= 0 and id != own][:count]
    points = np.stack([query[0], *(index.vector(id) for id in near)]).astype(np.float64)
    units = points / np.linalg.norm(points, axis=1, keepdims=True).clip(min=1e-30)
    weights = (units @ units[0]).clip(min=0) ** POWER
    mean: Vectors = (weights @ points / max(weights.sum(), 1e-30)).astype(np.float32)[None]
    return mean


def k_reciprocal(index: Index, query: Vectors, k: int, *, allowed: Ids | None = None) -> tuple[Vectors, Ids]:
    """placeholder"""
    return index.nearest(query, k, allowed=allowed)
