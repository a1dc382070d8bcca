"""What lies in an index, kept ready for pages: classes, samples, and the map."""

from __future__ import annotations

import hashlib
import json
import random
import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from nearfar.search.items import Item
from nearfar.serve.protocols import Searchable

ALIGNED = 8  # bytes
MAGIC = b"NFMAP1\0\0"


class Catalogue:
    """The newest view of an index.

    Args:
        index: May be added to and removed from; ``changed`` has to be called then.
    """

    def __init__(self, index: Searchable) -> None:
        self._index = index
        self._lock = threading.Lock()
        self._revision = 0
        self._view: View | None = None

    def changed(self) -> None:
        with self._lock:
            self._revision += 1
            self._view = None

    def view(self) -> View:
        with self._lock:
            if self._view is None:
                self._view = View(self._index, self._index.items, self._revision)
            return self._view


@dataclass(frozen=True, eq=False)
class View:
    """An index between two changes."""

    index: Searchable
    items: Sequence[Item]
    revision: int

    @cached_property
    def version(self) -> str:
        """Tells this content from any other, also of other indices on the same address."""
        info = self.index.info()  # what it says of the model has its fingerprint
        facts = [str(info.get(key)) for key in ("built", "model")]
        last = self.items[-1].hash if self.items else ""
        words = json.dumps([*facts, len(self.items), last, self.revision])
        return hashlib.sha256(words.encode()).hexdigest()[:16]

    @cached_property
    def by_label(self) -> dict[str | None, list[int]]:
        """Places of the items of each class."""
        found: dict[str | None, list[int]] = {}
        for place, item in enumerate(self.items):
            found.setdefault(item.label, []).append(place)
        return found

    @cached_property
    def labels(self) -> list[str]:
        """All classes, in the order of people: 2 before 10."""
        return sorted((label for label in self.by_label if label is not None), key=_natural)

    def page(
        self, offset: int, limit: int, *, label: str | None = None, shuffle: int | None = None
    ) -> tuple[int, list[Item]]:
        """How many there are, and some of them; drawn at random with the seed ``shuffle`` if given."""
        places: Sequence[int] = range(len(self.items)) if label is None else self.by_label.get(label, [])
        total = len(places)
        if shuffle is not None:
            places = random.Random(shuffle).sample(places, min(limit, total))
        else:
            places = places[offset : offset + limit]
        return total, [self.items[place] for place in places]

    @cached_property
    def plane(self) -> bytes:
        """The map for the page: see ``packed``."""
        ids, points = self.index.plane("pca")
        # Others may have come or gone since the items were taken: only those are shown that have both.
        rows = {id: row for row, id in enumerate(ids.tolist())}
        shown = [item for item in self.items if item.id in rows]
        return packed(points[[rows[item.id] for item in shown]], shown, self.labels, self.version)


def packed(points: np.ndarray, items: Sequence[Item], labels: Sequence[str], version: str) -> bytes:
    """Points, ids and classes as bytes that a browser takes over without reading them one by one.

    Eight bytes ``NFMAP1``, the length of the header (uint32, little-endian) and four of nothing, the header as JSON
    filled up with spaces to a multiple of eight, then ids (uint32 [n]), classes (int32 [n], −1 for none) and points
    (float32 [n, 2]).

    >>> whole = packed(np.zeros((2, 2)), [Item(0, "a", "jay"), Item(4, "b")], ["jay"], "v")
    >>> length = int.from_bytes(whole[8:12], "little")
    >>> json.loads(whole[16 : 16 + length])["count"], np.frombuffer(whole[16 + length :][:8], "<u4").tolist()
    (2, [0, 4])
    """
    count = len(items)
    number = {label: place for place, label in enumerate(labels)}
    ids = np.fromiter((item.id for item in items), dtype="<u4", count=count)
    classes = np.fromiter((-1 if item.label is None else number[item.label] for item in items), "<i4", count)
    header = json.dumps({"count": count, "labels": list(labels), "version": version}).encode()
    header += b" " * (-len(header) % ALIGNED)
    plane = np.ascontiguousarray(points, dtype="<f4")
    return b"".join(
        [MAGIC, struct.pack("<II", len(header), 0), header, ids.tobytes(), classes.tobytes(), plane.tobytes()]
    )


def _natural(label: str) -> list[tuple[int, int, str]]:
    """Where a class stands in a list.

    >>> sorted(["b 10", "b 9", "a"], key=_natural)
    ['a', 'b 9', 'b 10']
    """
    parts: list[tuple[int, int, str]] = []
    digits = ""
    for letter in label.casefold() + "\0":
        if letter.isascii() and letter.isdigit():
            digits += letter
            continue
        if digits:
            parts.append((0, int(digits[:18]), digits))
            digits = ""
        parts.append((1, 0, letter))
    return parts
