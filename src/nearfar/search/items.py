"""Items of an index and search hits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, overload

from nearfar.utils.validation import nearest


@dataclass(frozen=True, slots=True)
class Item:
    """One entry of an index.

    Args:
        id: Its number; never reused.
        name: Path of the image relative to the indexed folder, or any other name.
        label: Its class, if known.
        hash: SHA-256 of the image file; empty for a vector.
        metadata: Additional data to filter by.

    Example:
        >>> Item(0, "jay/1.jpg", "jay", metadata={"year": 2019}).label
        'jay'
    """

    id: int
    name: str
    label: str | None = None
    hash: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)


class Hit(NamedTuple):
    """Id and score of an item that was found.

    Attributes:
        id: Id of the item.
        score: A cosine, or minus a distance. Higher is nearer.
    """

    id: int
    score: float


class Items(Sequence[Item]):
    """An immutable list of items, ordered by id.

    Args:
        items: The items.
    """

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
        """Return the number of items of each class, most frequent first.

        Example:
            >>> Items([Item(0, "a", "jay"), Item(1, "b", "wren"), Item(2, "c", "wren"), Item(3, "d")]).labels()
            {'wren': 2, 'jay': 1}
        """
        if self._labels is None:
            counts = Counter(item.label for item in self._items if item.label is not None)
            self._labels = dict(sorted(counts.items(), key=lambda pair: (-pair[1], pair[0])))
        return dict(self._labels)


class MissingItem(KeyError):
    """An id that is not in the index."""

    def __str__(self) -> str:  # KeyError quotes its message
        return str(self.args[0])


FIELDS = ("id", "name", "label", "hash")


def value_of(item: Item, key: str) -> Any:
    """Return a field of an item or an entry of its metadata; None if there is none."""
    return getattr(item, key) if key in FIELDS else item.metadata.get(key)


def check_keys(items: Sequence[Item], keys: Sequence[str]) -> None:
    """Raise ValueError if a filter uses a key that no item has."""
    for key in keys:
        if key in FIELDS or any(key in item.metadata for item in items):
            continue
        known = sorted({*FIELDS, *(name for item in items for name in item.metadata)})
        raise ValueError(f"where has {key!r}{nearest(key, known)}; items have {', '.join(known)}")
