"""Changes of an index as records of its journal, and back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nearfar.search.items import Item
from nearfar.search.storage.journal import Record
from nearfar.search.storage.table import Vectors


@dataclass(frozen=True)
class Added:
    """New items.

    Args:
        vectors: [n, d].
        thumbnails: A JPEG for each, empty where there is none.
    """

    items: Sequence[Item]
    vectors: Vectors
    thumbnails: Sequence[bytes]

    def record(self) -> tuple[dict[str, Any], bytes]:
        header = {
            "do": "add",
            "dim": int(self.vectors.shape[1]),
            "items": [_plain(item) for item in self.items],
            "thumbnails": [len(picture) for picture in self.thumbnails],
        }
        return header, np.ascontiguousarray(self.vectors, dtype="<f4").tobytes() + b"".join(self.thumbnails)

    def places(self, offset: int) -> dict[int, tuple[int, int]]:
        """Offset and length of each thumbnail in the journal, by id, where the payload begins at ``offset``."""
        found, place = {}, offset + 4 * self.vectors.size
        for item, picture in zip(self.items, self.thumbnails, strict=True):
            if picture:
                found[item.id] = place, len(picture)
            place += len(picture)
        return found


@dataclass(frozen=True)
class Removed:
    """Items that are gone."""

    ids: Sequence[int]

    def record(self) -> tuple[dict[str, Any], bytes]:
        return {"do": "remove", "ids": list(self.ids)}, b""


@dataclass(frozen=True)
class Changed:
    """Items with another name, label or metadata."""

    items: Sequence[Item]

    def record(self) -> tuple[dict[str, Any], bytes]:
        return {"do": "change", "items": [_plain(item) for item in self.items]}, b""


Change = Added | Removed | Changed


def read(record: Record) -> Change:
    """The change that a record of the journal tells of."""
    header = record.header
    if header["do"] == "remove":
        return Removed([int(id) for id in header["ids"]])
    items = [Item(*words) for words in header["items"]]
    if header["do"] == "change":
        return Changed(items)
    size = 4 * header["dim"] * len(items)
    vectors = np.frombuffer(record.payload[:size], dtype="<f4").reshape(len(items), header["dim"]).astype(np.float32)
    return Added(items, vectors, list(_cut(record.payload[size:], header["thumbnails"])))


def _plain(item: Item) -> list[Any]:
    return [item.id, item.name, item.label, item.hash, dict(item.metadata)]


def _cut(data: bytes, lengths: Iterable[int]) -> Iterable[bytes]:
    place = 0
    for length in lengths:
        yield data[place : place + length]
        place += length
