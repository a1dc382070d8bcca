"""Search with Milvus: a file in the index folder, or a server."""

from __future__ import annotations

import logging
import os
import threading
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearfar.search.backends.base import NO_ID, Backend, BackendContext, Ids, Scores, Vectors
from nearfar.search.backends.exact import SPARE, Exact, best, merged
from nearfar.search.backends.fallback import discard

FILE = "milvus.db"
SERVER = "milvus:server"  # name of the backend that uses a server
TOKEN = "NEARFAR_MILVUS_TOKEN"  # an environment variable, so that the secret is in no index and no command line
BATCH = 1000  # vectors per request
MOST = 16_384  # limit of Milvus for neighbors, and for queries; and of ours for the ids of a filter
FEW = 8  # if at most one in so many vectors is allowed, they are searched exactly
SECONDS = 10.0  # for one request
LONG_SECONDS = 120.0  # for requests whose time grows with the collection: load, count, flush
METRICS = {"cosine": "COSINE", "euclidean": "L2"}  # as Milvus calls the measures
REST = 30.0  # seconds without requests after a search that failed

log = logging.getLogger("nearfar.search")


class Milvus(Backend):
    """A Milvus collection with the ids and vectors of an index.

    The vectors are in the index folder as well. A collection that does not have the right number of vectors is filled
    again, and while the server fails or takes too long, searches are exact. After a failure, the number of
    vectors is compared before the server is asked again. On a server, the names of an index's collections contain the
    identity of its folder, and no other collection is opened, filled or dropped.

    The process that writes asks for its own writes (consistency "Session"): "Strong" would wait for the server's clock
    in each search, about 0.2 s. Processes that only read cannot know when the server receives a change, so they search
    what was added since the last compaction themselves.
    """

    def __init__(self, client: Any, collection: str, vectors: Vectors, ids: Ids, context: BackendContext) -> None:
        self.collection, self.name = collection, SERVER if context.address else "milvus"
        self.measure, self.read_only, self.address = context.measure, context.read_only, context.address
        self.dim = int(vectors.shape[1])
        self._client = client
        self._exact = Exact(vectors, ids, measure=self.measure)  # for filters with few results
        self._count = len(ids)
        self._base_count = len(ids)  # of them, those of the last compaction
        self._lock = threading.Lock()
        self._rest_until = 0.0  # on the monotonic clock, after a search that failed
        self._checking = threading.Lock()
        # Whether the server was found to hold the vectors, and has not failed since. A writer makes sure before.
        self._sure = not self.read_only
        self._later = Exact(vectors[:0], ids[:0], measure=self.measure) if self.read_only else None

    @classmethod
    def make(cls, vectors: Vectors, ids: Ids, context: BackendContext) -> Milvus:
        """Create a collection."""
        made = cls(_connect(context), f"nearfar_{context.identity}_{uuid.uuid4().hex[:8]}", vectors, ids, context)
        try:
            made._fill()
        except Exception as error:
            discard(made)
            raise ConnectionError(
                f"Milvus at {_place(context)} failed while its collection was filled ({error})"
            ) from error
        return made

    @classmethod
    def open(
        cls, vectors: Vectors, ids: Ids, context: BackendContext, folder: Path, facts: Mapping[str, Any]
    ) -> Milvus:
        known = context.known
        connected = known if isinstance(known, Milvus) and known.address == context.address else None
        client = _connect(context) if connected is None else connected._client
        return cls(client, _own(facts, context), vectors, ids, context)

    def replay(self, ids: Ids, vectors: Vectors, removed: Ids) -> None:
        """Send what changed, and fill the collection again unless it has the schema and the number of vectors."""
        with self._lock:
            self._add(ids, vectors)
            self._remove(removed)
            if self.read_only:  # the first search finds out
                return
            if self._is_there():
                self._send(ids, vectors)
                self._delete(removed)
            self._settle()

    def add(self, ids: Ids, vectors: Vectors) -> None:
        with self._lock:
            self._add(ids, vectors)
            if not self.read_only:
                self._send(ids, vectors)

    def remove(self, ids: Ids) -> None:
        with self._lock:
            self._remove(ids)
            if not self.read_only:
                self._delete(ids)

    def _add(self, ids: Ids, vectors: Vectors) -> None:
        self._exact.add(ids, vectors)
        self._count += len(ids)
        if self._later is not None:
            self._later.add(ids, vectors)

    def _remove(self, ids: Ids) -> None:
        self._exact.remove(ids)
        self._count -= len(ids)
        if self._later is not None:
            self._base_count -= int((~self._later.has(ids)).sum())
            self._later.remove(ids)

    def search(self, queries: Vectors, k: int, allowed: Ids | None = None) -> tuple[Scores, Ids]:
        by_distance = self.measure == "euclidean"
        wanted = k + SPARE if by_distance else k
        narrow = allowed is not None and (len(allowed) * FEW < self._count or len(allowed) > MOST)
        if narrow or wanted > MOST or not self._can_be_asked():
            return self._exact.search(queries, k, allowed)
        words = {} if allowed is None else {"filter": f"id in {allowed.tolist()}"}
        queries = np.ascontiguousarray(queries, dtype=np.float32)
        try:
            values, ids = self._find(queries, wanted, words)
        except Exception as error:
            self._rest(f"{type(error).__name__}: {error}")
            return self._exact.search(queries, k, allowed)
        values, ids = _without(values, ids, ~self._exact.has(ids))
        if by_distance:  # values are squared distances
            nearest = self._exact.refine(queries, k, (values, ids), self._exact.product_error(queries), allowed)
        else:
            nearest = best(values, ids, k)
        if self._later is not None:
            earlier = _without(*nearest, self._later.has(nearest[1]))
            nearest = merged([earlier, self._later.search(queries, k, allowed)], k)
        self._exact.fill_up(nearest, queries, allowed)
        return nearest

    def _can_be_asked(self) -> bool:
        """Whether the server has not failed lately, and holds the vectors."""
        if time.monotonic() < self._rest_until:
            return False
        if self._sure:
            return True
        if not self._checking.acquire(blocking=False):
            return False
        try:
            # A reader cannot know which of the later changes the server has received.
            least = self._count if self._later is None else self._base_count
            held = self._held() if self._is_there() else 0
            if held < least:
                self._rest(f"its collection has {held} of {least} vectors")
            self._sure = held >= least
        except Exception as error:
            self._rest(f"{type(error).__name__}: {error}")
        finally:
            self._checking.release()
        return self._sure

    def _rest(self, why: str) -> None:
        self._sure, self._rest_until = False, time.monotonic() + REST
        log.warning("%s failed (%s); searches are exact for %.0f s", self.name, why, REST)

    def _find(self, queries: Vectors, wanted: int, words: Mapping[str, Any]) -> tuple[Scores, Ids]:
        """Values and ids as Milvus returns them."""
        values = np.full((len(queries), wanted), -np.inf, dtype=np.float32)
        ids = np.full((len(queries), wanted), NO_ID, dtype=np.int64)
        for start in range(0, len(queries), MOST):
            answers = self._client.search(
                self.collection,
                data=queries[start : start + MOST],
                limit=wanted,
                anns_field="vector",
                output_fields=["id"],
                timeout=SECONDS,
                consistency_level="Bounded" if self.read_only else "Session",
                **words,
            )
            for row, hits in enumerate(answers, start=start):
                ids[row, : len(hits)] = [hit["id"] for hit in hits]
                values[row, : len(hits)] = [hit["distance"] for hit in hits]
        return values, ids

    def save(self, folder: Path, ids: Ids, vectors: Vectors) -> dict[str, Any]:
        """Flush the collection, after it was compared with the vectors; Milvus keeps its own files."""
        self._settle()
        self._client.flush(self.collection, timeout=LONG_SECONDS)
        return {"collection": self.collection}

    def damage(self) -> str:
        try:
            for ids, vectors in self._exact.batches(BATCH):
                rows = self._client.get(self.collection, ids.tolist(), ["vector"], timeout=LONG_SECONDS)
                held = {row["id"]: row["vector"] for row in rows}
                if held.keys() != set(ids.tolist()) or not np.allclose(
                    [held[id] for id in ids.tolist()], vectors, rtol=1e-5, atol=0.0
                ):
                    return f"the collection {self.collection} of {self.name} differs from the vectors"
        except Exception as error:
            return f"{self.name} cannot be compared with the vectors ({type(error).__name__}: {error})"
        return ""

    def close(self) -> None:
        self._client.close()

    def discard(self) -> None:
        """Drop the collection."""
        if self._client.has_collection(self.collection, timeout=SECONDS):
            self._client.drop_collection(self.collection, timeout=SECONDS)

    def _is_there(self) -> bool:
        """Whether the collection exists, and compares vectors of the dimension of the index by its measure."""
        if not self._client.has_collection(self.collection, timeout=SECONDS):
            return False
        fields = self._client.describe_collection(self.collection, timeout=SECONDS)["fields"]
        dims = [int(field["params"]["dim"]) for field in fields if field["name"] == "vector"]
        if dims != [self.dim]:
            return False
        index = self._client.describe_index(self.collection, "vector", timeout=SECONDS)
        return bool(index) and index["metric_type"] == METRICS[self.measure]

    def _held(self) -> int:
        """The number of vectors in the collection, with all that was written."""
        self._client.load_collection(self.collection, timeout=LONG_SECONDS)
        answer = self._client.query(
            self.collection, filter="", output_fields=["count(*)"], consistency_level="Strong", timeout=LONG_SECONDS
        )
        return int(answer[0]["count(*)"])

    def _settle(self) -> None:
        if not self._is_there() or self._held() != self._count:
            self._fill()

    def _fill(self) -> None:
        from pymilvus import DataType

        self.discard()
        schema = self._client.create_schema(auto_id=False, enable_dynamic_field=False)
        schema.add_field("id", DataType.INT64, is_primary=True)
        schema.add_field("vector", DataType.FLOAT_VECTOR, dim=self.dim)
        settings = self._client.prepare_index_params()
        settings.add_index("vector", index_type="AUTOINDEX", metric_type=METRICS[self.measure])
        self._client.create_collection(self.collection, schema=schema, index_params=settings, timeout=SECONDS)
        for ids, vectors in self._exact.batches(BATCH):
            self._client.insert(self.collection, _rows(ids, vectors), timeout=SECONDS)

    def _send(self, ids: Ids, vectors: Vectors) -> None:
        """Write vectors to the collection; an id that already exists, as after a crash, gets the new vector."""
        for start in range(0, len(ids), BATCH):
            rows = _rows(ids[start : start + BATCH], vectors[start : start + BATCH])
            self._client.upsert(self.collection, rows, timeout=SECONDS)

    def _delete(self, ids: Ids) -> None:
        if len(ids):
            self._client.delete(self.collection, ids=ids.tolist(), timeout=SECONDS)


def _rows(ids: Ids, vectors: Vectors) -> list[dict[str, Any]]:
    return [{"id": id, "vector": vector} for id, vector in zip(ids.tolist(), np.asarray(vectors), strict=True)]


def _without(values: Scores, ids: Ids, gone: NDArray[np.bool_]) -> tuple[Scores, Ids]:
    """Values and ids [q, n] without some; the others keep their order, and −1 and −inf come last."""
    if not gone.any():
        return values, ids
    order = np.argsort(gone, axis=1, kind="stable")
    values, ids = np.where(gone, -np.inf, values).astype(np.float32), np.where(gone, NO_ID, ids)
    return np.take_along_axis(values, order, 1), np.take_along_axis(ids, order, 1)


def _own(facts: Mapping[str, Any], context: BackendContext) -> str:
    """The collection of an index folder: that which was saved, if it was made for this folder and not for another."""
    name, prefix = str(facts.get("collection", "")), f"nearfar_{context.identity}_"
    return name if name.startswith(prefix) or (name and not context.address) else f"{prefix}{0:08}"


def _place(context: BackendContext) -> str:
    return context.address or str(context.index / FILE)


def _connect(context: BackendContext) -> Any:
    try:
        from pymilvus import MilvusClient
        from pymilvus.exceptions import MilvusException
    except ImportError as error:
        raise ImportError(
            "the milvus backend needs pymilvus; install it with: pip install 'nearfar[milvus]'"
        ) from error
    where, token = _place(context), os.environ.get(TOKEN, "") if context.address else ""
    try:
        return MilvusClient(uri=where, token=token, timeout=SECONDS)
    except MilvusException as error:
        advice = "is the server running?" if context.address else "only one process can open a file of Milvus"
        raise ConnectionError(f"Milvus at {where} does not answer ({error.message}); {advice}") from error
