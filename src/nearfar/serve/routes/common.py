"""What the routes share: which errors they announce, and how things are shown."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Path, Query

from nearfar.search.items import Hit, Item
from nearfar.serve.errors import Refusal
from nearfar.serve.schemas import Error, Neighbour, Thing
from nearfar.serve.state import Room

API = "/api/v1"
LARGEST_ID = 2**31 - 1

MEANINGS = {
    400: "The request cannot be read.",
    401: "A token is needed.",
    403: "Not from here, or not on a read-only server.",
    404: "There is no such thing.",
    408: "The request came in too slowly.",
    409: "The index has no model, so it cannot read pictures.",
    413: "Too large.",
    422: "A value is wrong.",
    503: "Too many are waiting.",
}


def refusals(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The errors of a route, for the schema."""
    return {status: {"model": Error, "description": MEANINGS[status]} for status in (400, 401, 403, 422, *statuses)}


Id = Annotated[int, Path(ge=0, le=LARGEST_ID, description="The number of an item.")]
Label = Annotated[str | None, Query(max_length=200, description="Search among this class alone.")]


def thing(item: Item) -> Thing:
    return Thing(id=item.id, name=item.name, label=item.label, metadata=dict(item.metadata))


def neighbours(room: Room, hits: list[Hit]) -> list[Neighbour]:
    """With names and classes; what was removed in the meantime is left out."""
    found = [(hit, room.item(int(hit.id))) for hit in hits]
    return [
        Neighbour(
            id=item.id,
            name=item.name,
            label=item.label,
            metadata=dict(item.metadata),
            score=round(float(hit.score), 6),
        )
        for hit, item in found
        if item is not None
    ]


def known_label(room: Room, label: str | None) -> str | None:
    if label is not None and label not in room.catalogue.view().by_label:
        raise Refusal(404, f"label is {label!r}; the index has no such class", word="no_label")
    return label


def known_item(room: Room, id: int) -> Item:
    item = room.item(id)
    if item is None:
        raise Refusal(404, f"id is {id}; the index has no such item")
    return item


def writable(room: Room) -> None:
    if room.read_only:
        raise Refusal(403, "this server is read-only", word="read_only")


def reads_pictures(room: Room) -> None:
    if not room.has_model:
        raise Refusal(409, "this index was made of vectors and has no model; search by item or vector", word="no_model")
