"""Search with Milvus: a file beside the index on one machine, or a cluster that many machines ask."""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from nearfar.search.backends.base import NO_ID, Ids, Scores, Vectors, best
from nearfar.search.backends.exact import Exact

FILE = "milvus.db"
TOKEN = "NEARFAR_MILVUS_TOKEN"  # of the environment: a secret has no place in an index or on a command line
BATCH = 1000  # vectors that are sent at once
MOST = 16_384  # neighbours, and queries, that Milvus takes
FEW = 8  # one in so many allowed: these are looked at here, one by one


class Milvus:
    """A collection in Milvus with the ids and vectors of an index.

    The vectors lie in the index folder too: whatever happens to the collection, it can be made again, and
    ``settle`` does where its number of vectors is not right.

    Args:
        client: Of pymilvus.
        collection: Its name; each index has one of its own.
        read_only: Nothing is written: whoever may write does.
    """

    def __init__(
        self,
        client: Any,
        collection: str,
        vectors: Vectors,
        ids: Ids,
        *,
        address: str,
        measure: str,
        read_only: bool = False,
    ) -> None:
        self.collection, self.address, self.measure, self.read_only = collection, address, measure, read_only
        self.dim = int(vectors.shape[1])
        self._client = client
        self._exact = Exact(vectors, ids, measure=measure)  # for filters that leave few
        self._count = len(ids)
        self._lock = threading.Lock()

    @property
    def name(self) -> str:
        return f"milvus:{self.address}" if self.address else "milvus"

    @classmethod
    def make(cls, vectors: Vectors, ids: Ids, *, address: str, measure: str, index: Path) -> Milvus:
        """A new collection with these vectors."""
        client = _connect(address, index)
        made = cls(client, f"nearfar_{uuid.uuid4().hex[:16]}", vectors, ids, address=address, measure=measure)
        made._fill(ids, vectors)
        return made

    @classmethod
    def open(
        cls,
        vectors: Vectors,
        ids: Ids,
        *,
        address: str,
        measure: str,
        index: Path,
        facts: Mapping[str, Any],
        read_only: bool = False,
    ) -> Milvus:
        """The collection that was made before."""
        client = _connect(address, index)
        return cls(client, facts["collection"], vectors, ids, address=address, measure=measure, read_only=read_only)

    def settle(self, ids: Ids, vectors: Vectors) -> None:
        """See that the collection is there and has as many vectors as it should; make it anew where not."""
        if self._client.has_collection(self.collection):
            self._client.load_collection(self.collection)
            found = self._client.query(self.collection, filter="", output_fields=["count(*)"])
            if int(found[0]["count(*)"]) == len(ids):
                return
        if not self.read_only:
            self._fill(ids, vectors)

    def add(self, ids: Ids, vectors: Vectors) -> None:
        with self._lock:
            self._exact.add(ids, vectors)
            self._count += len(ids)
            if not self.read_only:
                self._send(ids, vectors)

    def remove(self, ids: Ids) -> None:
        with self._lock:
            self._exact.remove(ids)
            self._count -= len(ids)
            if not self.read_only and len(ids):
                self._client.delete(self.collection, ids=ids.tolist())

    def search(self, queries: Vectors, k: int, allowed: Ids | None = None) -> tuple[Scores, Ids]:
        if (allowed is not None and len(allowed) * FEW < self._count) or k > MOST:
            return self._exact.search(queries, k, allowed)
        words = {} if allowed is None else {"filter": f"id in {allowed.tolist()}"}
        scores = np.full((len(queries), k), -np.inf, dtype=np.float32)
        ids = np.full((len(queries), k), NO_ID, dtype=np.int64)
        for start in range(0, len(queries), MOST):
            found = self._client.search(
                self.collection,
                data=np.ascontiguousarray(queries[start : start + MOST], dtype=np.float32),
                limit=k,
                anns_field="vector",
                output_fields=["id"],
                **words,
            )
            for row, hits in enumerate(found, start=start):
                ids[row, : len(hits)] = [hit["id"] for hit in hits]
                scores[row, : len(hits)] = [hit["distance"] for hit in hits]
        if self.measure == "euclidean":  # Milvus gives squared distances
            scores = np.where(ids == NO_ID, -np.inf, -np.sqrt(scores.clip(min=0))).astype(np.float32)
        found = best(scores, ids, k)
        self._exact.fill_up(found, queries, allowed)
        return found

    def save(self, folder: Path, ids: Ids, vectors: Vectors) -> dict[str, Any]:
        """Milvus keeps its own files; that they are written is seen to."""
        self._client.flush(self.collection)
        return {"collection": self.collection}

    def renew(self, folder: Path, ids: Ids, vectors: Vectors, facts: Mapping[str, Any]) -> Milvus:
        """The same collection and connection."""
        return Milvus(self._client, self.collection, vectors, ids, address=self.address, measure=self.measure)

    def close(self) -> None:
        self._client.close()

    def discard(self) -> None:
        """Drop the collection: another backend has taken over."""
        if self._client.has_collection(self.collection):
            self._client.drop_collection(self.collection)

    def _fill(self, ids: Ids, vectors: Vectors) -> None:
        from pymilvus import DataType

        self.discard()
        schema = self._client.create_schema(auto_id=False, enable_dynamic_field=False)
        schema.add_field("id", DataType.INT64, is_primary=True)
        schema.add_field("vector", DataType.FLOAT_VECTOR, dim=self.dim)
        settings = self._client.prepare_index_params()
        metric = "COSINE" if self.measure == "cosine" else "L2"
        settings.add_index("vector", index_type="AUTOINDEX", metric_type=metric)
        # Strong: what was added is found by the next search.
        self._client.create_collection(
            self.collection, schema=schema, index_params=settings, consistency_level="Strong"
        )
        self._send(ids, vectors, self._client.insert)

    def _send(self, ids: Ids, vectors: Vectors, how: Callable[..., Any] | None = None) -> None:
        """Vectors to the collection; an id that is there already, as after a crash, gets this vector."""
        send = how or self._client.upsert
        for start in range(0, len(ids), BATCH):
            rows = zip(ids[start : start + BATCH].tolist(), np.asarray(vectors[start : start + BATCH]), strict=True)
            send(self.collection, [{"id": id, "vector": vector} for id, vector in rows])


def _connect(address: str, index: Path) -> Any:
    try:
        from pymilvus import MilvusClient
        from pymilvus.exceptions import MilvusException
    except ImportError as error:
        raise ImportError(
            "the milvus backend needs pymilvus; install it with: pip install 'nearfar[milvus]'"
        ) from error
    where = address or str(index / FILE)
    try:
        return MilvusClient(uri=where, token=os.environ.get(TOKEN, ""))
    except MilvusException as error:
        advice = "is the server running?" if address else "only one process can open a file of Milvus"
        raise ConnectionError(f"Milvus at {where} does not answer ({error.message}); {advice}") from error
