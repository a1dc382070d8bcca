"""Backends: exact search, also over int8 codes, FAISS and Milvus behind one interface."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from nearfar.search.backends.base import Backend, BackendContext, Ids, Vectors
from nearfar.search.backends.exact import Exact
from nearfar.search.backends.faiss import Faiss, kind_for
from nearfar.search.backends.int8 import Int8
from nearfar.search.backends.milvus import SERVER, Milvus
from nearfar.utils.tensors import as_vectors, check_finite

log = logging.getLogger("nearfar.search")

NAMES = ("auto", "exact", "exact:int8", "faiss", "faiss:flat", "faiss:ivf", "faiss:hnsw", "milvus", SERVER)
CLASSES: dict[str, type[Backend]] = {"exact": Exact, Int8.name: Int8, "faiss": Faiss, "milvus": Milvus}
MANY = 20_000  # from this many vectors "auto" uses FAISS, if it is installed


def check_name(name: str) -> tuple[str, str]:
    """Return the name of a backend and the address of its server, which may follow "milvus:"; empty for none."""
    kind, _, address = name.partition(":")
    if name in NAMES:
        return name, ""
    if kind != "milvus" or not address:
        raise ValueError(f"backend is {name!r}; allowed are {', '.join(NAMES)} and milvus:ADDRESS")
    return SERVER, address


def choose(name: str, count: int) -> str:
    """Return the backend that "auto" or "faiss" stands for with so many vectors."""
    if name == "auto":
        name = "faiss" if count >= MANY and find_spec("faiss") is not None else "exact"
    if name == "faiss":
        return f"faiss:{kind_for(count)}"
    return name


def make(vectors: Vectors, ids: Ids, context: BackendContext) -> Backend:
    """Build the backend that ``choose`` named, of vectors [n, d]."""
    return _class(context).make(vectors, ids, context)


def load(vectors: Vectors, ids: Ids, context: BackendContext, folder: Path, facts: Mapping[str, Any]) -> Backend:
    """Open a backend that was saved in a data folder."""
    return _class(context).open(vectors, ids, context, folder, facts)


def load_or_make(
    vectors: Vectors, ids: Ids, context: BackendContext, folder: Path, facts: Mapping[str, Any], damaged: Sequence[str]
) -> Backend:
    """Open a backend that was saved in a data folder, or build it again if some of its files are damaged."""
    try:
        if damaged:
            raise ValueError(f"{damaged[0]} is not what was written")
        return load(vectors, ids, context, folder, facts)
    except (ImportError, ConnectionError):
        raise
    except Exception as error:  # FAISS and NumPy raise errors of many kinds for damaged files
        check_finite("vectors", as_vectors("vectors", vectors))
        why = " ".join(str(error).split())
        log.warning("%s is built again, because its files are damaged (%s); see nearfar index check", context.name, why)
        return make(vectors, ids, context)


def _class(context: BackendContext) -> type[Backend]:
    if (context.name, context.measure) == ("faiss:flat", "euclidean"):  # flat search of distances is exact search
        return Exact
    return CLASSES.get(context.name) or CLASSES[context.name.partition(":")[0]]
