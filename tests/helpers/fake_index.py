"""An index in memory with colors as vectors, so that tests of the server need no network."""

from __future__ import annotations

import threading
from io import BytesIO

import numpy as np
from PIL import Image

from nearfar.metrics import Threshold
from nearfar.search import filters
from nearfar.search.items import Item, MissingItem
from nearfar.search.results import Neighbor

SIDE = 4
DIM = 3 * SIDE * SIDE


class FakeIndex:
    """Vectors are tiny images, centered and of unit length."""

    in_dim: int | None = None
    identity = "fake"

    def __init__(self, count=0, classes=4, *, model="fake"):
        self._lock = threading.Lock()
        self._items = {}
        self._vectors = {}
        self._pictures = {}
        self._next, self._model = 0, model
        self.batches = []
        self.threshold = None
        self.closed, self.version = False, "0"
        if count:
            self.add_images(
                [(f"{n % classes}/{n}.png", picture(n, classes), f"class {n % classes}", {}) for n in range(count)]
            )

    def __len__(self):
        return len(self._items)

    @property
    def items(self):
        return tuple(self._items.values())

    def info(self):
        threshold = None if self.threshold is None else self.threshold.to_json()
        facts = {"format": 1, "count": len(self), "dim": DIM, "backend": "exact", "model": self._model, "built": "now"}
        return {**facts, "threshold": threshold}

    def item(self, id):
        if id not in self._items:
            raise MissingItem(f"id is {id}; the index has no such item")
        return self._items[id]

    def vector(self, id):
        self.item(id)
        return self._vectors[id]

    def embed(self, images):
        self.batches.append(len(images))
        small = [as_image(image).convert("RGB").resize((SIDE, SIDE)) for image in images]
        pixels = np.stack([np.asarray(image, dtype=np.float32) for image in small])
        vectors = pixels.reshape(len(images), -1) - 127.5
        return np.asarray(vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-6), dtype=np.float32)

    def select(self, where):
        return filters.select(self.items, where)

    def search_batch(self, queries):
        return [self._search(query) for query in queries]

    def _search(self, query):
        kept = list(self._items) if query.where is None else self.select(query.where).tolist()
        scores = {id: float(query.vector @ self._vectors[id]) for id in kept if id != query.exclude}
        best = sorted(scores, key=lambda id: -scores[id])[: query.k]
        return [Neighbor(self._items[id], scores[id]) for id in best]

    def add_images(self, images):
        vectors = self.embed([image for _, image, _, _ in images])
        with self._lock:
            self.version = f"{self.version}+"
            ids = list(range(self._next, self._next + len(images)))
            self._next += len(images)
            for id, (name, image, label, metadata), vector in zip(ids, images, vectors, strict=True):
                self._items = {**self._items, id: Item(id, name, label, metadata=metadata)}
                self._vectors[id], self._pictures[id] = vector, as_image(image)
        return ids

    def remove(self, ids):
        with self._lock:
            for id in ids:
                self.item(id)
            self._items = {id: item for id, item in self._items.items() if id not in ids}
            self.version = f"{self.version}-"

    def refreshed(self):
        return self

    def thumbnail(self, id):
        self.item(id)
        file = BytesIO()
        self._pictures[id].convert("RGB").save(file, "JPEG")
        return file.getvalue()

    def map_with_ids(self, method="pca"):
        ids = list(self._items)
        vectors = np.stack([self._vectors[id] for id in ids]) if ids else np.zeros((0, DIM))
        return np.array(ids, dtype=np.int64), np.asarray(vectors[:, :2], dtype=np.float32)

    def close(self):
        self.closed = True


def as_image(image):
    return Image.fromarray(image) if isinstance(image, np.ndarray) else image


def picture(number, classes=4, side=32):
    """Images of one class are similar."""
    base = np.random.default_rng(number % classes).integers(0, 256, (SIDE, SIDE, 3))
    noise = np.random.default_rng(1000 + number).integers(-40, 40, (SIDE, SIDE, 3))
    small = np.clip(base + noise, 0, 255).astype(np.uint8)
    return Image.fromarray(small).resize((side, side), Image.Resampling.NEAREST)


def encoded(image, kind="PNG", **settings):
    file = BytesIO()
    image.save(file, kind, **settings)
    return file.getvalue()


def threshold(similarity):
    """A threshold with made-up error rates."""
    rates = {"false_accept": 0.001, "false_reject": 0.0425, "f1": 0.9, "accuracy": 0.99}
    return Threshold(similarity=similarity, measure="cosine", criterion="f1", positives=80, negatives=1000, **rates)
