"""Routes that search."""

from __future__ import annotations

import time
from typing import Annotated

import numpy as np
from fastapi import APIRouter, File, Query, UploadFile

from nearfar.serve.errors import Refusal
from nearfar.serve.protocols import Vectors
from nearfar.serve.routes.common import (
    API,
    Id,
    Label,
    known_item,
    known_label,
    neighbours,
    reads_pictures,
    refusals,
    thing,
)
from nearfar.serve.schemas import Found, Vector
from nearfar.serve.state import Question, Room

USUAL = 24  # neighbours, where nobody says how many


def router(room: Room) -> APIRouter:
    """Search by picture, by item, by vector."""
    routes = APIRouter(prefix=f"{API}/search", tags=["search"])

    most = room.limits.neighbours
    many = Query(min(USUAL, most), ge=1, le=most, description="How many to find.")

    async def ask(vector: Vectors, k: int, label: str | None, began: float, own: int | None = None) -> Found:
        wanted = k if own is None else k + 1
        hits = await room.find(Question(vector, wanted, label))
        shown = neighbours(room, [hit for hit in hits if hit.id != own][:k])
        query = None if own is None else thing(known_item(room, own))
        return Found(query=query, hits=shown, milliseconds=round(1000 * (time.perf_counter() - began), 2))

    @routes.post("", responses=refusals(404, 408, 409, 413, 503))
    async def search_by_picture(
        image: Annotated[UploadFile, File(description="JPEG, PNG, WebP, GIF, TIFF, BMP, AVIF, …")],
        k: int = many,
        label: Label = None,
    ) -> Found:
        """The items nearest to a picture."""
        began = time.perf_counter()
        reads_pictures(room)
        known_label(room, label)
        vector = await room.embed(await room.uploads.read(image))
        return await ask(vector, k, label, began)

    @routes.post("/id/{id}", responses=refusals(404, 503))
    async def search_by_item(id: Id, k: int = many, label: Label = None) -> Found:
        """The items nearest to one of them, which itself is left out."""
        began = time.perf_counter()
        known_item(room, id)
        known_label(room, label)
        try:
            vector = room.index.vector(id)
        except KeyError:
            raise Refusal(404, f"id is {id}; the index has no such item") from None
        return await ask(vector, k, label, began, id)

    @routes.post("/vector", responses=refusals(404, 408, 413, 503))
    async def search_by_vector(query: Vector, k: int = many, label: Label = None) -> Found:
        """The items nearest to a vector."""
        began = time.perf_counter()
        known_label(room, label)
        if len(query.vector) != room.dim:
            raise Refusal(422, f"vector has {len(query.vector)} numbers; the index has {room.dim}")
        vector = np.array(query.vector, dtype=np.float32)
        if not vector.any():
            raise Refusal(422, "vector is nothing but zeros, which are near nothing")
        return await ask(vector, k, label, began)

    return routes
