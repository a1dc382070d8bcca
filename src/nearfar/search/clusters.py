"""Clusters of all items of an index."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from nearfar.metrics.kmeans import kmeans
from nearfar.search.items import Item
from nearfar.utils.progress import Watch, begin
from nearfar.utils.validation import whole

if TYPE_CHECKING:
    from nearfar.search.index import Index


@dataclass(frozen=True)
class Cluster:
    """Items of one cluster."""

    items: tuple[Item, ...]  # nearest to the center first
    label: str | None  # the most frequent class
    share: float | None  # of this class among the items with a class


@dataclass(frozen=True)
class Clusters:
    """All items of an index in clusters."""

    groups: tuple[Cluster, ...]  # largest first
    index: Index

    def __len__(self) -> int:
        return len(self.groups)

    @property
    def purity(self) -> float | None:
        """Share of the items with a class that have the most frequent class of their cluster."""
        known = [(sum(item.label is not None for item in group.items), group.share) for group in self.groups]
        total = sum(count for count, share in known if share is not None)
        return sum(count * share for count, share in known if share is not None) / total if total else None

    def assignment(self) -> dict[int, int]:
        """Return the number of each item's cluster, by id."""
        return {item.id: number for number, group in enumerate(self.groups) for item in group.items}


def find(index: Index, k: int | None = None, *, seed: int = 0, watch: Watch | None = None) -> Clusters:
    """Group all items with k-means; see ``Index.clusters``."""
    items, vectors = index.items, index.vectors()
    if not items:
        raise ValueError(f"{index.folder} is empty; it has no items to cluster")
    k = max(1, round(math.sqrt(len(items) / 2))) if k is None else whole("k", k, high=len(items))
    normalize, progress = index.measure == "cosine", begin(watch, "clustering")
    result = kmeans(np.asarray(vectors), k, restarts=1, seed=seed, normalize=normalize, progress=progress)
    centers, assignment = result.centers.cpu().numpy(), result.assignment.cpu().numpy()
    far = np.linalg.norm(np.asarray(vectors) - centers[assignment], axis=1)
    groups = []
    for number in range(k):
        rows = np.flatnonzero(assignment == number)
        members = tuple(items[row] for row in rows[np.argsort(far[rows], kind="stable")].tolist())
        if members:
            groups.append(Cluster(members, *_majority(members)))
    return Clusters(tuple(sorted(groups, key=lambda group: -len(group.items))), index)


def _majority(items: tuple[Item, ...]) -> tuple[str | None, float | None]:
    counts = Counter(item.label for item in items if item.label is not None)
    if not counts:
        return None, None
    label, count = min(counts.items(), key=lambda pair: (-pair[1], pair[0]))
    return label, count / sum(counts.values())
