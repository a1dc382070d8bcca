"""Verification: are two images of one class? All pairs, judged by a threshold of their similarity.

Everything follows from how many negative pairs are more similar than each positive one, and how many are equally
similar. So the similarities of the positive pairs are kept, in order. Those of the negative ones are computed tile by
tile, sorted, compared with them, counted, and forgotten.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from nearfar.metrics.points import SAME, Points, Sides, as_sides
from nearfar.utils.inputs import Array
from nearfar.utils.precision import full_precision
from nearfar.utils.progress import Progress
from nearfar.utils.validation import number

CPU_SIDE = 2048  # rows and columns of a tile


@torch.no_grad()
def verification(
    embeddings: Array,
    labels: Array,
    gallery: Array | None = None,
    gallery_labels: Array | None = None,
    *,
    rates: float | Sequence[float] | Array = (1e-2, 1e-3),
    measure: str = "cosine",
    memory_budget: int | None = None,
    progress: Progress | None = None,
) -> dict[str, float]:
    """How well a threshold tells pairs of one class from the others, exactly.

    Every two embeddings are a pair, or every query with every item of a gallery. A pair is accepted if it is at
    least as similar as a threshold. Nothing is sampled. Similarities closer than 1e-12 are equal.

    Args:
        embeddings: [m, d], tensor, NumPy array or memory map; 16, 32 or 64 bits. The work is done on its device.
        labels: [m], whole numbers (NumPy arrays also hold words).
        gallery, gallery_labels: [n, d] and [n], what to pair embeddings with instead of each other.
        rates: Shares of the negative pairs that may be accepted, each ≥ 0 and < 1, or one such share.
        measure: "cosine" or "euclidean".
        memory_budget: Bytes for tiles; unless told 256 MiB, or 2 GiB of a GPU that has them free. Positive pairs
            take up to 100 bytes each beside that.
        progress: Called with (steps done, steps in all).

    Returns:
        tar@rate: True accept rate: the share of positive pairs that the lowest threshold accepts which accepts no
            more than this share of the negative ones. Nothing is interpolated.
        threshold@rate: That threshold, the least similarity of a positive pair that is accepted, or the greatest
            distance; NaN where none can be.
        eer: Equal error rate: where the share of negative pairs accepted is that of positive pairs refused, on the
            ROC curve. Its points are joined by straight lines.
        auc: Area under that curve: how often a positive pair is more similar than a negative one; equal ones count
            half.
        positives, negatives: How many pairs there are.

    >>> points = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0], [0.6, 0.8]])
    >>> found = verification(points, torch.tensor([0, 0, 1, 1]), rates=(0.25,))
    >>> found["tar@0.25"], round(found["threshold@0.25"], 6), found["eer"], found["auc"]
    (1.0, 0.8, 0.25, 0.75)
    """
    shares = _shares(rates)
    sides = as_sides(embeddings, labels, gallery, gallery_labels, measure=measure, memory_budget=memory_budget)
    with full_precision(sides.query_classes.device):
        curve = _curve(sides, progress)
    unit = 1.0 if measure == "cosine" else -1.0 / sides.queries.scale  # a distance is a similarity below 0
    found: dict[str, float] = {}
    for share in shares:
        accepted, threshold = curve.at(share)
        found |= {f"tar@{share}": accepted, f"threshold@{share}": threshold * unit}
    found |= {"eer": curve.equal_error(), "auc": curve.area()}
    return {**found, "positives": curve.positives, "negatives": curve.negatives}


class Curve(NamedTuple):
    """The ROC curve: what is accepted at the similarity of each positive pair, the least similar first."""

    similarity: Tensor  # [k], all different
    accepted: Tensor  # [k], how many positive pairs are at least as similar
    above: Tensor  # [k], how many negative ones are more similar
    reached: Tensor  # [k], how many negative ones are at least as similar
    positives: int
    negatives: int

    def at(self, rate: float) -> tuple[float, float]:
        """The share of positive pairs accepted at a share of negative ones, and the threshold."""
        allowed = (self.reached.double() / self.negatives <= rate).nonzero()
        if not len(allowed):
            return 0.0, math.nan
        least = int(allowed[0])
        return int(self.accepted[least]) / self.positives, float(self.similarity[least])

    def equal_error(self) -> float:
        """Where it meets the line of as many errors of either kind."""
        # The strictest threshold with no fewer negative pairs accepted than positive ones refused: k is there, since
        # the lowest one refuses none.
        k = int((self.reached.double() / self.negatives + self.accepted.double() / self.positives >= 1).sum()) - 1
        before = int(self.accepted[k + 1]) if k + 1 < len(self.accepted) else 0
        refused, then = 1 - before / self.positives, 1 - int(self.accepted[k]) / self.positives
        false, later = int(self.above[k]) / self.negatives, int(self.reached[k]) / self.negatives
        if false >= refused:  # before this positive pair is accepted
            return refused
        return false + (later - false) * (refused - false) / (later - false + refused - then)

    def area(self) -> float:
        """The share of pairs of pairs, one positive and one negative, that are in order."""
        times = self.accepted - torch.cat([self.accepted[1:], self.accepted.new_zeros(1)])
        twice = int((times * (self.above + self.reached)).sum())  # those in disorder
        return (2 * self.positives * self.negatives - twice) / (2 * self.positives * self.negatives)


def _curve(sides: Sides, progress: Progress | None) -> Curve:
    tiles = _tiles(sides)
    mixed = [tile for tile in tiles if tile.mixed]
    total = len(mixed) + len(tiles)
    found = [torch.empty(0, dtype=torch.float64, device=sides.query_classes.device)]
    for done, tile in enumerate(mixed, start=1):
        found.append(tile.pairs(same=True))
        if progress is not None:
            progress(done, total)
    positive = _in_order(torch.cat(found))
    positives, negatives = len(positive), 0
    if not positives:
        where = (
            "the gallery has none of the queries' classes" if sides.gallery is not None else "no class has two members"
        )
        raise ValueError(f"labels: {where}, so there is no pair to accept")
    found.clear()
    similarity, start = _different(positive, sides.queries.unit)
    del positive
    slack = _slack(similarity, sides.queries.unit)
    low, high = similarity - slack, similarity + slack
    above, reached = torch.zeros_like(start), torch.zeros_like(start)
    for done, tile in enumerate(tiles, start=len(mixed) + 1):
        negative = _in_order(tile.pairs(same=False))
        negatives += len(negative)
        above += len(negative) - torch.searchsorted(negative, high, right=True)
        reached += len(negative) - torch.searchsorted(negative, low)
        if progress is not None:
            progress(done, total)
    if not negatives:
        raise ValueError("labels: all are of one class, so there is no pair to refuse")
    return Curve(similarity, positives - start, above, reached, positives, negatives)


def _slack(similarity: Tensor, unit: bool) -> Tensor:
    """How far an equal similarity may be."""
    return torch.full_like(similarity, SAME) if unit else SAME * similarity.abs()


def _different(ordered: Tensor, unit: bool) -> tuple[Tensor, Tensor]:
    """The first of those that are equal but for rounding, and its place."""
    first = torch.ones_like(ordered, dtype=torch.bool)
    first[1:] = ordered.diff() > 2 * _slack(ordered[1:], unit)
    start = first.nonzero().squeeze(1)
    return ordered[start], start


@dataclass
class _Block:
    """Some points, neighbours in the order of classes."""

    points: Points
    index: Tensor  # [b], which points they are
    classes: Tensor  # [b], ascending
    span: tuple[int, int]  # the first and the last class
    kept: Tensor | None  # [b, d], in float64, where there is room

    def exact(self) -> Tensor:
        return self.points.exact(self.index) if self.kept is None else self.kept


class _Tile(NamedTuple):
    """The pairs of two blocks, or of one."""

    rows: _Block
    columns: _Block

    @property
    def mixed(self) -> bool:
        """Whether positive pairs may be among them."""
        return self.rows.span[0] <= self.columns.span[1] and self.columns.span[0] <= self.rows.span[1]

    def pairs(self, *, same: bool) -> Tensor:
        """The similarities of the pairs of one class, or of the others; each pair once."""
        one, other = self.rows.exact(), self.columns.exact()
        if self.rows.points.unit:
            similarity = one @ other.T
        else:  # products would lose the digits of short distances
            similarity = torch.cdist(one, other, compute_mode="donot_use_mm_for_euclid_dist").neg_()
        if not self.mixed:
            return similarity.flatten()
        wanted = (self.rows.classes.unsqueeze(1) == self.columns.classes) == same
        return similarity[wanted.triu(1) if self.rows is self.columns else wanted]


def _tiles(sides: Sides) -> list[_Tile]:
    """All pairs; where embeddings are paired with each other, every two blocks once."""
    device, numbers = sides.query_classes.device, sides.queries.array.numel()
    if sides.gallery is not None:
        numbers += sides.gallery.array.numel()
    keeps = 8 * numbers <= sides.budget // 2
    side = max(1, math.isqrt(sides.budget // 64))
    side = min(side, CPU_SIDE) if device.type == "cpu" else side

    def blocks(points: Points, classes: Tensor) -> list[_Block]:
        parts = torch.split(torch.argsort(classes, stable=True), side)
        spans = [(int(classes[index[0]]), int(classes[index[-1]])) for index in parts]
        kept = [points.exact(index) if keeps else None for index in parts]
        return [_Block(points, *each) for each in zip(parts, [classes[i] for i in parts], spans, kept, strict=True)]

    rows = blocks(sides.queries, sides.query_classes)
    if sides.gallery is None:
        return [_Tile(one, other) for place, one in enumerate(rows) for other in rows[place:]]
    columns = blocks(sides.gallery, sides.gallery_classes)
    return [_Tile(one, other) for one in rows for other in columns]


def _in_order(values: Tensor) -> Tensor:
    """The least first; on a CPU in place."""
    if values.device.type == "cpu":  # NumPy sorts several times as fast
        values.numpy().sort()
        return values
    return values.sort().values


def _shares(rates: float | Sequence[float] | Array) -> list[float]:
    """The shares of negative pairs that may be accepted, however they are given."""
    given = rates.tolist() if isinstance(rates, (Tensor, np.ndarray)) else rates
    shares = [number("rates", rate) for rate in (given if isinstance(given, Iterable) else (given,))]
    for share in shares:
        if not 0 <= share < 1:
            raise ValueError(f"rates contains {share}; needed are numbers of at least 0 and below 1")
    return shares
