"""Retrieval metrics: recall@k, precision@k, R-precision, MAP and MRR."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from numbers import Integral
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nearfar.metrics.points import QueryGallery, as_query_gallery
from nearfar.metrics.ranking import PositiveRanks
from nearfar.utils.inputs import Array, as_label_pair, as_labels
from nearfar.utils.precision import full_precision
from nearfar.utils.progress import Progress
from nearfar.utils.validation import one_of

AT_K = ("recall", "precision", "map")


@torch.no_grad()
def retrieval(
    embeddings: Array,
    labels: Array,
    gallery: Array | None = None,
    gallery_labels: Array | None = None,
    *,
    ks: int | Sequence[int] | Array = (1, 2, 4, 8),
    at_k: Sequence[str] = ("recall",),
    measure: str = "cosine",
    positions: Array | None = None,
    groups: Array | None = None,
    gallery_groups: Array | None = None,
    per_query: bool = False,
    memory_budget: int | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Compute retrieval metrics exactly, in bounded memory.

    Each embedding is a query for the other embeddings, or for a gallery. Items are ranked by similarity; of equally
    similar items the one with the lower index comes first. Without a gallery a query is excluded from its own results
    by index, so that a duplicate of it still counts. R is the number of items of the query's class; queries with R = 0
    are excluded from the means and counted.

    Args:
        embeddings: [m, d], a tensor, NumPy array or memory map of 16, 32 or 64 bits. The computation runs on its
            device.
        labels: [m], integers, or strings in a NumPy array.
        gallery: [n, d], items to search instead of the embeddings themselves.
        gallery_labels: [n], labels of the gallery.
        ks: Numbers of neighbors, each ≥ 1, or a single number. A k beyond the number of items uses all of them.
        at_k: Metrics to compute for each k, from "recall", "precision" and "map".
        measure: "cosine" or "euclidean".
        positions: [m], the index of each query in the gallery, −1 for none, to exclude it from its own results.
        groups: [m], integers or strings, such as the camera of each image. Items of the query's class and group are
            ignored, as is usual in re-identification. Without a gallery they apply to both inputs.
        gallery_groups: [n], groups of the gallery.
        per_query: Also return the values of each query, NaN for those without a match.
        memory_budget: Working memory in bytes, in addition to the input. The default is 256 MiB, or up to 2 GiB of
            free GPU memory.
        progress: Called with the number of steps done and their total.

    Returns:
        A dictionary of means over all queries with a match:

        - ``recall@k``: fraction of queries with an item of their class among the first k;
        - ``precision@k``: fraction of the first k items that are of the query's class;
        - ``map@k``: sum of precision@i over the ranks i ≤ k of the query's class, divided by min(R, k);
        - ``precision@1``: the same as recall@1;
        - ``r_precision``: fraction of the first R items that are of the query's class;
        - ``map@r``: mean of precision@i over the ranks i ≤ R, counting 0 for items of other classes;
        - ``map``: average precision: mean of precision@i over the ranks i of all items of the query's class;
        - ``mrr``: mean of 1 / rank of the first item of the query's class;
        - ``queries`` and ``queries_without_match``: their numbers;
        - ``per_query``: if requested, the same metrics by name, float64 of shape [m].

    Raises:
        ValueError: If no query has a match, or an argument is invalid.

    Example:
        >>> points = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.9, 0.1]])
        >>> found = retrieval(points, torch.tensor([0, 0, 1]), ks=(1, 2))
        >>> found["recall@1"], found["recall@2"], found["queries_without_match"]
        (0.0, 1.0, 1)
    """
    ks, at_k = _whole_numbers(ks), (at_k,) if isinstance(at_k, str) else at_k
    for name in at_k:
        one_of("at_k", name, AT_K)
    inputs = as_query_gallery(embeddings, labels, gallery, gallery_labels, measure=measure, memory_budget=memory_budget)
    own = None if positions is None else _positions(positions, inputs)
    kinds = None if groups is None and gallery_groups is None else _kinds(groups, gallery_groups, inputs)
    ranking = PositiveRanks(inputs, own, kinds)
    counted = ks if {"precision", "map"}.intersection(at_k) else ()
    with full_precision(ranking.order.device):
        values = _values(ranking.statistics(progress, counted), ks, at_k)
    answered = ~values["mrr"].isnan()
    if not bool(answered.any()):
        where = "the gallery has none of the queries' classes" if gallery is not None else "no class has two members"
        beside = "" if own is None and kinds is None else " except excluded items"
        raise ValueError(f"labels: {where}{beside}, so there is nothing to retrieve")
    result: dict[str, Any] = {name: value[answered].mean().item() for name, value in values.items()}
    result["queries"] = int(answered.sum())
    result["queries_without_match"] = len(answered) - result["queries"]
    if per_query:
        result["per_query"] = values
    return result


def _values(statistics: dict[str, Tensor], ks: Sequence[int], at_k: Sequence[str]) -> dict[str, Tensor]:
    """Return each metric of each query."""
    first = statistics["first"]
    nothing = first.isnan()

    def recall_at(k: int) -> Tensor:
        return (first < k).double().masked_fill_(nothing, torch.nan)

    def at(name: str, k: int) -> Tensor:
        return recall_at(k) if name == "recall" else statistics[f"{name}@{k}"]

    values = {f"{name}@{k}": at(name, k) for name in at_k for k in ks}
    always = {name: statistics[name] for name in ("r_precision", "map@r", "map")}
    return {**values, "precision@1": recall_at(1), **always, "mrr": 1.0 / (first + 1.0)}


def _positions(positions: Array, inputs: QueryGallery) -> Tensor:
    """Check the index of each query in the gallery, [m]."""
    if inputs.gallery is None:
        raise ValueError("positions are indices into a gallery; no gallery was given")
    if isinstance(positions, np.ndarray) and positions.dtype.kind not in "iu":
        raise TypeError(f"positions is of {positions.dtype}; integers are required")
    classes, gallery_classes = inputs.query_classes, inputs.gallery_classes
    own, count = as_labels("positions", positions, len(classes)).to(classes.device), len(gallery_classes)
    low, high = int(own.min()), int(own.max())
    if low < -1 or high >= count:
        raise ValueError(
            f"positions range from {low} to {high}; allowed are 0 to {count - 1}, and -1 for queries not in the gallery"
        )
    wrong = ((own >= 0) & (gallery_classes[own] != classes)).nonzero()
    if len(wrong):
        query = int(wrong[0])
        raise ValueError(
            f"positions has {int(own[query])} for query {query}, which is of another class; the index of the query "
            "itself or -1 is required"
        )
    return own


def _kinds(groups: Array | None, gallery_groups: Array | None, inputs: QueryGallery) -> tuple[Tensor, Tensor]:
    """Number the combinations of class and group: of the queries, [m], and of the gallery, [n]."""
    classes, gallery_classes = inputs.query_classes, inputs.gallery_classes
    if inputs.gallery is None:
        if groups is None or gallery_groups is not None:
            raise ValueError("gallery_groups require a gallery; no gallery was given")
        pair = (as_labels("groups", groups, len(classes)),) * 2
    elif groups is None or gallery_groups is None:
        raise ValueError("groups and gallery_groups must be given together; only one of them was given")
    else:
        pair = as_label_pair("groups", groups, len(classes), "gallery_groups", gallery_groups, len(gallery_classes))
    different, codes = torch.unique(torch.cat([one.to(classes.device) for one in pair]), return_inverse=True)
    both = torch.cat([classes, gallery_classes]) * len(different) + codes
    kinds = torch.unique(both, return_inverse=True)[1]
    return kinds[: len(classes)], kinds[len(classes) :]


def _whole_numbers(ks: int | Iterable[int] | Array) -> tuple[int, ...]:
    """Return the numbers of neighbors as a tuple."""
    given = ks.tolist() if isinstance(ks, (Tensor, np.ndarray)) else ks
    if isinstance(given, str) or not isinstance(given, (Integral, Iterable)):
        raise TypeError(f"ks is {ks!r}; integers of at least 1 are required")
    several = tuple(given) if isinstance(given, Iterable) else (given,)
    if not several:
        raise ValueError("ks is empty; at least one number is required")
    for k in several:
        if isinstance(k, bool) or not isinstance(k, Integral) or k < 1:
            raise ValueError(f"ks contains {k!r}; integers of at least 1 are required")
    return tuple(int(k) for k in several)
