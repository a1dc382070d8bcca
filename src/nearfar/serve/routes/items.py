"""Routes for the items of the index: listing, thumbnails, the map, adding and removing."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, File, Form, Path, Query, Request, Response, UploadFile
from starlette.concurrency import run_in_threadpool

from nearfar.serve.errors import ApiError, error_responses
from nearfar.serve.routes import API
from nearfar.serve.schemas import AddResponse, ItemOut, ItemsResponse, LabelCount, LabelsResponse, RemoveResponse
from nearfar.serve.security import client_of
from nearfar.serve.state import ServerState
from nearfar.serve.uploads import file_name, visible

LARGEST = 2**31 - 1
CACHE_FOR_A_WEEK = "private, max-age=604800, immutable"
JPEG: dict[int | str, dict[str, Any]] = {
    200: {"content": {"image/jpeg": {}}, "description": "A JPEG of at most 160 pixels per side."}
}
BYTES: dict[int | str, dict[str, Any]] = {
    200: {"content": {"application/octet-stream": {}}, "description": "See docs/serve.md for the format."}
}

ItemId = Annotated[int, Path(ge=0, le=LARGEST, description="Id of an item.")]


def router(state: ServerState) -> APIRouter:
    """Create the routes for items, classes, thumbnails and the map."""
    routes = APIRouter(prefix=API, tags=["items"])

    @routes.get("/items", responses=error_responses(404))
    def list_items(
        offset: Annotated[int, Query(ge=0, le=LARGEST)] = 0,
        limit: Annotated[int, Query(ge=1, le=1000)] = 100,
        label: Annotated[str | None, Query(max_length=200, description="Return items of this class only.")] = None,
        shuffle: Annotated[int | None, Query(ge=0, le=LARGEST, description="Seed to draw items at random.")] = None,
    ) -> ItemsResponse:
        """List items by id, or draw some at random."""
        if label is not None:
            state.check_label(label)
        total, items = state.snapshot().page(offset, limit, label=label, shuffle=shuffle)
        return ItemsResponse(total=total, items=[ItemOut.model_validate(item) for item in items])

    @routes.get("/labels", responses=error_responses())
    def list_labels() -> LabelsResponse:
        """List the classes and the number of their items."""
        snapshot = state.snapshot()
        counts = [LabelCount(label=label, count=len(snapshot.by_label[label])) for label in snapshot.labels]
        return LabelsResponse(labels=counts, unlabelled=len(snapshot.by_label.get(None, [])))

    @routes.get("/items/{id}", responses=error_responses(404))
    def show_item(id: ItemId) -> ItemOut:
        """Return one item."""
        return ItemOut.model_validate(state.index.item(id))

    @routes.get("/items/{id}/thumbnail", response_class=Response, responses={**error_responses(404), **JPEG})
    def show_thumbnail(
        id: ItemId,
        v: Annotated[str | None, Query(max_length=40, description="Any version: lets browsers cache it.")] = None,
    ) -> Response:
        """Return the thumbnail of an item."""
        data = state.index.thumbnail(id)
        if not data:
            raise ApiError(404, f"id is {id}; the item has no image", code="no_picture")
        return Response(data, media_type="image/jpeg", headers={"cache-control": CACHE_FOR_A_WEEK} if v else None)

    @routes.get("/map", response_class=Response, responses={**error_responses(503), **BYTES})
    async def show_map(request: Request) -> Response:
        """Return the two-dimensional map of all items."""
        snapshot = await run_in_threadpool(state.snapshot)
        tag = f'"{snapshot.version}"'
        headers = {"etag": tag, "cache-control": "private, no-cache"}
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        data = await state.costly(client_of(request.scope), ("map", snapshot.version), lambda: snapshot.map)
        return Response(data, media_type="application/octet-stream", headers=headers)

    @routes.post("/items", status_code=201, responses=error_responses(404, 408, 409, 413, 503, 507))
    async def add_item(
        request: Request,
        image: Annotated[UploadFile, File(description="The image.")],
        name: Annotated[str | None, Form(max_length=200, description="Its name; by default that of the file.")] = None,
        label: Annotated[str | None, Form(max_length=200, description="Its class.")] = None,
    ) -> AddResponse:
        """Add an image. It is on disk when the response is sent."""
        state.check_writable()
        if not state.takes_images:
            raise state.no_model()
        client = client_of(request.scope)
        decoded = await state.uploads.read(image, client)
        clean = visible(label) or None if label is not None else None
        return AddResponse(id=await state.add((file_name(name or image.filename), decoded, clean, {}), client))

    @routes.delete("/items/{id}", responses=error_responses(404, 503, 507))
    async def remove_item(id: ItemId, request: Request) -> RemoveResponse:
        """Remove an item. Its id is never used again."""
        state.check_writable()
        await state.remove(id, client_of(request.scope))
        return RemoveResponse(removed=id)

    return routes
