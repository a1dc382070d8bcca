"""The server's insides: an index, and the workers that share it out among requests."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from nearfar.search.items import Hit, Item
from nearfar.serve.batching import Batcher
from nearfar.serve.catalog import Catalogue
from nearfar.serve.limits import Limits
from nearfar.serve.prometheus import SIZES, Metrics
from nearfar.serve.protocols import New, Searchable, Vectors
from nearfar.serve.uploads import Pictures


class Question(NamedTuple):
    """A search that waits for others."""

    vector: Vectors
    k: int
    label: str | None


class Room:
    """Everything that requests share.

    Args:
        index: What is searched.
        limits: How much a request may ask for.
        read_only: Whether adding and removing is refused.
    """

    def __init__(self, index: Searchable, limits: Limits, *, read_only: bool) -> None:
        self.index, self.limits, self.read_only = index, limits, read_only
        self.metrics = Metrics()
        self.catalogue = Catalogue(index)
        self.uploads = Pictures(limits, self.metrics)
        self.facts = index.info()
        self.dim = int(self.facts["dim"])
        self.has_model = self.facts.get("model") is not None
        self._writing = threading.Lock()
        most, waiting = limits.batch, limits.waiting
        self.embed: Batcher[Image.Image, Vectors] = Batcher(
            self._embed, most=most, waiting=waiting, seen=self._sizes("embed")
        )
        self.find: Batcher[Question, list[Hit]] = Batcher(
            self._find, most=most, waiting=waiting, seen=self._sizes("search")
        )
        self.add: Batcher[New, int] = Batcher(
            self._add, most=most, waiting=waiting, alone=False, seen=self._sizes("add")
        )
        self.metrics.gauge("index_items", "Items in the index.", lambda: len(index))
        for name, batcher in self._batchers.items():
            self.metrics.gauge("waiting", "Requests in line.", batcher.__len__, work=name)
        if self.has_model:  # a first picture now: a model that is not there is told before anything is served
            index.embed([Image.new("RGB", (64, 64))])

    @property
    def _batchers(self) -> dict[str, Batcher[Any, Any]]:
        return {"embed": self.embed, "search": self.find, "add": self.add}

    def start(self) -> None:
        for batcher in self._batchers.values():
            batcher.start()

    def stop(self) -> None:
        """Finish what was begun; the index is closed with everything in it."""
        for batcher in self._batchers.values():
            batcher.stop()
        self.uploads.close()
        self.index.close()

    def remove(self, id: int) -> None:
        """Take an item out; KeyError where it is not there."""
        with self._writing:
            self.index.item(id)
            self.index.remove([id])
            self.catalogue.changed()

    def item(self, id: int) -> Item | None:
        try:
            return self.index.item(id)
        except KeyError:
            return None

    def _embed(self, images: list[Image.Image]) -> list[Vectors]:
        return list(self.index.embed(images))

    def _find(self, questions: list[Question]) -> list[list[Hit]]:
        """Those who ask for the same class share one pass over the index; each gets as many as it asked for."""
        groups: dict[str | None, list[int]] = defaultdict(list)
        for place, question in enumerate(questions):
            groups[question.label].append(place)
        answers: list[list[Hit]] = [[] for _ in questions]
        for label, places in groups.items():
            where: Mapping[str, Any] | None = None if label is None else {"label": label}
            vectors = np.stack([questions[place].vector for place in places])
            k = max(questions[place].k for place in places)
            for place, hits in zip(places, self.index.search_vectors(vectors, k, where=where), strict=True):
                answers[place] = list(hits[: questions[place].k])
        return answers

    def _add(self, images: list[New]) -> list[int]:
        with self._writing:
            ids = self.index.add_images(images)
            self.catalogue.changed()
            return ids

    def _sizes(self, work: str) -> Any:
        return lambda size: self.metrics.observe("batch_size", "Requests in a batch.", size, SIZES, work=work)
