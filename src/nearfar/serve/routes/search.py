"""Routes that search by image, by item and by vector."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple

import numpy as np
from fastapi import APIRouter, Depends, File, Query, Request, UploadFile

from nearfar.metrics.retrieval import RERANKINGS
from nearfar.search.filters import combine, parse
from nearfar.search.index import VectorQuery
from nearfar.serve.batching import ServerBusy
from nearfar.serve.errors import ApiError, error_responses
from nearfar.serve.routes import API
from nearfar.serve.routes.items import ItemId
from nearfar.serve.schemas import HitOut, ItemOut, SearchResponse, VectorSearchRequest
from nearfar.serve.security import client_of
from nearfar.serve.state import ServerState, Vector

DEFAULT_K = 24
MAX_CONDITIONS, MAX_ALTERNATIVES = 20, 1_000  # of a filter

LABEL = Query(None, max_length=200, description="Search among items of this class only.")
WHERE = Query(
    None,
    max_length=MAX_CONDITIONS,
    description="Search among items that meet this condition on label, name or metadata only: label=jay, "
    "label!=jay,wren, year>=2019, name~garden/*. Repeatable; all conditions must be met.",
)
RERANK = Query(
    None,
    json_schema_extra={"enum": list(RERANKINGS)},
    description="k_reciprocal ranks items first that would find the query in turn.",
)


class SearchSettings(NamedTuple):
    """Settings that all searches share."""

    k: int
    where: Mapping[str, Any] | None
    expand: int
    rerank: str | None
    began: float
    identity: str
    client: str


def vector_bytes(dim: int) -> int:
    """Return the size of a request for a search by vector, with room for all digits of each number and some more."""
    return 65_536 + 32 * dim


def router(state: ServerState) -> APIRouter:
    """Create the routes for searching."""
    routes = APIRouter(prefix=f"{API}/search", tags=["search"])
    most = state.limits.neighbors

    async def read_settings(
        request: Request,
        k: int = Query(min(DEFAULT_K, most), ge=1, le=most, description="Number of items to find."),
        label: str | None = LABEL,
        where: list[str] | None = WHERE,
        expand: int = Query(
            0, ge=0, le=most, description="Search again with the mean of the query and this many of its neighbors."
        ),
        rerank: str | None = RERANK,
    ) -> SearchSettings:
        began, identity, client = time.perf_counter(), state.index.identity, client_of(request.scope)
        if rerank not in (None, *RERANKINGS):
            raise ApiError(422, f"rerank is {rerank!r}; allowed are {', '.join(RERANKINGS)}")
        if not where and label is None:
            return SearchSettings(k, None, expand, rerank, began, identity, client)
        if sum(text.count(",") + 1 for text in where or ()) > MAX_ALTERNATIVES:
            raise ApiError(422, f"where has more than {MAX_ALTERNATIVES:,} alternatives, which is the most")

        def select() -> Mapping[str, Any]:
            if label is not None:
                state.check_label(label)
            conditions = [parse(text) for text in where or ()]
            found = combine(conditions if label is None else [("label", label), *conditions])
            state.index.select(found)  # is cached; unknown keys are reported before an upload
            return found

        try:
            found = await state.costly(client, ("filter", state.index.version, label, repr(where)), select)
        except (ValueError, TypeError) as error:
            raise ApiError(422, str(error)) from None
        return SearchSettings(k, found, expand, rerank, began, identity, client)

    shared = Depends(read_settings)

    async def search(vector: Vector, settings: SearchSettings, own: int | None = None) -> SearchResponse:
        k, where, expand, rerank, began, identity, client = settings
        query = VectorQuery(vector=vector, k=k, where=where, expand=expand, rerank=rerank, exclude=own)
        threshold = state.index.threshold if query.has_similarities else None
        try:
            neighbors = await state.nearest(client, query)
        finally:
            if state.index.identity != identity:
                raise ServerBusy("the index was replaced during the search; try again")
        matches = [None if threshold is None else threshold.matches(neighbor.score) for neighbor in neighbors]
        return SearchResponse(
            query=None if own is None else ItemOut.model_validate(state.index.item(own)),
            hits=[
                HitOut(
                    id=neighbor.item.id,
                    name=neighbor.item.name,
                    label=neighbor.item.label,
                    metadata=dict(neighbor.item.metadata),
                    score=round(neighbor.score, 6),
                    match=match,
                )
                for neighbor, match in zip(neighbors, matches, strict=True)
            ],
            unknown=None if threshold is None else not any(matches),
            milliseconds=round(1000 * (time.perf_counter() - began), 2),
        )

    @routes.post("", responses=error_responses(404, 408, 409, 413, 503, 507))
    async def search_by_image(
        image: Annotated[UploadFile, File(description="JPEG, PNG, WebP, GIF, TIFF, BMP, AVIF, …")],
        settings: SearchSettings = shared,
    ) -> SearchResponse:
        """Find the items nearest to an image."""
        if not state.takes_images:
            raise state.no_model()
        pixels = await state.uploads.read(image, settings.client)
        return await search(await state.embed(pixels, settings.client), settings)

    @routes.post("/id/{id}", responses=error_responses(404, 503))
    async def search_by_item(id: ItemId, settings: SearchSettings = shared) -> SearchResponse:
        """Find the items nearest to an item, which itself is not among the results."""
        return await search(state.index.vector(id), settings, id)

    @routes.post("/vector", responses=error_responses(404, 408, 413, 503))
    async def search_by_vector(query: VectorSearchRequest, settings: SearchSettings = shared) -> SearchResponse:
        """Find the items nearest to a vector. If the model of the index reads vectors, it is embedded first."""
        reads = state.vector_dim
        if len(query.vector) != (reads or state.dim):
            needed = f"the index has {state.dim}" if reads is None else f"the model reads {reads}"
            raise ApiError(422, f"vector has {len(query.vector)} numbers; {needed}")
        vector = np.array(query.vector, dtype=np.float32)
        if reads is not None:
            return await search(await state.embed(vector, settings.client), settings)
        if not vector.any():
            raise ApiError(422, "vector has only zeros; at least one other number is required")
        return await search(vector, settings)

    return routes
