"""An audit of labeled images: duplicates, and images whose neighbors all have other classes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nearfar.search.duplicates import DuplicateGroup
from nearfar.search.items import Item
from nearfar.utils.progress import Watch, begin
from nearfar.utils.validation import whole

if TYPE_CHECKING:
    from nearfar.search.index import Index

TOGETHER = 256  # items whose neighbors are searched at once


@dataclass(frozen=True)
class Suspect:
    """An item whose nearest neighbors all have other classes."""

    item: Item
    neighbors: tuple[Item, ...]  # nearest first
    label: str  # the most frequent class among the neighbors
    share: float  # of this class


@dataclass(frozen=True)
class Audit:
    """What may be wrong with the images of an index."""

    index: Index
    duplicates: tuple[DuplicateGroup, ...]  # those with several classes first
    suspects: tuple[Suspect, ...]  # those whose neighbors agree most first


def audit(index: Index, *, k: int = 5, threshold: float = 0.95, watch: Watch | None = None) -> Audit:
    """Find duplicates, and images whose nearest neighbors all have other classes.

    Copies of an image do not count as its neighbors, and classes with one image are left out.
    """
    whole("k", k)
    groups = index.near_duplicates(threshold, watch=watch)
    copies = {item.id: {other.id for other in group.items} for group in groups for item in group.items}
    items, vectors, counts = index.items, index.vectors(), index.items.labels()
    progress = begin(watch, "neighbors")
    suspects: list[Suspect] = []
    for start in range(0, len(items), TOGETHER):
        part = items[start : start + TOGETHER]
        most = 1 + k + max(len(copies.get(item.id, ())) for item in part)
        _, neighbor_ids = index.nearest(vectors[start : start + TOGETHER], most)
        for item, ids in zip(part, neighbor_ids.tolist(), strict=True):
            if item.label is None or counts[item.label] < 2:
                continue
            known = [index.item(id) for id in ids if id >= 0 and id != item.id and id not in copies.get(item.id, ())]
            neighbors = tuple(other for other in known if other.label is not None)[:k]
            votes = Counter(str(other.label) for other in neighbors)
            if neighbors and item.label not in votes:
                label, count = votes.most_common(1)[0]
                suspects.append(Suspect(item, neighbors, label, count / len(neighbors)))
        progress(start + len(part), len(items))
    return Audit(
        index,
        tuple(sorted(groups, key=lambda group: -len({item.label for item in group.items}))),
        tuple(sorted(suspects, key=lambda suspect: (-suspect.share, suspect.item.id))),
    )
