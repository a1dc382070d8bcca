"""Milvus servers in memory, with the calls that the backend makes; they can be slow or dead."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
import pytest

from nearfar.search.backends import milvus
from nearfar.search.backends.base import BackendContext


class Servers:
    """All servers by address; ``asked`` lists the addresses that were connected to."""

    def __init__(self) -> None:
        self.collections: dict[str, dict[str, dict[int, np.ndarray]]] = defaultdict(dict)
        self.asked: list[str] = []
        self.dead = False
        self.calls = 0

    def connect(self, context: BackendContext) -> Client:
        self.asked.append(context.address)
        return Client(self, context.address)


class Client:
    """A client of one server."""

    def __init__(self, servers: Servers, address: str) -> None:
        self.servers, self.held = servers, servers.collections[address]

    def __getattribute__(self, name: str) -> Any:
        found = object.__getattribute__(self, name)
        if callable(found) and name not in ("close", "create_schema", "prepare_index_params"):
            servers = object.__getattribute__(self, "servers")
            servers.calls += 1
            if servers.dead:
                raise TimeoutError("deadline exceeded")
        return found

    def has_collection(self, name: str, timeout: float) -> bool:
        return name in self.held

    def describe_collection(self, name: str, timeout: float) -> dict[str, Any]:
        vector = next(iter(self.held[name].values()), np.zeros(0))
        return {"fields": [{"name": "id"}, {"name": "vector", "params": {"dim": len(vector)}}]}

    def describe_index(self, name: str, field: str, timeout: float) -> dict[str, str]:
        return {"metric_type": "COSINE"}

    def load_collection(self, name: str, timeout: float) -> None:
        assert name in self.held

    def drop_collection(self, name: str, timeout: float) -> None:
        del self.held[name]

    def create_schema(self, **_: object) -> Any:
        return type("Schema", (), {"add_field": lambda *_, **__: None})()

    def prepare_index_params(self) -> Any:
        return type("Settings", (), {"add_index": lambda *_, **__: None})()

    def create_collection(self, name: str, timeout: float, **_: object) -> None:
        assert name not in self.held
        self.held[name] = {}

    def upsert(self, name: str, rows: list[dict[str, Any]], timeout: float) -> None:
        self.held[name].update({row["id"]: np.array(row["vector"]) for row in rows})

    insert = upsert

    def delete(self, name: str, ids: list[int], timeout: float) -> None:
        for id in ids:
            self.held[name].pop(id, None)

    def get(self, name: str, ids: list[int], output_fields: list[str], timeout: float) -> list[dict[str, Any]]:
        return [{"id": id, "vector": self.held[name][id].tolist()} for id in ids if id in self.held[name]]

    def query(self, name: str, filter: str, output_fields: list[str], **_: object) -> list[dict[str, int]]:
        return [{"count(*)": len(self.held[name])}]

    def search(
        self, name: str, data: np.ndarray, limit: int, timeout: float, **_: object
    ) -> list[list[dict[str, Any]]]:
        ids = np.array(sorted(self.held[name]))
        scores = data @ np.stack([self.held[name][id] for id in ids.tolist()]).T
        order = np.argsort(-scores, axis=1)[:, :limit]
        return [
            [{"id": int(ids[place]), "distance": float(row[place])} for place in places]
            for row, places in zip(scores, order, strict=True)
        ]

    def flush(self, name: str, timeout: float) -> None:
        assert name in self.held

    def close(self) -> None:
        pass


def install(patch: pytest.MonkeyPatch) -> Servers:
    """Let all indexes connect to servers in memory."""
    servers = Servers()
    patch.setattr(milvus, "_connect", servers.connect)
    return servers
