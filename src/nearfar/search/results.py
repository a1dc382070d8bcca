"""What a search found."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

from nearfar.search.items import Item
from nearfar.utils.atomic import write_text


@dataclass(frozen=True)
class Neighbour:
    """An item that was found, and how near it is."""

    item: Item
    score: float


@dataclass(frozen=True)
class Results(Sequence[Neighbour]):
    """A query and its neighbours, the nearest first.

    Args:
        name: Of the query.
        label: Its class, where that is known.
        neighbours: What was found.
        pictures: Thumbnails: of the query, and of each neighbour; empty where there is none.
    """

    name: str
    label: str | None
    neighbours: tuple[Neighbour, ...]
    pictures: tuple[bytes, ...] = ()

    def __len__(self) -> int:
        return len(self.neighbours)

    @overload
    def __getitem__(self, place: int) -> Neighbour: ...
    @overload
    def __getitem__(self, place: slice) -> tuple[Neighbour, ...]: ...
    def __getitem__(self, place: int | slice) -> Neighbour | tuple[Neighbour, ...]:
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

    def to_json(self) -> dict[str, Any]:
        """As JSON has it, without pictures."""
        return {
            "query": self.name,
            "label": self.label,
            "neighbours": [
                {
                    "id": each.item.id,
                    "name": each.item.name,
                    "label": each.item.label,
                    "score": each.score,
                    "right": right,
                    "metadata": dict(each.item.metadata),
                }
                for each, right in zip(self, self.right, strict=True)
            ],
        }

    def write(self, file: str | Path) -> None:
        """The query and its neighbours as a page (.html) or a picture (.png, .jpg, .webp), framed green and red."""
        write([self], file)


def write(found: Sequence[Results], file: str | Path) -> None:
    """Several queries and what they found, as a page or a picture, by the ending of the file's name."""
    from nearfar.reports import contact_sheet, search_pages

    file = Path(file)
    if file.suffix.lower() in (".html", ".htm"):
        write_text(file, search_pages.results_page(found))
    else:
        contact_sheet.write(found, file)
