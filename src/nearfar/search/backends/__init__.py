"""Backends: exact search, also over int8 codes, FAISS and Milvus behind one interface."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from nearfar.search.backends.base import MEASURES, NO_ID, Backend, Ids, Vectors
from nearfar.search.backends.exact import Exact
from nearfar.search.backends.fallback import ExactFallback, discard
from nearfar.search.backends.int8 import Int8
from nearfar.utils.progress import Progress
from nearfar.utils.tensors import as_vectors, check_finite

__all__ = [
    "MEASURES",
    "NAMES",
    "NO_ID",
    "Backend",
    "BackendContext",
    "Exact",
    "ExactFallback",
    "Int8",
    "check_name",
    "choose",
    "discard",
    "make",
    "reopen",
]

log = logging.getLogger("nearfar.search")

NAMES = ("auto", "exact", "exact:int8", "faiss", "faiss:flat", "faiss:ivf", "faiss:hnsw", "milvus")
MANY = 20_000  # from this many vectors "auto" uses FAISS, if it is installed


@dataclass(frozen=True)
class BackendContext:
    """Settings of the index that a backend needs.

    Args:
        measure: "cosine" or "euclidean".
        index: The folder of the index.
        device: Device for exact search.
        progress: Receives the progress of building the backend.
        read_only: Write nothing outside the index folder.
        identity: Identity of the index; data outside its folder carries it.

    Example:
        >>> BackendContext("cosine", Path("my.index")).read_only
        False
    """

    measure: str
    index: Path
    device: torch.device | str = "cpu"
    progress: Progress | None = None
    read_only: bool = False
    identity: str = ""


def check_name(name: str) -> str:
    """Raise ValueError unless a backend has this name.

    Args:
        name: The name; "milvus" may be followed by an address, as in "milvus:http://host:19530".

    Returns:
        The same name.
    """
    if name not in NAMES and not name.startswith("milvus:"):
        raise ValueError(f"backend is {name!r}; allowed are {', '.join(NAMES)} and milvus:ADDRESS")
    return name


def choose(name: str, count: int) -> str:
    """Return the backend that "auto" or "faiss" stands for.

    Args:
        name: The requested name.
        count: Number of vectors.

    Example:
        >>> choose("auto", 500), choose("faiss", 500)
        ('exact', 'faiss:flat')
    """
    if check_name(name) == "auto":
        name = "faiss" if count >= MANY and find_spec("faiss") is not None else "exact"
    if name == "faiss":
        from nearfar.search.backends.faiss import kind_for

        return f"faiss:{kind_for(count)}"
    return name


def make(name: str, vectors: Vectors, ids: Ids, context: BackendContext) -> Backend:
    """Build a backend.

    Args:
        name: A name that ``choose`` returned.
        vectors: The vectors [n, d].
        ids: Their ids [n].
        context: Settings of the index.
    """
    kind, words = _parts(name, context.measure)
    if name == Int8.name:
        return Int8(vectors, ids, measure=context.measure)
    if kind == "faiss":
        from nearfar.search.backends.faiss import Faiss

        return Faiss.make(vectors, ids, kind=words, measure=context.measure, progress=context.progress)
    if kind == "milvus":
        from nearfar.search.backends.milvus import Milvus

        return Milvus.make(
            vectors, ids, address=words, measure=context.measure, index=context.index, identity=context.identity
        )
    return Exact(vectors, ids, measure=context.measure, device=context.device)


def reopen(
    name: str,
    vectors: Vectors,
    ids: Ids,
    context: BackendContext,
    *,
    folder: Path,
    facts: Mapping[str, Any],
    damaged: Sequence[str] = (),
) -> Backend:
    """Open a backend that was saved.

    Args:
        name: A name that ``choose`` returned.
        vectors: The vectors [n, d].
        ids: Their ids [n].
        context: Settings of the index.
        folder: The data folder.
        facts: What ``Backend.save`` returned.
        damaged: Files of the data folder that are not what was written.
    """
    kind, words = _parts(name, context.measure)
    if kind == "faiss" or name == Int8.name:
        try:
            if damaged:
                raise ValueError(f"{damaged[0]} is not what was written")
            if name == Int8.name:
                return Int8.open(folder, vectors, ids, measure=context.measure)
            from nearfar.search.backends.faiss import Faiss

            return Faiss.open(folder, vectors, ids, kind=words, measure=context.measure, facts=facts)
        except ImportError:
            raise
        except Exception as error:  # FAISS and NumPy raise errors of many kinds for damaged files
            check_finite("vectors", as_vectors("vectors", vectors))
            why = " ".join(str(error).split())
            log.warning("%s is built again, because its files are damaged (%s); see nearfar index check", name, why)
            return make(name, vectors, ids, context)
    if kind == "milvus":
        from nearfar.search.backends.milvus import Milvus

        return Milvus.open(
            vectors,
            ids,
            address=words,
            measure=context.measure,
            index=context.index,
            identity=context.identity,
            facts=facts,
            read_only=context.read_only,
        )
    return Exact(vectors, ids, measure=context.measure, device=context.device)


def _parts(name: str, measure: str) -> tuple[str, str]:
    """What stands before and after the colon of a name; flat search by distance is exact search."""
    kind, _, words = name.partition(":")
    return ("exact", "") if (name, measure) == ("faiss:flat", "euclidean") else (kind, words)
