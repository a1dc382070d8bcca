"""What goes in and out as JSON."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

LARGEST = 1e6  # of a component: far beyond any embedding, and its square is still a number
Number = Annotated[float, Field(ge=-LARGEST, le=LARGEST, allow_inf_nan=False)]


class Problem(BaseModel):
    code: str = Field(description="A word for programs, such as not_found.")
    message: str = Field(description="A sentence for people.")


class Error(BaseModel):
    error: Problem


class Health(BaseModel):
    status: str
    token_needed: bool = Field(description="Whether other requests need a token.")


class Info(BaseModel):
    name: str
    count: int
    labels: int = Field(description="How many classes there are.")
    dim: int
    pictures: bool = Field(description="Whether a picture can be searched with: the index has a model.")
    read_only: bool
    runs: bool = Field(description="Whether there are runs to compare.")
    version: str = Field(description="Changes whenever something is added or removed.")
    limits: dict[str, float]
    index: dict[str, Any] = Field(description="What the index says about itself.")


class Thing(BaseModel):
    id: int
    name: str
    label: str | None
    metadata: dict[str, Any] = {}


class Neighbour(Thing):
    score: float


class Found(BaseModel):
    query: Thing | None = Field(description="The item that was searched with, if it was one.")
    hits: list[Neighbour] = Field(description="The nearest first.")
    milliseconds: float


class Page(BaseModel):
    total: int
    items: list[Thing]


class Class(BaseModel):
    label: str
    count: int


class Classes(BaseModel):
    labels: list[Class]
    unlabelled: int


class Added(BaseModel):
    id: int = Field(description="Safe on disk when this is answered.")


class Removed(BaseModel):
    removed: int


class Vector(BaseModel):
    model_config = ConfigDict(extra="forbid")

    vector: list[Number] = Field(min_length=1, max_length=65536)


class Login(BaseModel):
    model_config = ConfigDict(extra="forbid")

    token: str = Field(max_length=1000)
