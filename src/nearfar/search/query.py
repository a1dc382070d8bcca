"""Queries: from an image, a vector or the id of an item to its neighbors.

Python (``Index.search``), the command line and the HTTP server all search through this module. ``search`` answers one
query of any kind. ``search_batch`` answers queries whose vectors are already known, and searches the index once for all
that share a filter.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from nearfar.data.store.decode import BadImage
from nearfar.search.encoder import ImageInput
from nearfar.search.filters import Where
from nearfar.search.reranking import RERANKINGS, expanded, k_reciprocal
from nearfar.search.results import Neighbor, Results
from nearfar.utils.validation import one_of, whole

if TYPE_CHECKING:
    from nearfar.search.index import Index

QueryInput = ImageInput | int | NDArray[Any] | Tensor  # an image, the id of an item, or a vector


@dataclass(frozen=True, kw_only=True)
class VectorQuery:
    """A query whose vector is known.

    Args:
        vector: The vector [d].
        k: Number of neighbors.
        where: Only items that pass this filter, such as ``{"label": "jay", "year": {">=": 2019}}``.
        expand: Search again with the mean of the query and this many of its neighbors.
        rerank: "k_reciprocal" ranks items first that would find the query in turn.
        exclude: Id of an item to leave out, usually the one that the vector belongs to.

    Example:
        >>> VectorQuery(vector=np.array([1.0, 0.0]), k=3).rerank is None
        True
    """

    vector: NDArray[Any]
    k: int = 10
    where: Where | None = None
    expand: int = 0
    rerank: str | None = None
    exclude: int | None = None

    def __post_init__(self) -> None:
        whole("k", self.k)
        whole("expand", self.expand, low=0)
        if self.rerank is not None:
            one_of("rerank", self.rerank, RERANKINGS)


def search(
    index: Index,
    query: QueryInput,
    k: int = 10,
    *,
    where: Where | None = None,
    expand: int = 0,
    rerank: str | None = None,
    label: str | None = None,
) -> Results:
    """Find the items nearest to one query; see ``Index.search``.

    Args:
        index: The index to search.
        query: A path, the bytes of an image file, a Pillow image, uint8 pixels, a vector, or the id of an item.
        k: Number of neighbors.
        where: Only items that pass this filter.
        expand: Search again with the mean of the query and this many of its neighbors.
        rerank: "k_reciprocal", or None.
        label: Class of the query; by default that of the item, for a query by id.

    Returns:
        The query with its neighbors and their thumbnails.
    """
    name, vector, own, picture, known = _read(index, query)
    wanted = VectorQuery(vector=vector, k=k, where=where, expand=expand, rerank=rerank, exclude=own)
    (found,) = search_batch(index, [wanted])
    thumbnails = index.thumbnails([each.item.id for each in found])
    neighbors = tuple(each for each in found if each.item.id in thumbnails)  # others were removed in the meantime
    pictures = (picture, *(thumbnails[each.item.id] for each in neighbors))
    return Results(name, known if label is None else label, neighbors, pictures)


def search_batch(index: Index, queries: Sequence[VectorQuery]) -> list[list[Neighbor]]:
    """Find the neighbors of each query. Queries with equal filters share one search of the index.

    Args:
        index: The index to search.
        queries: Queries with known vectors; each has its own settings.

    Returns:
        The neighbors of each query, nearest first; fewer than k where the index or the filter has no more.
    """
    groups: dict[str, list[int]] = defaultdict(list)
    for place, query in enumerate(queries):
        groups[repr(query.where)].append(place)
    answers: list[list[Neighbor]] = [[] for _ in queries]
    for places in groups.values():
        where = queries[places[0]].where
        allowed = None if where is None else index.select(where)
        plain = [place for place in places if queries[place].rerank is None]
        if plain:
            rows = [_expanded(index, queries[place], allowed) for place in plain]
            points = rows[0][None] if len(rows) == 1 else np.stack(rows)
            most = max(queries[place].k + (queries[place].exclude is not None) for place in plain)
            scores, ids = index.nearest(points, most, allowed=allowed)
            for row, place in enumerate(plain):
                answers[place] = _neighbors(index, queries[place], scores[row], ids[row])
        for place in places:
            query = queries[place]
            if query.rerank is not None:
                point = _expanded(index, query, allowed)[None]
                scores, ids = k_reciprocal(index, point, query.k, allowed=allowed, exclude=query.exclude)
                answers[place] = _neighbors(index, query, scores[0], ids[0])
    return answers


def _expanded(index: Index, query: VectorQuery, allowed: NDArray[np.int64] | None) -> NDArray[Any]:
    if not query.expand:
        return query.vector
    found: NDArray[np.float32] = expanded(index, query.vector[None], query.expand, allowed, query.exclude)[0]
    return found


def _neighbors(index: Index, query: VectorQuery, scores: NDArray[np.float32], ids: NDArray[np.int64]) -> list[Neighbor]:
    """The items of the first k ids, without the excluded one and any that were removed in the meantime."""
    numbers = ids.tolist()
    items = index.storage.loaded.existing(numbers)
    pairs = zip(numbers, scores.tolist(), strict=True)
    found = [Neighbor(items[id], score) for id, score in pairs if id in items and id != query.exclude]
    return found[: query.k]


def _read(index: Index, query: QueryInput) -> tuple[str, NDArray[np.float32], int | None, bytes, str | None]:
    """Name, vector, item id, thumbnail and label of a query."""
    if isinstance(query, (int, np.integer)) and not isinstance(query, bool):
        table = index.storage.table
        item = table.item(int(query))
        picture = index.thumbnails([item.id]).get(item.id, b"")
        return item.name, table.vector(item.id), item.id, picture, item.label
    if isinstance(query, Tensor):
        query = query.detach().cpu().numpy()
    if isinstance(query, np.ndarray) and query.dtype.kind == "f":
        if query.ndim != 1:
            raise ValueError(f"query has shape {query.shape}; it must be one vector [{index.dim}]")
        return "a vector", query.astype(np.float32), None, b"", None
    if isinstance(query, (str, Path)):
        file = Path(query)
        if not file.is_file():
            reason = "that is not a file" if file.exists() else "there is no such file"
            raise FileNotFoundError(f"query is {str(query)!r}; {reason}")
        data = file.read_bytes()
        try:
            vector, picture = index.encoder.encode_with_thumbnail(data)
        except BadImage as error:
            raise BadImage(f"{query}: {error}") from None
        return file.name, vector, None, picture, None
    if isinstance(query, (bytes, Image.Image)) or (isinstance(query, np.ndarray) and query.dtype == np.uint8):
        vector, picture = index.encoder.encode_with_thumbnail(query)
        return "an image", vector, None, picture, None
    raise TypeError(
        f"query is a {type(query).__name__}; it must be a path, an image, a vector of floats, or the id of an item"
    )
