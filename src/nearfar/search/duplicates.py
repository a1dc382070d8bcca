"""Groups of items that are nearly the same."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from scipy.cluster.hierarchy import DisjointSet

from nearfar.search.items import Item
from nearfar.search.storage import Vectors
from nearfar.utils.progress import Watch, begin
from nearfar.utils.tensors import full_precision
from nearfar.utils.validation import number

if TYPE_CHECKING:
    from nearfar.search.index import Index

TILE = 2048
ALL_PAIRS = 50_000  # up to this many items all pairs are compared; beyond, each item with its nearest
NEAREST = 20
MAX_PAIRS = 5_000_000

Pair = tuple[int, int, float]  # two rows, the lower first, and their cosine


@dataclass(frozen=True)
class DuplicateGroup:
    """Items that are connected by pairs of near duplicates."""

    items: tuple[Item, ...]
    similarity: float  # the lowest cosine of a connecting pair
    identical: bool  # all files


def find(index: Index, threshold: float, *, watch: Watch | None = None) -> list[DuplicateGroup]:
    """Find groups of near duplicates; see ``Index.near_duplicates``.

    All pairs are compared in an index of up to 50,000 items; beyond that, each item with its nearest 20.
    """
    number("threshold", threshold, low=0.0, high=1.0)
    items, vectors = index.items, index.vectors()
    groups = DisjointSet(range(len(items)))
    first: dict[str, int] = {}
    for row, item in enumerate(items):
        if item.hash:
            groups.merge(first.setdefault(item.hash, row), row)
    joining: list[tuple[int, float]] = []  # a row and the cosine of each pair that joined two groups
    pairs = _all_pairs if len(items) <= ALL_PAIRS else _nearest_pairs
    for count, (row, column, value) in enumerate(pairs(index, vectors, threshold, watch), start=1):
        if count > MAX_PAIRS:
            raise ValueError(f"threshold is {threshold}; more than {MAX_PAIRS:,} pairs are above it: use a higher one")
        if groups.merge(row, column):
            joining.append((row, value))
    lowest: dict[int, float] = {}
    for row, value in joining:
        lowest[groups[row]] = min(value, lowest.get(groups[row], 1.0))
    duplicates = []
    for rows in map(sorted, groups.subsets()):
        if len(rows) > 1:
            hashes = {items[row].hash for row in rows}
            same = len(hashes) == 1 and "" not in hashes
            similarity = 1.0 if same else lowest[groups[rows[0]]]
            duplicates.append(DuplicateGroup(tuple(items[row] for row in rows), similarity, same))
    return sorted(duplicates, key=lambda group: (-len(group.items), -group.similarity, group.items[0].id))


def _units(vectors: Vectors) -> torch.Tensor:
    return torch.nn.functional.normalize(torch.from_numpy(np.array(vectors)), dim=1)


def _all_pairs(index: Index, vectors: Vectors, threshold: float, watch: Watch | None) -> Iterator[Pair]:
    progress = begin(watch, "comparing")
    starts = range(0, len(vectors), TILE)
    total, done = len(starts) * (len(starts) + 1) // 2, 0
    for start in starts:
        rows = _units(vectors[start : start + TILE])
        for other in range(start, len(vectors), TILE):
            columns = rows if other == start else _units(vectors[other : other + TILE])
            with full_precision(rows.device):
                values = rows @ columns.T
            for row, column in (values >= threshold).nonzero().tolist():
                if start + row < other + column:
                    yield start + row, other + column, min(1.0, float(values[row, column]))
            done += 1
            progress(done, total)


def _nearest_pairs(index: Index, vectors: Vectors, threshold: float, watch: Watch | None) -> Iterator[Pair]:
    progress = begin(watch, "comparing")
    ids = np.array([item.id for item in index.items], dtype=np.int64)
    for start in range(0, len(vectors), 256):
        _, neighbors = index.nearest(vectors[start : start + 256], NEAREST + 1)
        for row, near in enumerate(neighbors, start=start):
            others = np.searchsorted(ids, near[near >= 0]).clip(max=len(ids) - 1)
            values = _units(vectors[others]) @ _units(vectors[row : row + 1])[0]
            for other, value in zip(others.tolist(), values.tolist(), strict=True):
                if value >= threshold and other != row:
                    yield min(row, other), max(row, other), min(1.0, value)
        progress(min(start + 256, len(vectors)), len(vectors))
