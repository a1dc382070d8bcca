"""Routes that search by image, by item and by vector."""

from __future__ import annotations

import time
from typing import Annotated

import numpy as np
from fastapi import APIRouter, File, Query, UploadFile

from nearfar.serve.errors import ApiError, error_responses
from nearfar.serve.routes import API
from nearfar.serve.routes.items import ItemId
from nearfar.serve.schemas import HitOut, ItemOut, SearchResponse, VectorQuery
from nearfar.serve.state import ServerState, Vector, VectorSearch

DEFAULT_K = 24

Label = Annotated[str | None, Query(max_length=200, description="Search among items of this class only.")]


def router(state: ServerState) -> APIRouter:
    """Create the routes for searching."""
    routes = APIRouter(prefix=f"{API}/search", tags=["search"])
    most = state.limits.neighbours
    number = Query(min(DEFAULT_K, most), ge=1, le=most, description="Number of items to find.")

    async def search(vector: Vector, k: int, label: str | None, began: float, own: int | None = None) -> SearchResponse:
        found = await state.search(VectorSearch(vector, k if own is None else k + 1, label))
        hits = []
        for id, score in [hit for hit in found if hit.id != own][:k]:
            try:
                item = state.index.item(int(id))
            except KeyError:  # removed in the meantime
                continue
            hits.append(
                HitOut(
                    id=item.id,
                    name=item.name,
                    label=item.label,
                    metadata=dict(item.metadata),
                    score=round(float(score), 6),
                )
            )
        query = None if own is None else ItemOut.model_validate(state.item(own))
        return SearchResponse(query=query, hits=hits, milliseconds=round(1000 * (time.perf_counter() - began), 2))

    @routes.post("", responses=error_responses(404, 408, 409, 413, 503))
    async def search_by_image(
        image: Annotated[UploadFile, File(description="JPEG, PNG, WebP, GIF, TIFF, BMP, AVIF, …")],
        k: int = number,
        label: Label = None,
    ) -> SearchResponse:
        """Find the items nearest to an image."""
        began = time.perf_counter()
        state.check_model()
        state.check_label(label)
        vector = await state.embed(await state.uploads.read(image))
        return await search(vector, k, label, began)

    @routes.post("/id/{id}", responses=error_responses(404, 503))
    async def search_by_item(id: ItemId, k: int = number, label: Label = None) -> SearchResponse:
        """Find the items nearest to an item, which itself is not among the results."""
        began = time.perf_counter()
        state.item(id)
        state.check_label(label)
        return await search(state.vector(id), k, label, began, id)

    @routes.post("/vector", responses=error_responses(404, 408, 413, 503))
    async def search_by_vector(query: VectorQuery, k: int = number, label: Label = None) -> SearchResponse:
        """Find the items nearest to a vector."""
        began = time.perf_counter()
        state.check_label(label)
        if len(query.vector) != state.dim:
            raise ApiError(422, f"vector has {len(query.vector)} numbers; the index has {state.dim}")
        vector = np.array(query.vector, dtype=np.float32)
        if not vector.any():
            raise ApiError(422, "vector has only zeros; at least one other number is required")
        return await search(vector, k, label, began)

    return routes
