"""What lies in an index, and what a search gives back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, overload

from nearfar.utils.validation import nearest


@dataclass(frozen=True, slots=True)
class Item:
    """Something that can be found.

    Args:
        id: Its number; never given to anything else.
        name: The path of the picture, relative to the folder that was indexed, or whatever it was called.
        label: Its class, where one is known.
        hash: SHA-256 of the picture's file; empty where there was none.
        metadata: Whatever else is known of it, to filter by.
    """

    id: int
    name: str
    label: str | None = None
    hash: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)


class Hit(NamedTuple):
    """An item that was found: a cosine, or minus a distance. The greater, the nearer."""

    id: int
    score: float


class Items(Sequence[Item]):
    """The items of an index as they were when asked for, in the order of their numbers."""

    def __init__(self, items: Sequence[Item]) -> None:
        self._items = tuple(items)
        self._labels: dict[str, int] | None = None

    @overload
    def __getitem__(self, place: int) -> Item: ...
    @overload
    def __getitem__(self, place: slice) -> Items: ...
    def __getitem__(self, place: int | slice) -> Item | Items:
        return Items(self._items[place]) if isinstance(place, slice) else self._items[place]

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Item]:
        return iter(self._items)

    def __repr__(self) -> str:
        return f"<{len(self)} items>"

    def labels(self) -> dict[str, int]:
        """How many there are of each class, the most frequent first.

        >>> Items([Item(0, "a", "jay"), Item(1, "b", "wren"), Item(2, "c", "wren"), Item(3, "d")]).labels()
        {'wren': 2, 'jay': 1}
        """
        if self._labels is None:
            counts = Counter(item.label for item in self._items if item.label is not None)
            self._labels = dict(sorted(counts.items(), key=lambda pair: (-pair[1], pair[0])))
        return dict(self._labels)


def missing(id: int, count: int) -> KeyError:
    """The error for a number that is not there."""
    return MissingItem(f"id is {id}; the index has no such item among its {count:,}")


class MissingItem(KeyError):
    """An id that is not in the index."""

    def __str__(self) -> str:  # KeyError shows its message in quotes
        return str(self.args[0])


FIELDS = ("id", "name", "label", "hash")


def value_of(item: Item, key: str) -> Any:
    """A field of an item or something of its metadata; None where it has none."""
    return getattr(item, key) if key in FIELDS else item.metadata.get(key)


def check_keys(items: Sequence[Item], keys: Sequence[str]) -> None:
    """That filters ask for something that at least one item has."""
    for key in keys:
        if key in FIELDS or any(key in item.metadata for item in items):
            continue
        known = sorted({*FIELDS, *(name for item in items for name in item.metadata)})
        raise ValueError(f"where has {key!r}{nearest(key, known)}; items have {', '.join(known)}")
