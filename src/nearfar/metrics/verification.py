"""Verification metrics: are two images of one class? Thresholds on the similarity of all pairs.

The ROC curve needs, for each positive pair, the number of negative pairs that are more similar and equally similar.
So the similarities of the positive pairs are kept in sorted order. Those of the negative pairs are computed tile by
tile, sorted, counted against the positive ones, and discarded.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement, product, starmap
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from nearfar.metrics.inputs import SAME, Points, QueryGallery, as_points, as_query_gallery
from nearfar.supervision import Pairs, Supervision
from nearfar.utils.progress import Progress
from nearfar.utils.tensors import Array, ArrayInput, as_labels, full_precision
from nearfar.utils.validation import number

CPU_SIDE = 2048  # rows and columns of a tile


@torch.no_grad()
def verification(
    embeddings: ArrayInput,
    labels: ArrayInput | Pairs,
    gallery: ArrayInput | None = None,
    gallery_labels: ArrayInput | None = None,
    *,
    rates: float | Sequence[float] | Array = (1e-2, 1e-3),
    measure: str = "cosine",
    folds: ArrayInput | None = None,
    memory_budget: int | None = None,
    progress: Progress | None = None,
) -> dict[str, float]:
    """Compute verification metrics over all or over given pairs, exactly.

    Every two embeddings form a pair, or every query with every item of a gallery. A pair is positive if both are of one
    class. A threshold accepts the pairs that are at least as similar. Nothing is sampled. Similarities closer than
    1e-12 are equal.

    Args:
        embeddings: [m, d], a tensor, NumPy array, memory map or table of pandas, of 16, 32 or 64 bits. The computation
            runs on its device.
        labels: [m], integers, or strings in a NumPy array or a column of pandas; or given pairs, which are then
            the only ones.
        gallery: [n, d], items to pair the embeddings with instead of each other.
        gallery_labels: [n], labels of the gallery.
        rates: False accept rates, each ≥ 0 and < 1, or a single rate.
        measure: "cosine" or "euclidean".
        folds: [p], the fold of each given pair, for the accuracy; ten folds in turn by default, or as many as there are
            pairs if these are fewer.
        memory_budget: Memory for tiles in bytes. The default is 256 MiB, or up to 2 GiB of free GPU memory. Positive
            pairs take up to 100 bytes each in addition.
        progress: Called with the number of steps done and their total.

    Returns:
        A dictionary with:

        - ``tar@rate``: true accept rate at the lowest threshold whose false accept rate is at most ``rate``, without
          interpolation;
        - ``threshold@rate``: that threshold: the lowest similarity, or the largest distance, of an accepted positive
          pair; NaN if there is none;
        - ``eer``: equal error rate, on the ROC curve with linear interpolation;
        - ``auc``: area under the ROC curve; ties count half;
        - ``positives`` and ``negatives``: numbers of pairs;
        - ``accuracy``, of given pairs: the share that is judged right, each fold by the threshold that is best for the
          others, as in the protocol of LFW.

    Raises:
        ValueError: If there is no positive or no negative pair, or an argument is invalid.

    Example:
        >>> points = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0], [0.6, 0.8]])
        >>> report = verification(points, torch.tensor([0, 0, 1, 1]), rates=(0.25,))
        >>> report["tar@0.25"], round(report["threshold@0.25"], 6), report["eer"], report["auc"]
        (1.0, 0.8, 0.25, 0.75)
        >>> pairs = Pairs(torch.tensor([0, 2, 0]), torch.tensor([1, 3, 2]), torch.tensor([1, 1, 0]))
        >>> report = verification(points, pairs)
        >>> report["auc"], report["positives"], report["negatives"]
        (1.0, 2, 1)
    """
    checked = _rates(rates)
    if folds is not None and not isinstance(labels, Pairs):
        raise TypeError("folds are those of given pairs; labels must be Pairs")
    curve, similarity = compare_pairs(
        embeddings, labels, gallery, gallery_labels, measure=measure, memory_budget=memory_budget, progress=progress
    )
    report: dict[str, float] = {}
    for rate in checked:
        accepted, threshold = curve.at(rate)
        report |= {f"tar@{rate}": accepted, f"threshold@{rate}": threshold * curve.unit}
    report |= {"eer": curve.equal_error(), "auc": curve.area()}
    report |= {"positives": curve.positives, "negatives": curve.negatives}
    if similarity is not None and isinstance(labels, Pairs):
        turns = torch.arange(len(similarity)) % min(10, len(similarity))
        folds = turns if folds is None else as_labels("folds", folds, len(similarity)).cpu()
        report["accuracy"] = _accuracy(similarity.cpu(), labels.same.cpu(), folds)
    return report


def compare_pairs(
    embeddings: ArrayInput,
    labels: ArrayInput | Pairs,
    gallery: ArrayInput | None,
    gallery_labels: ArrayInput | None,
    *,
    measure: str,
    memory_budget: int | None,
    progress: Progress | None,
) -> tuple[RocCurve, Tensor | None]:
    """Return the ROC curve of the pairs of ``verification``, and the similarity of each pair if they are given."""
    if isinstance(labels, Supervision):
        if gallery_labels is not None:
            raise ValueError("gallery_labels is given, but the pairs say which items of the gallery are meant")
        queries, items, budget = as_points(embeddings, gallery, measure=measure, memory_budget=memory_budget)
        with full_precision(queries.array.device):
            return _curve_of_pairs(queries, items, labels, budget)
    inputs = as_query_gallery(embeddings, labels, gallery, gallery_labels, measure=measure, memory_budget=memory_budget)
    with full_precision(inputs.queries.array.device):
        return roc_curve(inputs, progress), None


def _accuracy(similarity: Tensor, same: Tensor, folds: Tensor) -> float:
    """Return the share of right judgments, each fold judged by the best threshold of the others."""
    right = 0
    for fold in torch.unique(folds):
        judged = folds == fold
        values, order = similarity[~judged].sort(stable=True)
        kinds = same[~judged][order].long()
        # Right judgments if the first k values are refused and the others accepted, for k = 0 … n.
        correct = torch.cat([kinds.new_zeros(1), (1 - 2 * kinds).cumsum(0)]) + kinds.sum()
        differs = torch.ones(len(correct), dtype=torch.bool)
        differs[1:-1] = values.diff() > 0  # no threshold separates equal values
        k = int(torch.where(differs, correct, -1).argmax())
        ends = torch.cat([values.new_tensor([-math.inf]), values, values.new_tensor([math.inf])])
        right += int(((similarity[judged] > (ends[k] + ends[k + 1]) / 2) == same[judged]).sum())
    return right / len(same)


class RocCurve(NamedTuple):
    """Numbers of accepted pairs at the similarity of each positive pair, in ascending order."""

    similarity: Tensor
    accepted: Tensor
    above: Tensor
    reached: Tensor
    positives: int
    negatives: int
    unit: float

    def at(self, rate: float) -> tuple[float, float]:
        """Return the true accept rate and the threshold at a false accept rate."""
        allowed = (self.reached.double() / self.negatives <= rate).nonzero()
        if not len(allowed):
            return 0.0, math.nan
        least = int(allowed[0])
        return int(self.accepted[least]) / self.positives, float(self.similarity[least])

    def equal_error(self) -> float:
        """Return the equal error rate."""
        # The highest threshold whose false accept rate is at least its false reject rate; it exists, since the lowest
        # one rejects no positive pair.
        k = int((self.reached.double() / self.negatives + self.accepted.double() / self.positives >= 1).sum()) - 1
        before = int(self.accepted[k + 1]) if k + 1 < len(self.accepted) else 0
        refused, then = 1 - before / self.positives, 1 - int(self.accepted[k]) / self.positives
        false, later = int(self.above[k]) / self.negatives, int(self.reached[k]) / self.negatives
        if false >= refused:  # the lines cross before this positive pair is accepted
            return refused
        return false + (later - false) * (refused - false) / (later - false + refused - then)

    def area(self) -> float:
        """Return the area under the curve: the fraction of positive-negative pairs of pairs in the right order."""
        times = self.accepted - torch.cat([self.accepted[1:], self.accepted.new_zeros(1)])
        twice = int((times * (self.above + self.reached)).sum())  # in the wrong order
        return (2 * self.positives * self.negatives - twice) / (2 * self.positives * self.negatives)


def roc_curve(inputs: QueryGallery, progress: Progress | None) -> RocCurve:
    """Count the accepted pairs at the similarity of each positive pair."""
    tiles = _tiles(inputs)
    mixed = [tile for tile in tiles if tile.mixed]
    total = len(mixed) + len(tiles)
    positives = [torch.empty(0, dtype=torch.float64, device=inputs.query_classes.device)]
    for done, tile in enumerate(mixed, start=1):
        positives.append(tile.pairs(same=True))
        if progress is not None:
            progress(done, total)
    if not any(len(values) for values in positives):
        where = (
            "the gallery has none of the queries' classes" if inputs.gallery is not None else "no class has two members"
        )
        raise ValueError(f"labels: {where}, so there is no pair to accept")

    def negatives() -> Iterator[Tensor]:
        for done, tile in enumerate(tiles, start=len(mixed) + 1):
            yield tile.pairs(same=False)
            if progress is not None:
                progress(done, total)

    positive = torch.cat(positives)
    positives.clear()
    curve = _count(positive, negatives(), inputs.queries)
    if not curve.negatives:
        raise ValueError("labels: all are of one class, so there is no pair to refuse")
    return curve


def _curve_of_pairs(queries: Points, items: Points | None, given: Supervision, budget: int) -> tuple[RocCurve, Tensor]:
    """Count the accepted pairs of those that are given, and return the similarity of each."""
    if not isinstance(given, Pairs) or given.others != "unknown":
        kind = f"a {type(given).__name__}" if not isinstance(given, Pairs) else "Pairs with others='negative'"
        raise TypeError(f"labels is {kind}; allowed are class labels, and Pairs whose others are unknown")
    gallery = queries if items is None else items
    for name, members, points in (("left", given.left, queries), ("right", given.right, gallery)):
        low, high, count = int(members.min()), int(members.max()), len(points.array)
        if low < 0 or high >= count:
            where = "embeddings" if points is queries else "gallery"
            raise ValueError(f"{name} ranges from {low} to {high}; {where} has {count} rows")
    similarity = _of_pairs(queries, gallery, given.left, given.right, budget)
    same = given.same.to(similarity.device)
    for needed, kind, purpose in ((same, "different", "accept"), (~same, "same", "refuse")):
        if not bool(needed.any()):
            raise ValueError(f"labels: all pairs are {kind}, so there is no pair to {purpose}")
    return _count(similarity[same], [similarity[~same]], queries), similarity


def _of_pairs(queries: Points, gallery: Points, left: Tensor, right: Tensor, budget: int) -> Tensor:
    """Return the similarity of each pair, some at a time."""
    step = max(1, budget // (64 * queries.array.shape[1]))
    parts = zip(*(torch.split(rows.to(queries.array.device), step) for rows in (left, right)), strict=True)
    similarity = torch.cat(
        [queries.similarity(queries.float64(first), gallery.float64(second)) for first, second in parts]
    )
    return similarity if queries.unit else -similarity.neg().sqrt()  # distances, not their squares


def _count(positive: Tensor, several: Iterable[Tensor], points: Points) -> RocCurve:
    """Count negative pairs, given in parts, at the similarity of each positive pair; the arguments are overwritten."""
    positive = _in_order(positive)
    positives, negatives = len(positive), 0
    slack = torch.full_like(positive, SAME) if points.unit else SAME * positive.abs()  # within which they are equal
    first = torch.ones_like(positive, dtype=torch.bool)  # of each run of equal similarities
    first[1:] = positive.diff() > 2 * slack[1:]
    start = first.nonzero().squeeze(1)
    similarity, slack = positive[start], slack[start]
    del positive, first
    low, high = similarity - slack, similarity + slack
    above, reached = torch.zeros_like(start), torch.zeros_like(start)
    for part in several:
        negative = _in_order(part)
        negatives += len(negative)
        above += len(negative) - torch.searchsorted(negative, high, right=True)
        reached += len(negative) - torch.searchsorted(negative, low)
    unit = 1.0 if points.unit else -1.0 / points.scale
    return RocCurve(similarity, positives - start, above, reached, positives, negatives, unit)


@dataclass
class _Block:
    """Some points, consecutive in the order of classes."""

    points: Points
    index: Tensor  # [b], indices of the points
    classes: Tensor  # [b], ascending
    span: tuple[int, int]  # the first and the last class
    kept: Tensor | None  # [b, d], in float64, if they fit into memory

    def float64(self) -> Tensor:
        return self.points.float64(self.index) if self.kept is None else self.kept


class _Tile(NamedTuple):
    """The pairs of two blocks, or of one."""

    rows: _Block
    columns: _Block

    @property
    def mixed(self) -> bool:
        """Whether it may contain positive pairs."""
        return self.rows.span[0] <= self.columns.span[1] and self.columns.span[0] <= self.rows.span[1]

    def pairs(self, *, same: bool) -> Tensor:
        """Return the similarities of positive pairs, or of negative pairs; each pair once."""
        similarity = pair_scores(self.rows.points, self.rows.float64(), self.columns.float64())
        if not self.mixed:
            return similarity.flatten()
        wanted = (self.rows.classes.unsqueeze(1) == self.columns.classes) == same
        return similarity[wanted.triu(1) if self.rows is self.columns else wanted]


def pair_scores(points: Points, left: Tensor, right: Tensor) -> Tensor:
    """Return the cosines of all rows with all others, or minus their distances in the scale of the points."""
    if points.unit:
        return left @ right.T
    # Matrix products would lose the digits of short distances.
    return torch.cdist(left, right, compute_mode="donot_use_mm_for_euclid_dist").neg_()


def _tiles(inputs: QueryGallery) -> list[_Tile]:
    """Return tiles with all pairs; without a gallery every two blocks once."""
    device, numbers = inputs.query_classes.device, inputs.queries.array.numel()
    if inputs.gallery is not None:
        numbers += inputs.gallery.array.numel()
    keeps = 8 * numbers <= inputs.budget // 2
    side = max(1, math.isqrt(inputs.budget // 64))
    side = min(side, CPU_SIDE) if device.type == "cpu" else side

    def blocks(points: Points, classes: Tensor) -> list[_Block]:
        parts = torch.split(torch.argsort(classes, stable=True), side)
        spans = [(int(classes[index[0]]), int(classes[index[-1]])) for index in parts]
        kept = [points.float64(index) if keeps else None for index in parts]
        return [_Block(points, *block) for block in zip(parts, [classes[i] for i in parts], spans, kept, strict=True)]

    rows = blocks(inputs.queries, inputs.query_classes)
    if inputs.gallery is None:
        return list(starmap(_Tile, combinations_with_replacement(rows, 2)))
    return list(starmap(_Tile, product(rows, blocks(inputs.gallery, inputs.gallery_classes))))


def _in_order(values: Tensor) -> Tensor:
    """Sort in ascending order; on a CPU in place."""
    if values.device.type == "cpu":  # NumPy sorts several times as fast
        values.numpy().sort()
        return values
    return values.sort().values


def _rates(rates: float | Sequence[float] | Array) -> list[float]:
    """Return the false accept rates as a list."""
    given = rates.tolist() if isinstance(rates, (Tensor, np.ndarray)) else rates
    checked = [number("rates", rate) for rate in (given if isinstance(given, Iterable) else (given,))]
    for rate in checked:
        if not 0 <= rate < 1:
            raise ValueError(f"rates contains {rate}; each rate must be ≥ 0 and < 1")
    return checked
