"""Routes about what is in the index: showing, adding, removing."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, File, Form, Query, Request, Response, UploadFile
from starlette.concurrency import run_in_threadpool

from nearfar.serve.errors import Refusal
from nearfar.serve.routes.common import API, Id, known_item, known_label, reads_pictures, refusals, thing, writable
from nearfar.serve.schemas import Added, Class, Classes, Page, Removed, Thing
from nearfar.serve.state import Room
from nearfar.serve.uploads import cleaned, readable

Answers = dict[int | str, dict[str, Any]]
KEEP = "private, max-age=604800, immutable"
JPEG: Answers = {200: {"content": {"image/jpeg": {}}, "description": "A JPEG of at most 160 pixels."}}
BYTES: Answers = {200: {"content": {"application/octet-stream": {}}, "description": "Its format: docs/serve.md."}}


def router(room: Room) -> APIRouter:
    """Items and their classes, thumbnails, the map."""
    routes = APIRouter(prefix=API, tags=["items"])

    @routes.get("/items", responses=refusals(404))
    def list_items(
        offset: Annotated[int, Query(ge=0, le=2**31 - 1)] = 0,
        limit: Annotated[int, Query(ge=1, le=1000)] = 100,
        label: Annotated[str | None, Query(max_length=200, description="Only this class.")] = None,
        shuffle: Annotated[int | None, Query(ge=0, le=2**31 - 1, description="Draw at random with this seed.")] = None,
    ) -> Page:
        """Items in the order of their numbers, or a few at random."""
        known_label(room, label)
        total, items = room.catalogue.view().page(offset, limit, label=label, shuffle=shuffle)
        return Page(total=total, items=[thing(item) for item in items])

    @routes.get("/labels", responses=refusals())
    def list_labels() -> Classes:
        """The classes, and how many items each has."""
        view = room.catalogue.view()
        shown = [Class(label=label, count=len(view.by_label[label])) for label in view.labels]
        return Classes(labels=shown, unlabelled=len(view.by_label.get(None, [])))

    @routes.get("/items/{id}", responses=refusals(404))
    def show_item(id: Id) -> Thing:
        """One item."""
        return thing(known_item(room, id))

    @routes.get("/items/{id}/thumbnail", response_class=Response, responses={**refusals(404), **JPEG})
    def show_thumbnail(
        id: Id, v: Annotated[str | None, Query(max_length=40, description="Any word: lets browsers keep it.")] = None
    ) -> Response:
        """A small picture of an item."""
        known_item(room, id)
        try:
            data = room.index.thumbnail(id)
        except KeyError:
            data = b""
        if not data:
            raise Refusal(404, f"id is {id}; that item has no picture", word="no_picture")
        return Response(data, media_type="image/jpeg", headers={"cache-control": KEEP} if v else None)

    @routes.get("/map", response_class=Response, responses={**refusals(), **BYTES})
    async def show_map(request: Request) -> Response:
        """All items on a plane."""
        view = room.catalogue.view()
        tag = f'"{view.version}"'
        headers = {"etag": tag, "cache-control": "private, no-cache"}
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        data = await run_in_threadpool(lambda: view.plane)
        return Response(data, media_type="application/octet-stream", headers=headers)

    @routes.post("/items", status_code=201, responses=refusals(408, 409, 413, 503))
    async def add_item(
        image: Annotated[UploadFile, File(description="The picture.")],
        name: Annotated[str | None, Form(max_length=200, description="That of the file unless given.")] = None,
        label: Annotated[str | None, Form(max_length=200, description="Its class.")] = None,
    ) -> Added:
        """Add a picture. When this is answered it is on disk, whatever happens to the server."""
        writable(room)
        reads_pictures(room)
        picture = await room.uploads.read(image)
        clean = readable(label) or None if label is not None else None
        return Added(id=await room.add((cleaned(name or image.filename), picture, clean, {})))

    @routes.delete("/items/{id}", responses=refusals(404))
    async def remove_item(id: Id) -> Removed:
        """Take an item out of the index; its number is never used again."""
        writable(room)
        try:
            await run_in_threadpool(room.remove, id)
        except KeyError:
            raise Refusal(404, f"id is {id}; the index has no such item") from None
        return Removed(removed=id)

    return routes
