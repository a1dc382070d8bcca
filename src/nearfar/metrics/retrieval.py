"""Retrieval metrics: recall@k, precision@k, R-precision, MAP and MRR."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement, product
from numbers import Integral
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nearfar.metrics.inputs import SAME, Points, QueryGallery, as_points, as_query_gallery
from nearfar.metrics.k_reciprocal import reranked_positives
from nearfar.supervision import Supervision
from nearfar.utils.progress import Progress
from nearfar.utils.tensors import Array, ArrayInput, as_array, as_label_pair, as_labels, full_precision
from nearfar.utils.validation import one_of

AT_K = ("recall", "precision", "map", "ndcg")
RERANKINGS = ("k_reciprocal",)


@torch.no_grad()
def retrieval(
    embeddings: ArrayInput,
    labels: ArrayInput | Supervision,
    gallery: ArrayInput | None = None,
    gallery_labels: ArrayInput | None = None,
    *,
    ks: int | Sequence[int] | Array = (1, 2, 4, 8),
    at_k: Sequence[str] = ("recall",),
    measure: str = "cosine",
    positions: ArrayInput | None = None,
    groups: ArrayInput | None = None,
    gallery_groups: ArrayInput | None = None,
    rerank: str | None = None,
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
        embeddings: [m, d], a tensor, NumPy array, memory map or table of pandas, of 16, 32 or 64 bits. The computation
            runs on its device.
        labels: [m], integers, or strings in a NumPy array or a column of pandas; or another supervision, see
            :mod:`nearfar.supervision`: its positives take the place of the items of the query's class, and unknown
            items are ignored. Positions, groups and re-ranking need labels.
        gallery: [n, d], items to search instead of the embeddings themselves.
        gallery_labels: [n], labels of the gallery.
        ks: Numbers of neighbors, each ≥ 1, or a single number. A k beyond the number of items uses all of them.
        at_k: Metrics to compute for each k, from "recall", "precision" and "map", and "ndcg" for a supervision.
        measure: "cosine" or "euclidean".
        positions: [m], the index of each query in the gallery, −1 for none, to exclude it from its own results.
        groups: [m], integers or strings, such as the camera of each image. Items of the query's class and group are
            ignored, as is usual in re-identification. Without a gallery they apply to both inputs.
        gallery_groups: [n], groups of the gallery.
        rerank: "k_reciprocal" re-ranks the nearest 100 items of each query by how many neighbors they share with it, as
            ``Index.search`` does.
        per_query: Also return the values of each query, NaN for those without a match.
        memory_budget: Working memory in bytes, in addition to the input. The default is 256 MiB, or up to 2 GiB of
            free GPU memory.
        progress: Called with the number of steps done and their total.

    Returns:
        A dictionary of means over all queries with a match:

        - ``recall@k``: fraction of queries with an item of their class among the first k;
        - ``precision@k``: fraction of the first k items that are of the query's class;
        - ``map@k``: sum of precision@i over the ranks i ≤ k of the query's class, divided by min(R, k);
        - ``ndcg@k``: discounted cumulative gain of the first k items, Σ grade / log2(rank + 1), divided by the largest
          possible; grades are those of the supervision, from 0 to 1;
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
        >>> report = retrieval(points, torch.tensor([0, 0, 1]), ks=(1, 2))
        >>> report["recall@1"], report["recall@2"], report["queries_without_match"]
        (0.0, 1.0, 1)
    """
    ks, at_k = _whole_numbers(ks), (at_k,) if isinstance(at_k, str) else at_k
    for name in at_k:
        one_of("at_k", name, AT_K)
    if rerank is not None:
        one_of("rerank", rerank, RERANKINGS)
    counted = ks if {"precision", "map"}.intersection(at_k) else ()
    if isinstance(labels, Supervision):
        if any(argument is not None for argument in (gallery_labels, positions, groups, gallery_groups, rerank)):
            raise ValueError(
                f"labels is a {type(labels).__name__}; gallery_labels, positions, groups, gallery_groups and rerank "
                "need class labels"
            )
        queries, items, budget = as_points(embeddings, gallery, measure=measure, memory_budget=memory_budget)
        with full_precision(queries.array.device):
            graded = ks if "ndcg" in at_k else ()
            statistics = _supervised_statistics(queries, items, labels, budget, progress, counted, graded)
        nothing = "no query has a positive"
    else:
        if "ndcg" in at_k:
            raise ValueError("at_k contains 'ndcg', which needs a supervision: nearfar.supervision.Hierarchy([labels])")
        inputs = as_query_gallery(
            embeddings, labels, gallery, gallery_labels, measure=measure, memory_budget=memory_budget
        )
        itself = None if positions is None else _positions(positions, inputs)
        kinds = None if groups is None and gallery_groups is None else _kinds(groups, gallery_groups, inputs)
        ranking = PositiveRanks(inputs, itself, kinds)
        with full_precision(ranking.order.device):
            if rerank is None:
                statistics = ranking.statistics(progress, counted)
            else:
                ranks = reranked_positives(inputs, ranking.ignored, ranking.positives, progress)
                statistics = _from_ranks(ranks, ranking.positives, counted)
        nothing = "the gallery has none of the queries' classes" if gallery is not None else "no class has two members"
        nothing += "" if itself is None and kinds is None else " except excluded items"
    values = _values(statistics, ks, at_k)
    answered = ~values["mrr"].isnan()
    if not bool(answered.any()):
        raise ValueError(f"labels: {nothing}, so there is nothing to retrieve")
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
    recall = {f"recall@{k}": (first < k).double().masked_fill_(nothing, torch.nan) for k in {1, *ks}}
    known = statistics | recall
    values = {f"{name}@{k}": known[f"{name}@{k}"] for name in at_k for k in ks}
    always = {name: statistics[name] for name in ("r_precision", "map@r", "map")}
    return {**values, "precision@1": recall["recall@1"].clone(), **always, "mrr": 1.0 / (first + 1.0)}


def _supervised_statistics(
    queries: Points,
    items: Points | None,
    supervision: Supervision,
    budget: int,
    progress: Progress | None,
    ks: Sequence[int],
    graded: Sequence[int],
) -> dict[str, Tensor]:
    """Return what ``PositiveRanks.statistics`` does, and nDCG at each k of ``graded``, by sorting all items."""
    height, width = len(queries.array), len((queries if items is None else items).array)
    given = supervision.of_batch(height, None if items is None else width, queries.array.device)
    every = torch.arange(width, device=queries.array.device)
    step = max(1, budget // (256 * width))
    parts = []
    for start in range(0, height, step):
        rows = slice(start, min(start + step, height))
        positives, negatives = given.masks(rows, slice(0, width))
        known = positives | negatives
        if items is None:
            known.diagonal(start).fill_(False)
        index = torch.arange(rows.start, rows.stop, device=every.device)
        similarity, rounding = _similarities(queries, queries if items is None else items, index, budget)
        similarity.masked_fill_(~known, -math.inf)  # so that they are last
        order = _in_order(similarity, rounding, queries.unit)
        hit = (positives & known).gather(1, order)
        number = hit.sum(dim=1).double()
        statistics = _from_hits(hit, number, ks)
        if graded:
            grades = given.relevance(rows, slice(0, width)).masked_fill_(~known, 0.0)
            gains = torch.stack([grades.gather(1, order), grades.sort(dim=1, descending=True).values])
            gained, most = (gains / (every + 2.0).log2()).cumsum(dim=2)
            statistics |= {f"ndcg@{k}": gained[:, min(k, width) - 1] / most[:, min(k, width) - 1] for k in graded}
        parts.append({name: value.masked_fill(number == 0, torch.nan) for name, value in statistics.items()})
        if progress is not None:
            progress(rows.stop, height)
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _positions(positions: ArrayInput, inputs: QueryGallery) -> Tensor:
    """Check the index of each query in the gallery, [m]."""
    if inputs.gallery is None:
        raise ValueError("positions are indices into a gallery; no gallery was given")
    positions = as_array("positions", positions)
    if isinstance(positions, np.ndarray) and positions.dtype.kind not in "iu":
        raise TypeError(f"positions is of {positions.dtype}; integers are required")
    classes, gallery_classes = inputs.query_classes, inputs.gallery_classes
    places, count = as_labels("positions", positions, len(classes)).to(classes.device), len(gallery_classes)
    low, high = int(places.min()), int(places.max())
    if low < -1 or high >= count:
        raise ValueError(
            f"positions range from {low} to {high}; allowed are 0 to {count - 1}, and -1 for queries not in the gallery"
        )
    wrong = ((places >= 0) & (gallery_classes[places] != classes)).nonzero()
    if len(wrong):
        query = int(wrong[0])
        raise ValueError(
            f"positions has {int(places[query])} for query {query}, which is of another class; the index of the query "
            "itself or -1 is required"
        )
    return places


def _kinds(groups: ArrayInput | None, gallery_groups: ArrayInput | None, inputs: QueryGallery) -> tuple[Tensor, Tensor]:
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
    different, codes = torch.unique(torch.cat([part.to(classes.device) for part in pair]), return_inverse=True)
    both = torch.cat([classes, gallery_classes]) * len(different) + codes
    kinds = torch.unique(both, return_inverse=True)[1]
    return kinds[: len(classes)], kinds[len(classes) :]


def _whole_numbers(ks: int | Iterable[int] | Array) -> tuple[int, ...]:
    """Return the numbers of neighbors as a tuple."""
    numbers = ks.tolist() if isinstance(ks, (Tensor, np.ndarray)) else ks
    if isinstance(numbers, str) or not isinstance(numbers, (Integral, Iterable)):
        raise TypeError(f"ks is {ks!r}; integers of at least 1 are required")
    numbers = tuple(numbers) if isinstance(numbers, Iterable) else (numbers,)
    if not numbers:
        raise ValueError("ks is empty; at least one number is required")
    for k in numbers:
        if isinstance(k, bool) or not isinstance(k, Integral) or k < 1:
            raise ValueError(f"ks contains {k!r}; integers of at least 1 are required")
    return tuple(int(k) for k in numbers)


MANY_POSITIVES = 64  # beyond this, sorting beats counting
CPU_BLOCK = 1024  # rows and columns of a block that fits into the cache
CPU_ROOM = 1 << 24  # bytes of a temporary that the allocator reuses
MANY_CLOSE = 4  # with more than one close comparison per so many items, a query is compared in float64 throughout
MANY_NEAR = 16  # with more than one entry in so many near a positive, entries are not picked out
SMALL = 2.0**-46  # relative error of a squared distance computed by a matrix product


@dataclass
class _Block:
    """Some points, consecutive in the order of classes, and the counts for their positives."""

    index: Tensor  # [b], indices of the points
    classes: Tensor  # [b], ascending
    span: tuple[int, int]  # the first and the last class
    positives: Tensor  # [b, k], indices of their positives, the least similar first
    similarity: Tensor  # [b, k], exact; infinite where there is no positive, so that nothing exceeds it
    limits: Tensor  # [k, b], the same in float32
    above: Tensor  # [b, k], number of items ranked before each, counted individually
    beyond: Tensor  # [b, k + 1], number of other items that rank before exactly so many of the positives
    close: Tensor  # [b], number of comparisons that were too close for float32
    float32: Tensor | None = None  # [b, d], in float32, if it fits into memory


class PositiveRanks:
    """Ranks gallery items, or the other queries, for each query."""

    def __init__(
        self, inputs: QueryGallery, itself: Tensor | None = None, kinds: tuple[Tensor, Tensor] | None = None
    ) -> None:
        queries, query_classes, gallery, gallery_classes, budget = inputs
        self.queries, self.gallery = queries, queries if gallery is None else gallery
        self.alone, self.budget = gallery is None, budget
        numbers = queries.array.numel() + (0 if gallery is None else gallery.array.numel())
        self.keeps = 4 * numbers <= budget // 2  # all points in float32
        sizes = torch.bincount(gallery_classes, minlength=int(query_classes.max()) + 1)
        # Classes of similar size are adjacent, so that a block has as few slots for positives as possible.
        places = torch.argsort(torch.argsort(sizes, stable=True), stable=True)
        self.query_classes, self.gallery_classes = places[query_classes], places[gallery_classes]
        self.sizes = torch.bincount(self.gallery_classes, minlength=len(sizes))
        self.starts = self.sizes.cumsum(0) - self.sizes
        self.order = torch.argsort(self.gallery_classes, stable=True)
        self._rooms: dict[torch.dtype, Tensor] = {}
        if self.alone:
            itself = torch.arange(len(query_classes), device=query_classes.device)
        self.itself = torch.full_like(query_classes, -1) if itself is None else itself
        self.others = self.sizes[self.query_classes] - (self.itself >= 0).long()  # [m], others of its class
        self.kinds, self.positives = kinds, self.others  # [m], number of positives
        if kinds is not None:
            query_kinds, gallery_kinds = kinds
            same = torch.bincount(gallery_kinds, minlength=int(query_kinds.max()) + 1)[query_kinds]
            counts_itself = (self.itself >= 0) & (gallery_kinds[self.itself] == query_kinds)
            self.positives = self.others - (same - counts_itself.long())

    def statistics(self, progress: Progress | None = None, ks: Sequence[int] = ()) -> dict[str, Tensor]:
        """Return statistics of each query, [m] each; NaN for queries without positives."""
        nan = torch.full((len(self.positives),), torch.nan, dtype=torch.float64, device=self.positives.device)
        names = ("first", "r_precision", "map@r", "map", *(f"{name}@{k}" for name in ("precision", "map") for k in ks))
        statistics = {name: nan.clone() for name in names}
        many = ((self.others > MANY_POSITIVES) & (self.positives > 0)).nonzero().squeeze(1)
        tiles = torch.split(many, max(1, self.budget // (128 * len(self.order)))) if len(many) else ()
        blocks, pairs = self._blocks()
        total = len(pairs) + len(tiles)
        for done, (rows, columns) in enumerate(pairs, start=1):
            self._count(rows, columns)
            if progress is not None:
                progress(done, total)
        for block in blocks:
            # An item that ranks before more than s of the positives ranks before the one in slot s.
            places = block.above + block.beyond[:, 1:].flip(1).cumsum(dim=1).flip(1)
            _store(statistics, block.index, _from_ranks(places, self.positives[block.index], ks))
            crowded = block.index[self._too_close(block)]
            height = max(1, self.budget // (64 * min(len(self.order), CPU_BLOCK)))
            for index in torch.split(crowded, height) if len(crowded) else ():
                _store(statistics, index, _from_ranks(self._exact_ranks(index), self.positives[index], ks))
        for done, index in enumerate(tiles, start=len(pairs) + 1):
            _store(statistics, index, self._sorted(index, ks))
            if progress is not None:
                progress(done, total)
        return statistics

    # --- ignored items ------------------------------------------------------------------------------------

    def ignored(self, index: Tensor, items: Tensor) -> Tensor:
        """Return whether queries [b] ignore items, [b, k] or [k]."""
        out = items == self.itself[index].unsqueeze(1)
        if self.kinds is not None:
            out |= self.kinds[1][items] == self.kinds[0][index].unsqueeze(1)
        return out

    # --- few positives: counting --------------------------------------------------------------------------

    def _blocks(self) -> tuple[list[_Block], list[tuple[_Block, _Block]]]:
        """Return blocks of queries with few positives, and the pairs of blocks to compare."""
        device = self.order.device
        size = max(1, math.isqrt(self.budget // 32))
        size = min(size, CPU_BLOCK) if device.type == "cpu" else size
        order = self.order if self.alone else torch.argsort(self.query_classes, stable=True)
        rows = [self._block(index) for index in torch.split(order, size)]
        if self.alone:
            pairs = list(combinations_with_replacement(rows, 2))
        else:
            columns = [self._block(index, gallery=True) for index in torch.split(self.order, size)]
            pairs = list(product(rows, columns))
        pairs = [(left, right) for left, right in pairs if left.above.numel() or right.above.numel()]
        return [block for block in rows if block.above.numel()], pairs

    def _block(self, index: Tensor, *, gallery: bool = False) -> _Block:
        """Return a block of queries, or of gallery items, which have no positives of their own."""
        classes = (self.gallery_classes if gallery else self.query_classes)[index]
        number = torch.zeros_like(index) if gallery else self.others[index]
        number = number * (number <= MANY_POSITIVES)
        slots = torch.arange(int(number.max()), device=index.device)
        there = slots < number.unsqueeze(1)
        last = len(self.order) - 1
        columns = self.starts[classes].unsqueeze(1) + slots
        positives = self.order[columns.clamp(max=last)]
        similarity = torch.full_like(there, math.inf, dtype=torch.float64)
        if len(slots):
            # Skip the query itself: from its position on take the next item.
            later = self.order[(columns + 1).clamp(max=last)]
            itself = self.itself[index].unsqueeze(1)
            positives = torch.where((positives == itself).cumsum(dim=1) > 0, later, positives)
            there &= ~self.ignored(index, positives)
            similarity, order = self._exactly(index, positives).masked_fill_(~there, math.inf).sort(dim=1, stable=True)
            positives, there = positives.gather(1, order), there.gather(1, order)
        above = torch.zeros_like(similarity)
        for slot in range(len(slots)):
            column = slice(slot, slot + 1)
            before = self._before(similarity[:, column], positives[:, column], similarity, positives)
            above += before & there[:, column] & (slots != slot)
        span = int(classes[0]), int(classes[-1])
        side = self.gallery if gallery else self.queries
        vectors = side.float32(index) if self.keeps else None
        above.masked_fill_(~there, math.inf)
        limits = similarity.float().T.contiguous()
        beyond = torch.zeros(len(index), len(slots) + 1, dtype=torch.int64, device=index.device)
        close = torch.zeros_like(index)
        return _Block(index, classes, span, positives, similarity, limits, above, beyond, close, vectors)

    def _before(self, similarity: Tensor, index: Tensor, other_similarity: Tensor, other_index: Tensor) -> Tensor:
        """Return whether items of similarity ``one`` rank before those of ``other``; ties go to the lower index."""
        gap = similarity - other_similarity
        slack = SAME if self.queries.unit else SAME * (similarity.abs() + other_similarity.abs())
        return (gap > slack) | ((gap >= -slack) & (index < other_index))

    def _exactly(self, index: Tensor, others: Tensor) -> Tensor:
        """Return the similarities of queries [b] with items [b, k] in float64."""
        room = min(self.budget, CPU_ROOM) if index.device.type == "cpu" else self.budget
        rows = max(1, room // (64 * self.queries.array.shape[1] * max(1, others.shape[1])))
        parts = []
        for queries, places in zip(torch.split(index, rows), torch.split(others, rows), strict=True):
            items = self.gallery.float64(places.flatten()).view(*places.shape, self.queries.array.shape[1])
            parts.append(self.queries.similarity(self.queries.float64(queries).unsqueeze(1), items))
        return torch.cat(parts)

    def _count(self, rows: _Block, columns: _Block) -> None:
        """Count the columns that rank before the positives of the rows and, without a gallery, vice versa."""
        left = self.queries.float32(rows.index) if rows.float32 is None else rows.float32
        right = self.gallery.float32(columns.index) if columns.float32 is None else columns.float32
        similarity = self.queries.pairwise(left, right, out=self._room(torch.float32, len(left), len(right)))
        error = self.queries.float32_error(left, right)
        if rows.span[0] <= columns.span[1] and columns.span[0] <= rows.span[1]:
            # Positives are counted separately.
            similarity.masked_fill_(rows.classes.unsqueeze(1) == columns.classes, -math.inf)
        if rows.above.shape[1]:
            entries = self._near(similarity, rows.limits[0].unsqueeze(1) - error)
            if entries is None:
                self._add_many(rows, columns, similarity, error)
            else:
                self._add(rows, columns, *entries, error)
        if self.alone and rows is not columns and columns.above.shape[1]:
            entries = self._near(similarity, columns.limits[0] - error)
            if entries is None:
                self._add_many(columns, rows, similarity.T.contiguous(), error)
            else:
                row, column, values = entries
                self._add(columns, rows, column, row, values, error)

    def _room(self, dtype: torch.dtype, height: int, width: int) -> Tensor:
        """Return reused memory for a block."""
        if dtype not in self._rooms or len(self._rooms[dtype]) < height * width:
            self._rooms[dtype] = torch.empty(height * width, dtype=dtype, device=self.order.device)
        return self._rooms[dtype][: height * width].view(height, width)

    def _near(self, similarity: Tensor, lowest: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
        """Return row, column and value of the entries that reach ``lowest``; None if there are too many."""
        reached = self._room(torch.bool, *similarity.shape)
        if reached.device.type == "cpu":  # NumPy compares and finds several times as fast
            np.greater_equal(similarity.numpy(), lowest.numpy(), out=reached.numpy())
            entry = torch.from_numpy(np.flatnonzero(reached.numpy()))
        else:
            entry = torch.ge(similarity, lowest, out=reached).view(-1).nonzero().squeeze(1)
        if MANY_NEAR * len(entry) > reached.numel():
            return None
        return entry // reached.shape[1], entry % reached.shape[1], similarity.view(-1).index_select(0, entry)

    def _add(self, rows: _Block, columns: _Block, row: Tensor, column: Tensor, values: Tensor, error: float) -> None:
        """Add picked entries to the counts of the rows."""
        gap = values - rows.limits.index_select(1, row)
        exceeds = torch.empty_like(gap)  # summing floats is faster than summing booleans
        surely = torch.gt(gap, error, out=exceeds).sum(dim=0).long()
        perhaps = torch.ge(gap, -error, out=exceeds).sum(dim=0).long()
        # Positives are sorted, so it is enough to count how many are exceeded.
        places = rows.beyond.shape[1]
        rows.beyond += torch.bincount(surely.add(row, alpha=places), minlength=rows.beyond.numel()).view_as(rows.beyond)
        unsure = (perhaps != surely).nonzero().squeeze(1)
        slot, which = (gap[:, unsure].abs() <= error).nonzero().unbind(1)
        self._decide(rows, columns, row[unsure[which]], slot, column[unsure[which]])

    def _add_many(self, rows: _Block, columns: _Block, similarity: Tensor, error: float) -> None:
        """Add all entries to the counts of the rows, one slot of positives at a time."""
        exceeds = torch.empty_like(similarity)
        for slot, limit in enumerate(rows.limits.unsqueeze(2)):
            low, high = limit - error, limit + error
            surely = torch.gt(similarity, high, out=exceeds).sum(dim=1)
            perhaps = torch.ge(similarity, low, out=exceeds).sum(dim=1)
            rows.above[:, slot] += surely
            unsure = (perhaps != surely).nonzero().squeeze(1)
            for queries in torch.split(unsure, max(1, self.budget // (16 * similarity.shape[1]))):
                values = similarity[queries]
                which, column = ((values >= low[queries]) & (values <= high[queries])).nonzero().unbind(1)
                self._decide(rows, columns, queries[which], torch.full_like(which, slot), column)

    def _decide(self, rows: _Block, columns: _Block, row: Tensor, slot: Tensor, column: Tensor) -> None:
        """Repeat close comparisons of columns with positives, each in a slot of a row, in float64."""
        if not len(row):
            return
        rows.close += torch.bincount(row, minlength=len(rows.close))
        spent = self._too_close(rows)[row]
        if bool(spent.any()):
            row, slot, column = row[~spent], slot[~spent], column[~spent]
        item = columns.index[column]
        exact = self._exactly(rows.index[row], item.unsqueeze(1)).squeeze(1)
        before = self._before(exact, item, rows.similarity[row, slot], rows.positives[row, slot])
        rows.above.index_put_((row, slot), before.double(), accumulate=True)

    # --- many close comparisons: counting in float64 ------------------------------------------------------------

    def _too_close(self, rows: _Block) -> Tensor:
        """Return which rows to compare in float64 throughout; not for distances, which products compute inexactly."""
        return (rows.close > len(self.order) / MANY_CLOSE) & self.queries.unit

    def _exact_ranks(self, index: Tensor) -> Tensor:
        """Return the ranks of the positives of some queries, [b, k]."""
        block = self._block(index)
        queries = self.queries.float64(index)
        for items in torch.split(torch.arange(len(self.order), device=index.device), CPU_BLOCK):
            similarity = self.queries.pairwise(queries, self.gallery.float64(items))
            # Positives are counted separately, and a query ignores itself.
            similarity.masked_fill_(block.classes.unsqueeze(1) == self.gallery_classes[items], -math.inf)
            for slot in range(block.above.shape[1]):
                limit, positive = block.similarity[:, slot, None], block.positives[:, slot, None]
                block.above[:, slot] += self._before(similarity, items, limit, positive).sum(dim=1)
        return block.above

    # --- many positives: sorting --------------------------------------------------------------------------

    def _sorted(self, index: Tensor, ks: Sequence[int]) -> dict[str, Tensor]:
        """Return the statistics of some queries by sorting all items."""
        every = torch.arange(len(self.order), device=index.device)
        similarity, rounding = _similarities(self.queries, self.gallery, index, self.budget)
        similarity.masked_fill_(self.ignored(index, every), -math.inf)  # so that they are last
        order = _in_order(similarity, rounding, self.queries.unit)
        hit = self.gallery_classes[order] == self.query_classes[index].unsqueeze(1)
        ignored = self.sizes[self.query_classes[index]] - self.positives[index]
        hit &= every < (len(every) - ignored).unsqueeze(1)
        return _from_hits(hit, self.positives[index].double(), ks)


def _similarities(queries: Points, gallery: Points, index: Tensor, budget: int) -> tuple[Tensor, Tensor]:
    """Return the similarities of some queries with all items, [b, n], and bounds of their rounding errors."""
    rows = queries.float64(index) - queries.center
    every = torch.arange(len(gallery.array), device=index.device)
    similarity = rows.new_empty(len(index), len(every))
    rounding = torch.zeros_like(similarity[:1]).squeeze(0)  # of each column
    for columns in torch.split(every, max(1, budget // (64 * rows.shape[1]))):
        items = gallery.float64(columns) - queries.center
        similarity[:, columns] = queries.pairwise(rows, items)
        rounding[columns] = SMALL * items.square().sum(dim=1)
    return similarity, rounding + SMALL * rows.square().sum(dim=1, keepdim=True)


def _in_order(similarity: Tensor, rounding: Tensor, unit: bool) -> Tensor:
    """Return the columns of each row, nearest first; ties up to rounding go to the lower index."""
    values, order = torch.sort(similarity, dim=1, descending=True, stable=True)
    slack = SAME * torch.ones_like(values) if unit else rounding.gather(1, order) + SAME * values.abs()
    slack = slack[:, 1:] + (0.0 if unit else slack[:, :-1])
    step = (values[:, :-1] - values[:, 1:] > slack) | values[:, 1:].isinf()
    if bool(step.all()):
        return order
    rank = torch.cat([torch.zeros_like(order[:, :1]), step.cumsum(dim=1)], dim=1)
    return order.gather(1, (rank * order.shape[1] + order).argsort(dim=1))


def _from_hits(hit: Tensor, number: Tensor, ks: Sequence[int]) -> dict[str, Tensor]:
    """Return the statistics from which items are positive, nearest first, [b, n], and how many are, [b]."""
    every = torch.arange(hit.shape[1], device=hit.device)
    precision = hit.cumsum(dim=1).double().div_(every + 1.0).mul_(hit)
    within = every < number.unsqueeze(1)
    return {
        "first": hit.int().argmax(dim=1).double(),
        "r_precision": (hit & within).sum(dim=1) / number,
        "map@r": (precision * within).sum(dim=1) / number,
        "map": precision.sum(dim=1) / number,
        **{f"precision@{k}": hit[:, :k].sum(dim=1, dtype=torch.float64) / k for k in ks},
        **{f"map@{k}": precision[:, :k].sum(dim=1) / number.clamp(max=k) for k in ks},
    }


def _from_ranks(ranks: Tensor, number: Tensor, ks: Sequence[int]) -> dict[str, Tensor]:
    """Return the statistics from the ranks of the positives, [b, k], infinite where there are no more."""
    ranks = ranks.sort(dim=1).values
    there = ranks.isfinite()
    nothing = ~there[:, 0]  # no positives, or too many to count
    number = number.double().masked_fill_(nothing, torch.nan)
    precision = torch.arange(1, ranks.shape[1] + 1, device=ranks.device) / (ranks + 1.0)
    precision = precision.masked_fill(~there, 0.0)
    within = ranks < number.unsqueeze(1)

    def number_within(k: int) -> Tensor:
        return (ranks < k).sum(dim=1, dtype=torch.float64)

    return {
        "first": ranks[:, 0].masked_fill(nothing, torch.nan),
        "r_precision": within.sum(dim=1) / number,
        "map@r": (precision * within).sum(dim=1) / number,
        "map": precision.sum(dim=1) / number,
        **{f"precision@{k}": (number_within(k) / k).masked_fill_(nothing, torch.nan) for k in ks},
        **{f"map@{k}": (precision * (ranks < k)).sum(dim=1) / number.clamp(max=k) for k in ks},
    }


def _store(statistics: dict[str, Tensor], index: Tensor, values: dict[str, Tensor]) -> None:
    for name, value in values.items():
        statistics[name][index] = value
