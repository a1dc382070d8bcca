"""Results of a search: a query and its nearest items."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, overload

from nearfar.metrics.calibration import SearchThreshold, Threshold
from nearfar.search.items import Item


@dataclass(frozen=True, slots=True)
class Neighbor:
    """An item that a search returned.

    Args:
        item: The item.
        score: Its cosine with the query, or minus its distance. Higher is nearer.

    Example:
        >>> Neighbor(Item(3, "a.jpg"), 0.9).item.name
        'a.jpg'
    """

    item: Item
    score: float


@dataclass(frozen=True)
class Results(Sequence[Neighbor]):
    """A query and its neighbors, the nearest first.

    Args:
        name: Name of the query.
        label: Class of the query, if known.
        neighbors: The items that were found.
        pictures: JPEG thumbnails of the query and of each neighbor; empty bytes where there is none.
        threshold: The score from which on a neighbor matches; None if it is not known, or if scores are no
            similarities of the query, as after re-ranking.

    Example:
        >>> found = Results("query.jpg", "jay", (Neighbor(Item(3, "a.jpg", "wren"), 0.9),))
        >>> found.names, found.scores, found.right
        (['a.jpg'], [0.9], [False])
    """

    name: str
    label: str | None
    neighbors: tuple[Neighbor, ...]
    pictures: tuple[bytes, ...] = ()
    threshold: Threshold | SearchThreshold | None = None

    def __len__(self) -> int:
        return len(self.neighbors)

    @overload
    def __getitem__(self, place: int) -> Neighbor: ...
    @overload
    def __getitem__(self, place: slice) -> tuple[Neighbor, ...]: ...
    def __getitem__(self, place: int | slice) -> Neighbor | tuple[Neighbor, ...]:
        return self.neighbors[place]

    def __iter__(self) -> Iterator[Neighbor]:
        return iter(self.neighbors)

    @property
    def ids(self) -> list[int]:
        """Ids of the neighbors."""
        return [neighbor.item.id for neighbor in self.neighbors]

    @property
    def names(self) -> list[str]:
        """Names of the neighbors."""
        return [neighbor.item.name for neighbor in self.neighbors]

    @property
    def labels(self) -> list[str | None]:
        """Classes of the neighbors; None for an item without a class."""
        return [neighbor.item.label for neighbor in self.neighbors]

    @property
    def scores(self) -> list[float]:
        """Cosines, or minus the distances."""
        return [neighbor.score for neighbor in self.neighbors]

    @property
    def right(self) -> list[bool | None]:
        """Whether each neighbor has the query's class; None if the class of either is unknown."""
        return [None if None in (self.label, label) else label == self.label for label in self.labels]

    @property
    def matches(self) -> list[bool | None]:
        """Whether each neighbor matches the query; None without a threshold."""
        return [None if self.threshold is None else self.threshold.matches(score) for score in self.scores]

    @property
    def unknown(self) -> bool | None:
        """Whether no item matches, so that the query is of no class of the index; None without a threshold."""
        return None if self.threshold is None else True not in self.matches

    def to_json(self) -> dict[str, Any]:
        """The results as JSON-compatible data, without the thumbnails."""
        return {
            "query": self.name,
            "label": self.label,
            "unknown": self.unknown,
            "threshold": None if self.threshold is None else self.threshold.to_json(),
            "neighbors": [
                {
                    "id": neighbor.item.id,
                    "name": neighbor.item.name,
                    "label": neighbor.item.label,
                    "score": neighbor.score,
                    "right": right,
                    "match": match,
                    "metadata": dict(neighbor.item.metadata),
                }
                for neighbor, right, match in zip(self, self.right, self.matches, strict=True)
            ],
        }
