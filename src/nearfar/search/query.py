"""From a query to results."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from nearfar.data.store.decode import BadImage
from nearfar.search.backends import NOTHING
from nearfar.search.encoder import Picture, thumbnail
from nearfar.search.filters import Where
from nearfar.search.items import MissingItem
from nearfar.search.reranking import RERANKINGS, expanded, k_reciprocal
from nearfar.search.results import Neighbour, Results
from nearfar.utils.validation import one_of, whole

if TYPE_CHECKING:
    from nearfar.search.lookup import Lookup

Query = Picture | int | NDArray[Any] | Tensor


def search(
    index: Lookup,
    query: Query,
    k: int,
    *,
    where: Where | None,
    expand: int,
    rerank: str | None,
    label: str | None,
) -> Results:
    """See ``Index.search``."""
    whole("k", k)
    whole("expand", expand, low=0)
    if rerank is not None:
        one_of("rerank", rerank, RERANKINGS)
    name, vector, own, picture, known = _read(index, query)
    allowed = None if where is None else index.select(where)
    point = vector[None]
    if expand:
        point = expanded(index, point, expand, allowed, own)
    spare = 0 if own is None else 1
    if rerank is None:
        scores, ids = index.nearest(point, k + spare, allowed=allowed)
    else:
        scores, ids = k_reciprocal(index, point, k, allowed=allowed, own=own)
    found: list[Neighbour] = []
    pictures = [picture]
    for id, score in zip(ids[0].tolist(), scores[0].tolist(), strict=True):
        if id in (NOTHING, own) or len(found) == k:
            continue
        try:
            item, small = index.item(id), index.thumbnail(id)
        except MissingItem:  # another thread has removed it since
            continue
        found.append(Neighbour(item, score))
        pictures.append(small)
    return Results(name, known if label is None else label, tuple(found), tuple(pictures))


def _read(index: Lookup, query: Query) -> tuple[str, NDArray[np.float32], int | None, bytes, str | None]:
    """Name, vector, id, thumbnail and label of a query."""
    if isinstance(query, (int, np.integer)) and not isinstance(query, bool):
        item = index.item(int(query))
        return item.name, index.vector(item.id), item.id, index.thumbnail(item.id), item.label
    if isinstance(query, Tensor):
        query = query.detach().cpu().numpy()
    if isinstance(query, np.ndarray) and query.dtype.kind == "f":
        if query.ndim != 1:
            raise ValueError(f"query has shape {query.shape}; needed is one vector [{index.dim}]")
        return "a vector", query.astype(np.float32), None, b"", None
    if isinstance(query, (str, Path)):
        file = Path(query)
        if not file.is_file():
            why = "that is no file" if file.exists() else "there is no such file"
            raise FileNotFoundError(f"query is {str(query)!r}; {why}")
        data = file.read_bytes()
        try:
            return file.name, index.embed([data])[0], None, thumbnail(data), None
        except BadImage as error:
            raise BadImage(f"{query}: {error}") from None
    if isinstance(query, (bytes, Image.Image)) or (isinstance(query, np.ndarray) and query.dtype == np.uint8):
        return "a picture", index.embed([query])[0], None, thumbnail(query), None
    raise TypeError(
        f"query is a {type(query).__name__}; needed is a path, a picture, a vector of floats, or the id of an item"
    )
