"""Retrieval: does an image find its own class among its nearest neighbours?"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from numbers import Integral
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nearfar.metrics.points import Sides, as_sides
from nearfar.metrics.ranking import Ranking
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
    """How well queries find their class, exactly and in bounded memory.

    Every embedding asks all the others, or all of a gallery. What it asks is ordered by similarity; of equally
    similar items the one with the lower index comes first. Without a gallery a query is left out of its own
    answer, by its index, so that a duplicate of it still counts. R is the number of items of its class that it
    could find; a query with none is left out and counted.

    Args:
        embeddings: [m, d], tensor, NumPy array or memory map; 16, 32 or 64 bits. The work is done on its device.
        labels: [m], whole numbers (NumPy arrays also hold words).
        gallery, gallery_labels: [n, d] and [n], what to ask instead of the embeddings themselves.
        ks: How many neighbours to look at, each ≥ 1, or one such number; a k beyond what can be asked looks at all.
        at_k: What to tell for each k, of "recall", "precision" and "map".
        measure: "cosine" or "euclidean".
        positions: [m], the place at which each query itself stands in the gallery (−1: nowhere), so that it is left
            out of its own answer there, too.
        groups, gallery_groups: [m] and [n], whole numbers or words, such as the camera of each picture. A query does
            not ask what is of its class and of its group: such an item counts neither as found nor as to be found and
                takes
            no place, as is usual in re-identification. Without a gallery ``groups`` alone.
        per_query: Also return the values of each query, NaN for those without a match.
        memory_budget: Bytes to work with, beyond the input; unless told 256 MiB, or 2 GiB of a GPU that has them free.
        progress: Called with (steps done, steps in all).

    Returns:
        recall@k: Share of queries with one of their class among the first k.
        precision@k: Share of the first k that are of the query's class; of k even where fewer can be asked.
        map@k: Sum of precision@i over the places i among the first k that are of the query's class, divided by R, or by
            k where that is less.
        precision@1: recall@1 under its other name.
        r_precision: Share of the first R that are of the query's class.
        map@r: Mean of precision@i over the first R places i, counting 0 where i is of another class.
        map: Mean over all of the query's class of the precision at their places: average precision.
        mrr: Mean of 1 / place of the first of the query's class.
        queries, queries_without_match: How many were asked, how many were left out.
        per_query: If wanted, the same by name, float64 of shape [m].

    >>> points = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.9, 0.1]])
    >>> found = retrieval(points, torch.tensor([0, 0, 1]), ks=(1, 2))
    >>> found["recall@1"], found["recall@2"], found["queries_without_match"]
    (0.0, 1.0, 1)
    """
    ks, at_k = _whole_numbers(ks), (at_k,) if isinstance(at_k, str) else at_k
    for name in at_k:
        one_of("at_k", name, AT_K)
    sides = as_sides(embeddings, labels, gallery, gallery_labels, measure=measure, memory_budget=memory_budget)
    own = None if positions is None else _positions(positions, sides)
    kinds = None if groups is None and gallery_groups is None else _kinds(groups, gallery_groups, sides)
    ranking = Ranking(sides, own, kinds)
    counted = ks if {"precision", "map"}.intersection(at_k) else ()
    with full_precision(ranking.order.device):
        values = _values(ranking.statistics(progress, counted), ks, at_k)
    answered = ~values["mrr"].isnan()
    if not bool(answered.any()):
        where = "the gallery has none of the queries' classes" if gallery is not None else "no class has two members"
        beside = "" if own is None and kinds is None else " beside what is left out"
        raise ValueError(f"labels: {where}{beside}, so there is nothing to retrieve")
    result: dict[str, Any] = {name: value[answered].mean().item() for name, value in values.items()}
    result["queries"] = int(answered.sum())
    result["queries_without_match"] = len(answered) - result["queries"]
    if per_query:
        result["per_query"] = values
    return result


def _values(statistics: dict[str, Tensor], ks: Sequence[int], at_k: Sequence[str]) -> dict[str, Tensor]:
    """Every metric of every query."""
    first = statistics["first"]
    nothing = first.isnan()

    def found_within(k: int) -> Tensor:
        return (first < k).double().masked_fill_(nothing, torch.nan)

    def at(name: str, k: int) -> Tensor:
        return found_within(k) if name == "recall" else statistics[f"{name}@{k}"]

    values = {f"{name}@{k}": at(name, k) for name in at_k for k in ks}
    always = {name: statistics[name] for name in ("r_precision", "map@r", "map")}
    return {**values, "precision@1": found_within(1), **always, "mrr": 1.0 / (first + 1.0)}


def _positions(positions: Array, sides: Sides) -> Tensor:
    """Where queries stand in the gallery, [m]."""
    if sides.gallery is None:
        raise ValueError("positions say where queries stand in a gallery, and no gallery was given")
    if isinstance(positions, np.ndarray) and positions.dtype.kind not in "iu":
        raise TypeError(f"positions is of {positions.dtype}; whole numbers are needed")
    classes, gallery_classes = sides.query_classes, sides.gallery_classes
    own, count = as_labels("positions", positions, len(classes)).to(classes.device), len(gallery_classes)
    low, high = int(own.min()), int(own.max())
    if low < -1 or high >= count:
        raise ValueError(
            f"positions go from {low} to {high}; allowed are 0 to {count - 1}, in a gallery of {count}, and -1, nowhere"
        )
    wrong = ((own >= 0) & (gallery_classes[own] != classes)).nonzero()
    if len(wrong):
        query = int(wrong[0])
        raise ValueError(
            f"positions says that query {query} stands at {int(own[query])}, which is of another class; a query needs "
            "the position of its own copy, or -1"
        )
    return own


def _kinds(groups: Array | None, gallery_groups: Array | None, sides: Sides) -> tuple[Tensor, Tensor]:
    """A number for each class in each group, of the queries, [m], and of the gallery, [n]."""
    classes, gallery_classes = sides.query_classes, sides.gallery_classes
    if sides.gallery is None:
        if groups is None or gallery_groups is not None:
            raise ValueError("gallery_groups go with a gallery, and no gallery was given")
        pair = (as_labels("groups", groups, len(classes)),) * 2
    elif groups is None or gallery_groups is None:
        raise ValueError("groups and gallery_groups go together; only one of them was given")
    else:
        pair = as_label_pair("groups", groups, len(classes), "gallery_groups", gallery_groups, len(gallery_classes))
    different, codes = torch.unique(torch.cat([one.to(classes.device) for one in pair]), return_inverse=True)
    both = torch.cat([classes, gallery_classes]) * len(different) + codes
    kinds = torch.unique(both, return_inverse=True)[1]
    return kinds[: len(classes)], kinds[len(classes) :]


def _whole_numbers(ks: int | Iterable[int] | Array) -> tuple[int, ...]:
    """The numbers of neighbours to look at, however they are given."""
    given = ks.tolist() if isinstance(ks, (Tensor, np.ndarray)) else ks
    if isinstance(given, str) or not isinstance(given, (Integral, Iterable)):
        raise TypeError(f"ks is {ks!r}; needed are whole numbers of at least 1")
    several = tuple(given) if isinstance(given, Iterable) else (given,)
    if not several:
        raise ValueError("ks is empty; needed is at least one number of neighbours")
    for k in several:
        if isinstance(k, bool) or not isinstance(k, Integral) or k < 1:
            raise ValueError(f"ks contains {k!r}; needed are whole numbers of at least 1")
    return tuple(int(k) for k in several)
