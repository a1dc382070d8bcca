"""What can be asked of an index."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from nearfar.networks.weights import save
from nearfar.search import filters, projection
from nearfar.search import query as asking
from nearfar.search.backends import NOTHING
from nearfar.search.encoder import Encoder, Model, Picture
from nearfar.search.items import Hit, Item, Items
from nearfar.search.storage import folder
from nearfar.search.storage.shelf import Shelf
from nearfar.search.storage.table import Ids, Vectors, checked_vectors
from nearfar.utils.progress import Watch
from nearfar.utils.validation import whole

if TYPE_CHECKING:
    from nearfar.search.clusters import Clusters
    from nearfar.search.duplicates import Group
    from nearfar.search.results import Results

MASKS = 32  # filters whose items are remembered

_hit = partial(tuple.__new__, Hit)  # of a pair; faster than to call Hit, and there are many


class Lookup:
    """An opened index, as far as it is read. ``nearfar.search.Index`` is what people use.

    Attributes
        dim      of its vectors.
        measure  "cosine" or "euclidean".
        skipped  name and reason of what was no picture, when it was built just now.
    """

    def __init__(self, shelf: Shelf, *, device: str = "auto", encoder: Encoder | None = None) -> None:
        self._shelf, self._device, self._encoder = shelf, device, encoder
        self.skipped: list[tuple[str, str]] = []
        self.dim, self.measure = int(shelf.card["dim"]), str(shelf.card["measure"])
        self._loading, self._remembering = threading.Lock(), threading.Lock()
        self._masks: OrderedDict[tuple[int, int, str], Ids] = OrderedDict()

    def __len__(self) -> int:
        return len(self._shelf.table)

    def __contains__(self, id: object) -> bool:
        return id in self._shelf.table

    @property
    def folder(self) -> Path:
        return self._shelf.place

    @property
    def items(self) -> Items:
        """All items as they are now, by rising id."""
        return self._shelf.table.items()

    def item(self, id: int) -> Item:
        return self._shelf.table.item(id)

    def vector(self, id: int) -> Vectors:
        """The vector [d] of an item; of length one where cosines are compared."""
        return self._shelf.table.vector(id)

    def vectors(self) -> Vectors:
        """All vectors [n, d], in the order of ``items``."""
        return self._shelf.table.vectors()

    def thumbnail(self, id: int) -> bytes:
        """A JPEG of at most 160 pixels a side; empty where the item came without a picture."""
        return self._shelf.thumbnail(id)

    def info(self) -> dict[str, Any]:
        """What is worth telling, as JSON has it; nothing about the disk it lies on, nor the address of a server."""
        card = self._shelf.card
        labels = self.items.labels()
        return {
            "format": card["version"],
            "count": len(self),
            "classes": len(labels),
            "dim": self.dim,
            "measure": self.measure,
            "backend": self._shelf.state.backend.name.partition(":http")[0],
            **{key: value for key, value in card.get("facts", {}).items() if key != "collection"},
            "model": card["model"],
            "built": card["built"],
            "changed": card["changed"],
            "pending_bytes": self._shelf.pending,
        }

    def map(self, method: str = "pca") -> NDArray[np.float32]:
        """Places of all items on a plane, [n, 2], in the order of ``items``; kept until they are stale.

        Args:
            method: "pca": the two directions with the most spread; "tsne" keeps neighbours together.
        """
        return self.plane(method)[1]

    def plane(self, method: str = "pca") -> tuple[Ids, NDArray[np.float32]]:
        """The ids [n] of all items and their places [n, 2] on the map, both of one moment."""
        return projection.places(self._shelf, method)

    # --- searching ----------------------------------------------------------------------------------------

    @property
    def encoder(self) -> Encoder:
        """The model of the index, loaded when it is first needed."""
        with self._loading:
            if self._encoder is None:
                if self._shelf.card["model"] is None:
                    raise ValueError(f"{self.folder} was made of vectors and has no model; search by vector or by id")
                self._encoder = self._checked(self.folder / folder.MODEL, str(self.folder / folder.MODEL))
            return self._encoder

    def embed(self, images: Sequence[Picture], *, batch_size: int = 64) -> Vectors:
        """What the model makes of pictures, [n, d]."""
        return self.encoder.encode(images, batch_size=batch_size)

    def search(
        self,
        query: asking.Query,
        k: int = 10,
        *,
        where: filters.Where | None = None,
        expand: int = 0,
        rerank: str | None = None,
        label: str | None = None,
    ) -> Results:
        """The k items that are nearest to a query.

        Args:
            query: A path, a Pillow image, the bytes of a picture file, uint8 pixels, a vector, or the id of an item,
                which does not find itself.
            where: Only among items like these, as ``{"label": "jay", "year": {">=": 2019}}``.
            expand: Search again with the mean of the query and so many of its neighbours.
            rerank: "k_reciprocal": first those who would find the query in turn.
            label: The query's class, to tell right from wrong; an item's own unless told.
        """
        return asking.search(self, query, k, where=where, expand=expand, rerank=rerank, label=label)

    def search_vectors(
        self, vectors: NDArray[Any], k: int = 10, *, where: filters.Where | None = None
    ) -> list[list[Hit]]:
        """The k nearest items of each vector [q, d], the nearest first; fewer where there are no more."""
        scores, ids = self.nearest(vectors, k, allowed=None if where is None else self.select(where))
        return [_hits(*row) for row in zip(ids.tolist(), scores.tolist(), strict=True)]

    def nearest(self, vectors: NDArray[Any], k: int, *, allowed: Ids | None = None) -> tuple[Vectors, Ids]:
        """Scores and ids of the k nearest items, [q, k] each, or of all where there are fewer; −1 for none."""
        most = max(1, min(whole("k", k), len(self)))
        asked = checked_vectors("vectors", vectors, self.dim, self.measure)
        return self._shelf.state.backend.search(asked, most, allowed)

    def select(self, where: filters.Where) -> Ids:
        """The ids of the items that pass a filter."""
        state = self._shelf.state
        key = state.generation, state.table.version, repr(where)
        with self._remembering:
            found = self._masks.get(key)
        if found is None:
            found = filters.select(state.table.items(), where)
            with self._remembering:
                self._masks[key] = found
                while len(self._masks) > MASKS:
                    self._masks.popitem(last=False)
        return found

    def near_duplicates(self, threshold: float = 0.95, *, watch: Watch | None = None) -> list[Group]:
        """Groups of items whose vectors are nearly the same: a cosine of ``threshold`` or more, or the same file."""
        from nearfar.search.duplicates import find

        return find(self, threshold, watch=watch)

    def clusters(self, k: int | None = None, *, seed: int = 0, watch: Watch | None = None) -> Clusters:
        """All items in k groups by k-means; as many as the root of half their number unless told."""
        from nearfar.search.clusters import find

        return find(self, k, seed=seed, watch=watch)

    def _checked(self, model: str | Path | Model, name: str) -> Encoder:
        """The model, if it is the one that the index was made with."""
        encoder = Encoder(save.load(model) if isinstance(model, (str, Path)) else model, device=self._device)
        known = self._shelf.card["model"]
        if known is None or encoder.fingerprint != known["fingerprint"]:
            own = "no model, but vectors" if known is None else f"{known['name']} {known['fingerprint'][:12]}"
            raise folder.BadIndex(
                f"{name} ({encoder.fingerprint[:12]}) is not the model of {self.folder}, which was made with {own}; "
                "vectors of two models cannot be compared"
            )
        return encoder


def _hits(ids: list[int], scores: list[float]) -> list[Hit]:
    """Ids and scores of a query together, without what stands for nothing."""
    hits = list(map(_hit, zip(ids, scores, strict=True)))
    return hits if not ids or ids[-1] != NOTHING else [hit for hit in hits if hit.id != NOTHING]
