"""Views of an index that pages need: classes, pages of items, and the map."""

from __future__ import annotations

import json
import random
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from nearfar.search.items import Item

if TYPE_CHECKING:
    from nearfar.search import Index

ALIGNED = 8  # bytes
MAGIC = b"NFMAP1\0\0"


@dataclass(frozen=True, eq=False)
class Snapshot:
    """An index between two changes."""

    index: Index
    items: Sequence[Item]
    version: str  # the same in all servers of this content

    @cached_property
    def by_label(self) -> dict[str | None, list[int]]:
        """Positions of the items of each class."""
        found: dict[str | None, list[int]] = {}
        for position, item in enumerate(self.items):
            found.setdefault(item.label, []).append(position)
        return found

    @cached_property
    def labels(self) -> list[str]:
        """All classes in natural order: "b 9" before "b 10"."""
        return sorted((label for label in self.by_label if label is not None), key=_natural_key)

    def page(
        self, offset: int, limit: int, *, label: str | None = None, shuffle: int | None = None
    ) -> tuple[int, list[Item]]:
        """Return one page of items."""
        positions: Sequence[int] = range(len(self.items)) if label is None else self.by_label.get(label, [])
        total = len(positions)
        if shuffle is not None:
            positions = random.Random(shuffle).sample(positions, min(limit, total))
        else:
            positions = positions[offset : offset + limit]
        return total, [self.items[position] for position in positions]

    @cached_property
    def map(self) -> bytes:
        """The map of all items, see ``encode_map``."""
        ids, points = self.index.map_with_ids("pca")
        # Items may have been added or removed since the snapshot: only those in both are shown.
        rows = {id: row for row, id in enumerate(ids.tolist())}
        shown = [item for item in self.items if item.id in rows]
        return encode_map(points[[rows[item.id] for item in shown]], shown, self.labels, self.version)


def encode_map(points: np.ndarray, items: Sequence[Item], labels: Sequence[str], version: str) -> bytes:
    """Encode points, ids and classes as bytes that a browser can read as typed arrays.

    The format is: eight bytes ``NFMAP1``, the length of the header (uint32, little-endian), four zero bytes, the
    header as JSON padded with spaces to a multiple of eight, then ids (uint32 [n]), classes (int32 [n], −1 for none)
    and points (float32 [n, 2]).
    """
    count = len(items)
    number = {label: position for position, label in enumerate(labels)}
    ids = np.fromiter((item.id for item in items), dtype="<u4", count=count)
    classes = np.fromiter((-1 if item.label is None else number[item.label] for item in items), "<i4", count)
    header = json.dumps({"count": count, "labels": list(labels), "version": version}).encode()
    header += b" " * (-len(header) % ALIGNED)
    positions = np.ascontiguousarray(points, dtype="<f4")
    return b"".join(
        [MAGIC, struct.pack("<II", len(header), 0), header, ids.tobytes(), classes.tobytes(), positions.tobytes()]
    )


def _natural_key(label: str) -> list[Any]:
    """Return a sort key that compares numbers within a text by value."""
    parts = re.split(r"(\d+)", label.casefold())
    return [(int(part[:18]), part) if place % 2 else part for place, part in enumerate(parts)]
