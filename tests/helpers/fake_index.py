"""An index in memory with colors as vectors, so that tests of the server need no network."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from io import BytesIO
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from nearfar.metrics import Threshold
from nearfar.search import filters
from nearfar.search.index import VectorQuery
from nearfar.search.items import Item, MissingItem
from nearfar.search.results import Neighbor

SIDE = 4
DIM = 3 * SIDE * SIDE


class FakeIndex:
    """Vectors are tiny images, centered and of unit length."""

    in_dim: int | None = None
    identity = "fake"

    def __init__(self, count: int = 0, classes: int = 4, *, model: str | None = "fake") -> None:
        self._lock = threading.Lock()
        self._items: dict[int, Item] = {}
        self._vectors: dict[int, NDArray[np.float32]] = {}
        self._pictures: dict[int, Image.Image] = {}
        self._next, self._model = 0, model
        self.batches: list[int] = []
        self.threshold: Threshold | None = None
        self.closed, self.version = False, "0"
        if count:
            self.add_images(
                [(f"{n % classes}/{n}.png", picture(n, classes), f"class {n % classes}", {}) for n in range(count)]
            )

    def __len__(self) -> int:
        return len(self._items)

    @property
    def items(self) -> Sequence[Item]:
        return tuple(self._items.values())

    def info(self) -> dict[str, Any]:
        threshold = None if self.threshold is None else self.threshold.to_json()
        facts = {"format": 1, "count": len(self), "dim": DIM, "backend": "exact", "model": self._model, "built": "now"}
        return {**facts, "threshold": threshold}

    def item(self, id: int) -> Item:
        if id not in self._items:
            raise MissingItem(f"id is {id}; the index has no such item")
        return self._items[id]

    def vector(self, id: int) -> NDArray[np.float32]:
        self.item(id)
        return self._vectors[id]

    def embed(self, images: Sequence[Image.Image | NDArray[np.uint8]]) -> NDArray[np.float32]:
        self.batches.append(len(images))
        small = [as_image(image).convert("RGB").resize((SIDE, SIDE)) for image in images]
        pixels = np.stack([np.asarray(image, dtype=np.float32) for image in small])
        vectors = pixels.reshape(len(images), -1) - 127.5
        return np.asarray(vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-6), dtype=np.float32)

    def select(self, where: Mapping[str, Any]) -> NDArray[np.int64]:
        return filters.select(self.items, where)

    def search_batch(self, queries: Sequence[VectorQuery]) -> list[list[Neighbor]]:
        return [self._search(query) for query in queries]

    def _search(self, query: VectorQuery) -> list[Neighbor]:
        kept = list(self._items) if query.where is None else self.select(query.where).tolist()
        scores = {id: float(query.vector @ self._vectors[id]) for id in kept if id != query.exclude}
        best = sorted(scores, key=lambda id: -scores[id])[: query.k]
        return [Neighbor(self._items[id], scores[id]) for id in best]

    def add_images(self, images: Sequence[tuple[str, Any, str | None, Mapping[str, Any]]]) -> list[int]:
        vectors = self.embed([image for _, image, _, _ in images])
        with self._lock:
            self.version = f"{self.version}+"
            ids = list(range(self._next, self._next + len(images)))
            self._next += len(images)
            for id, (name, image, label, metadata), vector in zip(ids, images, vectors, strict=True):
                self._items = {**self._items, id: Item(id, name, label, metadata=metadata)}
                self._vectors[id], self._pictures[id] = vector, as_image(image)
        return ids

    def remove(self, ids: Sequence[int]) -> None:
        with self._lock:
            for id in ids:
                self.item(id)
            self._items = {id: item for id, item in self._items.items() if id not in ids}
            self.version = f"{self.version}-"

    def refreshed(self) -> FakeIndex:
        return self

    def thumbnail(self, id: int) -> bytes:
        self.item(id)
        file = BytesIO()
        self._pictures[id].convert("RGB").save(file, "JPEG")
        return file.getvalue()

    def map_with_ids(self, method: str = "pca") -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        ids = list(self._items)
        vectors = np.stack([self._vectors[id] for id in ids]) if ids else np.zeros((0, DIM))
        return np.array(ids, dtype=np.int64), np.asarray(vectors[:, :2], dtype=np.float32)

    def close(self) -> None:
        self.closed = True


def as_image(image: Image.Image | NDArray[np.uint8]) -> Image.Image:
    return Image.fromarray(image) if isinstance(image, np.ndarray) else image


def picture(number: int, classes: int = 4, side: int = 32) -> Image.Image:
    """Images of one class are similar."""
    base = np.random.default_rng(number % classes).integers(0, 256, (SIDE, SIDE, 3))
    noise = np.random.default_rng(1000 + number).integers(-40, 40, (SIDE, SIDE, 3))
    small = np.clip(base + noise, 0, 255).astype(np.uint8)
    return Image.fromarray(small).resize((side, side), Image.Resampling.NEAREST)


def encoded(image: Image.Image, kind: str = "PNG", **settings: Any) -> bytes:
    file = BytesIO()
    image.save(file, kind, **settings)
    return file.getvalue()


def threshold(similarity: float) -> Threshold:
    """A threshold with made-up error rates."""
    rates = {"false_accept": 0.001, "false_reject": 0.0425, "f1": 0.9, "accuracy": 0.99}
    return Threshold(similarity=similarity, measure="cosine", criterion="f1", positives=80, negatives=1000, **rates)
