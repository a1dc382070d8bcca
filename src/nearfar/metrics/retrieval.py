"""Retrieval: does an image find its own class among its nearest neighbours?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nearfar.inputs import Array, as_label_pair, as_labels, as_vectors, check_finite
from nearfar.metrics.ranking import Ranking, prepare
from nearfar.precision import full_precision
from nearfar.progress import Progress

MEASURES = ("cosine", "euclidean")
CPU_BUDGET, GPU_BUDGET = 256 * 1024 * 1024, 2 * 1024 * 1024 * 1024


@torch.no_grad()
def retrieval(
    embeddings: Array,
    labels: Array,
    gallery: Array | None = None,
    gallery_labels: Array | None = None,
    *,
    ks: Sequence[int] = (1, 2, 4, 8),
    measure: str = "cosine",
    per_query: bool = False,
    memory_budget: int | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """How well queries find their class, exactly and in bounded memory.

    Every embedding asks all the others, or all of a gallery. What it asks is ordered by similarity; of equally
    similar items the one with the lower index comes first. Without a gallery a query is left out of its own
    answer, by its index, so that a duplicate of it still counts. R is the number of items of its class that it
    could find; a query with none is left out and counted.

    Parameters
    ----------
    embeddings : [m, d], tensor, NumPy array or memory map; 16, 32 or 64 bits. The work is done on its device.
    labels : [m], whole numbers (NumPy arrays also hold words).
    gallery, gallery_labels : [n, d] and [n], what to ask instead of the embeddings themselves.
    ks : how many neighbours to look at, each ≥ 1; a k beyond what can be asked looks at all.
    measure : "cosine" or "euclidean".
    per_query : also return the values of each query, NaN for those without a match.
    memory_budget : bytes to work with, beyond the input; unless told 256 MiB, or 2 GiB of a GPU that has them free.
    progress : called with (steps done, steps in all).

    Returns
    -------
    recall@k : share of queries with one of their class among the first k.
    precision@1 : recall@1 under its other name.
    r_precision : share of the first R that are of the query's class.
    map@r : mean of precision@i over the first R places i, counting 0 where i is of another class.
    map : mean over all of the query's class of the precision at their places: average precision.
    mrr : mean of 1 / place of the first of the query's class.
    queries, queries_without_match : how many were asked, how many were left out.
    per_query : if wanted, the same by name, float64 of shape [m].

    >>> points = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.9, 0.1]])
    >>> found = retrieval(points, torch.tensor([0, 0, 1]), ks=(1, 2))
    >>> found["recall@1"], found["recall@2"], found["queries_without_match"]
    (0.0, 1.0, 1)
    """
    _check_settings(ks, measure, memory_budget)
    queries = _vectors("embeddings", embeddings)
    budget = _budget(queries.device) if memory_budget is None else memory_budget
    asked = None
    if gallery is None and gallery_labels is None:
        query_labels = as_labels("labels", labels, len(queries))
        asked_labels = query_labels
    elif gallery is None or gallery_labels is None:
        raise ValueError("gallery and gallery_labels go together; only one of them was given")
    else:
        asked = _vectors("gallery", gallery)
        if asked.shape[1] != queries.shape[1]:
            raise ValueError(f"gallery has {asked.shape[1]} dimensions and embeddings {queries.shape[1]}")
        asked = asked.to(queries.device)
        query_labels, asked_labels = as_label_pair(
            "labels", labels, len(queries), "gallery_labels", gallery_labels, len(asked)
        )
    codes = torch.unique(torch.cat([query_labels, asked_labels]), return_inverse=True)[1].to(queries.device)
    sides = prepare([queries] if asked is None else [queries, asked], measure)
    gallery_points = sides[1] if asked is not None else None
    ranking = Ranking(sides[0], codes[: len(queries)], gallery_points, codes[len(queries) :], budget)
    with full_precision(queries.device):
        values = _values(ranking.statistics(progress), ks)
    answered = ~values["mrr"].isnan()
    if not bool(answered.any()):
        where = "the gallery has none of the queries' classes" if asked is not None else "no class has two members"
        raise ValueError(f"labels: {where}, so there is nothing to retrieve")
    result: dict[str, Any] = {name: value[answered].mean().item() for name, value in values.items()}
    result["queries"] = int(answered.sum())
    result["queries_without_match"] = len(queries) - result["queries"]
    if per_query:
        result["per_query"] = values
    return result


def _values(statistics: dict[str, Tensor], ks: Sequence[int]) -> dict[str, Tensor]:
    """Every metric of every query."""
    first = statistics.pop("first")
    nothing = first.isnan()

    def found_within(k: int) -> Tensor:
        return (first < k).double().masked_fill_(nothing, torch.nan)

    values = {f"recall@{k}": found_within(k) for k in ks}
    return {**values, "precision@1": found_within(1), **statistics, "mrr": 1.0 / (first + 1.0)}


def _vectors(name: str, array: Array) -> Tensor:
    vectors = as_vectors(name, array)
    check_finite(name, vectors)
    return vectors


def _budget(device: torch.device) -> int:
    """What may be used without being asked for."""
    if device.type != "cuda":
        return CPU_BUDGET
    return max(CPU_BUDGET, min(GPU_BUDGET, torch.cuda.mem_get_info(device)[0] // 4))


def _check_settings(ks: Sequence[int], measure: str, memory_budget: int | None) -> None:
    if not ks:
        raise ValueError("ks is empty; needed is at least one number of neighbours")
    for k in ks:
        if isinstance(k, bool) or not isinstance(k, int) or k < 1:
            raise ValueError(f"ks contains {k!r}; needed are whole numbers of at least 1")
    if measure not in MEASURES:
        raise ValueError(f"measure is {measure!r}; allowed are {', '.join(MEASURES)}")
    if memory_budget is not None and memory_budget < 1:
        raise ValueError(f"memory_budget is {memory_budget}; it must be ≥ 1")
