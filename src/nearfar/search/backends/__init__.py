"""Ways of finding neighbours, with one interface."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from nearfar.search.backends.base import MEASURES, NO_ID, Backend, Ids, Vectors
from nearfar.search.backends.exact import Exact
from nearfar.search.backends.fallback import Behind, let_go
from nearfar.utils.progress import Progress

__all__ = [
    "MEASURES",
    "NAMES",
    "NO_ID",
    "Backend",
    "Behind",
    "Exact",
    "Surroundings",
    "check_name",
    "choose",
    "let_go",
    "make",
    "reopen",
]

NAMES = ("auto", "exact", "faiss", "faiss:flat", "faiss:ivf", "faiss:hnsw", "milvus")
MANY = 20_000  # vectors from which on "auto" takes faiss, where it is installed


@dataclass(frozen=True)
class Surroundings:
    """What a backend is told.

    Args:
        measure: "cosine" or "euclidean".
        index: The folder of the index.
        device: Where exact search computes.
        progress: Is told how far the making of it is.
        read_only: Nothing may be written outside the index folder.
    """

    measure: str
    index: Path
    device: torch.device | str = "cpu"
    progress: Progress | None = None
    read_only: bool = False


def check_name(name: str) -> str:
    """The name of a backend; Milvus may be followed by an address, as in "milvus:http://host:19530"."""
    if name not in NAMES and not name.startswith("milvus:"):
        raise ValueError(f"backend is {name!r}; allowed are {', '.join(NAMES)} and milvus:ADDRESS")
    return name


def choose(name: str, count: int) -> str:
    """The backend that is meant, for so many vectors.

    >>> choose("auto", 500), choose("faiss", 500)
    ('exact', 'faiss:flat')
    """
    if check_name(name) == "auto":
        name = "faiss" if count >= MANY and find_spec("faiss") is not None else "exact"
    if name == "faiss":
        from nearfar.search.backends.faiss import kind_for

        return f"faiss:{kind_for(count)}"
    return name


def make(name: str, vectors: Vectors, ids: Ids, around: Surroundings) -> Backend:
    """A new backend, of a name that ``choose`` gave, for these vectors."""
    kind, _, words = name.partition(":")
    if kind == "faiss":
        from nearfar.search.backends.faiss import Faiss

        return Faiss.make(vectors, ids, kind=words, measure=around.measure, progress=around.progress)
    if kind == "milvus":
        from nearfar.search.backends.milvus import Milvus

        return Milvus.make(vectors, ids, address=words, measure=around.measure, index=around.index)
    return Exact(vectors, ids, measure=around.measure, device=around.device)


def reopen(
    name: str, vectors: Vectors, ids: Ids, around: Surroundings, *, folder: Path, facts: Mapping[str, Any]
) -> Backend:
    """A backend as it was saved in a folder, with what it told then."""
    kind, _, words = name.partition(":")
    if kind == "faiss":
        from nearfar.search.backends.faiss import Faiss

        return Faiss.open(folder, vectors, ids, kind=words, measure=around.measure, facts=facts)
    if kind == "milvus":
        from nearfar.search.backends.milvus import Milvus

        return Milvus.open(
            vectors,
            ids,
            address=words,
            measure=around.measure,
            index=around.index,
            facts=facts,
            read_only=around.read_only,
        )
    return Exact(vectors, ids, measure=around.measure, device=around.device)
