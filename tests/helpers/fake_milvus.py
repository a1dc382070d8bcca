"""Milvus servers in memory, with the calls that the backend makes; they can be slow or dead."""

from collections import defaultdict

import numpy as np

from nearfar.search.backends import milvus


class Servers:
    """All servers by address; ``asked`` lists the addresses that were connected to."""

    def __init__(self):
        self.collections = defaultdict(dict)
        self.asked = []
        self.dead = False
        self.calls = 0

    def connect(self, context):
        self.asked.append(context.address)
        return Client(self, context.address)


class Client:
    """A client of one server."""

    def __init__(self, servers, address):
        self.servers, self.held = servers, servers.collections[address]

    def __getattribute__(self, name):
        found = object.__getattribute__(self, name)
        if callable(found) and name not in ("close", "create_schema", "prepare_index_params"):
            servers = object.__getattribute__(self, "servers")
            servers.calls += 1
            if servers.dead:
                raise TimeoutError("deadline exceeded")
        return found

    def has_collection(self, name, timeout):
        return name in self.held

    def describe_collection(self, name, timeout):
        vector = next(iter(self.held[name].values()), np.zeros(0))
        return {"fields": [{"name": "id"}, {"name": "vector", "params": {"dim": len(vector)}}]}

    def describe_index(self, name, field, timeout):
        return {"metric_type": "COSINE"}

    def load_collection(self, name, timeout):
        assert name in self.held

    def drop_collection(self, name, timeout):
        del self.held[name]

    def create_schema(self, **_):
        return type("Schema", (), {"add_field": lambda *_, **__: None})()

    def prepare_index_params(self):
        return type("Settings", (), {"add_index": lambda *_, **__: None})()

    def create_collection(self, name, timeout, **_):
        assert name not in self.held
        self.held[name] = {}

    def upsert(self, name, rows, timeout):
        self.held[name].update({row["id"]: np.array(row["vector"]) for row in rows})

    insert = upsert

    def delete(self, name, ids, timeout):
        for id in ids:
            self.held[name].pop(id, None)

    def get(self, name, ids, output_fields, timeout):
        return [{"id": id, "vector": self.held[name][id].tolist()} for id in ids if id in self.held[name]]

    def query(self, name, filter, output_fields, **_):
        return [{"count(*)": len(self.held[name])}]

    def search(self, name, data, limit, timeout, **_):
        ids = np.array(sorted(self.held[name]))
        scores = data @ np.stack([self.held[name][id] for id in ids.tolist()]).T
        order = np.argsort(-scores, axis=1)[:, :limit]
        return [
            [{"id": int(ids[place]), "distance": float(row[place])} for place in places]
            for row, places in zip(scores, order, strict=True)
        ]

    def flush(self, name, timeout):
        assert name in self.held

    def close(self):
        pass


def install(patch):
    """Let all indexes connect to servers in memory."""
    servers = Servers()
    patch.setattr(milvus, "_connect", servers.connect)
    return servers
