"""Request and response bodies of the HTTP API."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, FailFast, Field

LARGEST = 1e6  # of a vector component: far beyond any embedding, and its square is still finite
Component = Annotated[float, Field(ge=-LARGEST, le=LARGEST, allow_inf_nan=False)]


class ErrorDetail(BaseModel):
    """Code and message of an error."""

    code: str = Field(description="Error code for programs, such as not_found.")
    message: str = Field(description="Error message for people.")


class ErrorResponse(BaseModel):
    """Body of every error response."""

    error: ErrorDetail


class HealthResponse(BaseModel):
    """State of the server."""

    status: str
    token_needed: bool = Field(description="Whether other requests need a token.")


class InfoResponse(BaseModel):
    """Properties of the index and of the server."""

    name: str
    count: int
    labels: int = Field(description="Number of classes.")
    dim: int
    pictures: bool = Field(description="Whether the index has a model that takes images to search with.")
    read_only: bool
    runs: bool = Field(description="Whether the server shows training runs.")
    version: str = Field(description="Changes whenever an item is added, removed or changed; the same for all servers.")
    limits: dict[str, float]
    index: dict[str, Any] = Field(description="Properties of the index as stored in its folder.")


class ItemOut(BaseModel):
    """An item of the index."""

    model_config = ConfigDict(from_attributes=True)

    id: int
    name: str
    label: str | None
    metadata: dict[str, Any] = {}


class HitOut(ItemOut):
    """An item and its similarity to the query."""

    score: float
    match: bool | None = Field(description="Whether the score reaches the threshold; null without one.")


class SearchResponse(BaseModel):
    """Result of a search."""

    query: ItemOut | None = Field(description="The item that was searched with, for a search by item.")
    hits: list[HitOut] = Field(description="The nearest items, nearest first.")
    unknown: bool | None = Field(
        description="Whether no item matches, with the error rates of the threshold in info. Null if the index has no "
        "threshold, or after expansion or re-ranking."
    )
    milliseconds: float


class ItemsResponse(BaseModel):
    """One page of items."""

    total: int
    items: list[ItemOut]


class LabelCount(BaseModel):
    """A class and the number of its items."""

    label: str
    count: int


class LabelsResponse(BaseModel):
    """All classes of the index."""

    labels: list[LabelCount]
    unlabelled: int


class AddResponse(BaseModel):
    """Result of adding an image."""

    id: int = Field(description="Id of the new item, which is on disk when this is returned.")


class RemoveResponse(BaseModel):
    """Result of removing an item."""

    removed: int


class VectorSearchRequest(BaseModel):
    """A vector to search with."""

    model_config = ConfigDict(extra="forbid")

    vector: Annotated[list[Component], FailFast()] = Field(min_length=1, max_length=65536)


class LoginRequest(BaseModel):
    """A token to exchange for a session cookie."""

    model_config = ConfigDict(extra="forbid")

    token: str = Field(max_length=1000)
