"""What a search found."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nearfar.search.items import Item

if TYPE_CHECKING:
    pass


@dataclass(frozen=True)
class Neighbour:
    """An item that was found, and how near it is."""

    item: Item
    score: float


@dataclass(frozen=True)
class Results(Sequence[Neighbour]):
    """A query and its neighbours, the nearest first.

    Parameters
        name        of the query.
        label       its class, where that is known.
        neighbours  what was found.
        pictures    thumbnails: of the query, and of each neighbour; empty where there is none.
    """

    name: str
    label: str | None
    neighbours: tuple[Neighbour, ...]
    pictures: tuple[bytes, ...] = ()

    def __len__(self) -> int:
        return len(self.neighbours)

    def __getitem__(self, place):  # type: ignore[no-untyped-def]
        return self.neighbours[place]

    def __iter__(self) -> Iterator[Neighbour]:
        return iter(self.neighbours)

    @property
    def ids(self) -> list[int]:
        return [each.item.id for each in self.neighbours]

    @property
    def names(self) -> list[str]:
        return [each.item.name for each in self.neighbours]

    @property
    def labels(self) -> list[str | None]:
        return [each.item.label for each in self.neighbours]

    @property
    def scores(self) -> list[float]:
        """Cosines, or minus the distances."""
        return [each.score for each in self.neighbours]

    @property
    def right(self) -> list[bool | None]:
        """Whether each neighbour is of the query's class; None where either has none."""
        return [None if None in (self.label, label) else label == self.label for label in self.labels]
