"""An index: pictures that can be found by pictures."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from nearfar.networks import saving
from nearfar.progress import Watch
from nearfar.search import asking, building, filters, folder, plane
from nearfar.search.encoder import Encoder, Model, Picture, device_of
from nearfar.search.items import Hit, Item, Items
from nearfar.search.shelf import Shelf
from nearfar.search.table import Ids, Vectors
from nearfar.settings import whole

if TYPE_CHECKING:
    from nearfar.search.building import Labels, Pictures, Update
    from nearfar.search.clusters import Clusters
    from nearfar.search.duplicates import Group
    from nearfar.search.results import Results

MASKS = 32  # filters whose items are remembered


class Index:
    """Pictures, what a model makes of them, and how to find them. ``build`` makes one, ``open`` opens it.

    Searches may come from many threads, also while one of them adds. When ``add``, ``add_images`` or ``remove`` return,
    what they did survives whatever happens to the process.

    >>> import tempfile
    >>> points = np.array([[1, 0], [0.8, 0.6], [0, 1]], dtype=np.float32)
    >>> with tempfile.TemporaryDirectory() as place:
    ...     with Index.from_vectors(points, labels=["jay", "jay", "wren"], out=f"{place}/my.index") as index:
    ...         hits = index.search_vectors(points[:1], 2)[0]
    ...         [(hit.id, round(hit.score, 3)) for hit in hits], index.item(1).label
    ([(0, 1.0), (1, 0.8)], 'jay')
    """

    def __init__(self, shelf: Shelf, *, device: str = "auto", encoder: Encoder | None = None) -> None:
        self._shelf, self._device, self._encoder = shelf, device, encoder
        self._loading = threading.Lock()
        self._masks: OrderedDict[tuple[int, int, str], Ids] = OrderedDict()

    # --- making and opening -------------------------------------------------------------------------------

    @classmethod
    def build(
        cls,
        model: str | Path | Model,
        pictures: Pictures,
        *,
        out: str | Path,
        backend: str = "auto",
        labels: Labels = "folder",
        metadata: Mapping[str, Mapping[str, Any]] | None = None,
        measure: str = "cosine",
        device: str = "auto",
        batch_size: int = 64,
        watch: Watch | None = None,
    ) -> Index:
        """Embed pictures and leave an index folder. One that was interrupted is gone on with by ``update``.

        Parameters
            model       a folder with model.safetensors and model.json, or a model, as ``nearfar.load`` gives it.
            pictures    a folder or an archive of pictures, a list of files, or a ``nearfar.data.DataSet``.
            out         the folder of the index, a new one.
            backend     "exact", "faiss" (or "faiss:flat", "faiss:ivf", "faiss:hnsw"), "milvus" (or
                        "milvus:http://host:19530"); "auto" is exact for few pictures and faiss for many.
            labels      "folder": a picture's class is the folder it lies in; a mapping from names; None for no classes.
            metadata    more about pictures, by name, to filter by.
            measure     what is near: "cosine" or "euclidean".
            device      where the model computes: "auto", "cpu", "cuda", …
            batch_size  pictures that the model reads at once.
            watch       is told of the progress, see ``nearfar.progress``.
        """
        return building.build(
            cls,
            model,
            pictures,
            out=Path(out),
            backend=backend,
            labels=labels,
            metadata=metadata,
            measure=measure,
            device=device,
            batch_size=batch_size,
            watch=watch,
        )

    @classmethod
    def from_vectors(
        cls,
        vectors: NDArray[Any],
        *,
        out: str | Path,
        names: Sequence[str] | None = None,
        labels: Sequence[str | None] | None = None,
        metadata: Sequence[Mapping[str, Any]] | None = None,
        backend: str = "auto",
        measure: str = "cosine",
        watch: Watch | None = None,
    ) -> Index:
        """An index of vectors [n, d] that come from elsewhere; it has no model and is searched by vector or id."""
        return building.from_vectors(
            cls,
            vectors,
            out=Path(out),
            names=names,
            labels=labels,
            metadata=metadata,
            backend=backend,
            measure=measure,
            watch=watch,
        )

    @classmethod
    def open(
        cls,
        place: str | Path,
        *,
        read_only: bool = False,
        device: str = "auto",
        model: str | Path | Model | None = None,
    ) -> Index:
        """Open an index folder.

        Parameters
            read_only  anybody may; for changes there is one process at a time.
            model      to search with; the index has its own, and any other is refused.
        """
        found = cls(Shelf(Path(place), read_only=read_only, device=device_of(device)), device=device)
        if model is not None:
            try:
                found._encoder = found._checked(model, str(model) if isinstance(model, (str, Path)) else "model")
            except BaseException:
                found.close()
                raise
        return found

    def close(self) -> None:
        """Let go of the folder, for others to write to."""
        self._shelf.close()

    def __enter__(self) -> Index:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- what there is ------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._shelf.table)

    def __contains__(self, id: object) -> bool:
        return id in self._shelf.table

    @property
    def folder(self) -> Path:
        return self._shelf.place

    @property
    def dim(self) -> int:
        return self._shelf.table.dim

    @property
    def measure(self) -> str:
        """ "cosine" or "euclidean"."""
        return str(self._shelf.card["measure"])

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
        """What is worth telling, as JSON has it; nothing about the disk it lies on."""
        card = self._shelf.card
        labels = self.items.labels()
        return {
            "format": card["version"],
            "count": len(self),
            "classes": len(labels),
            "dim": self.dim,
            "measure": self.measure,
            "backend": self._shelf.state.backend.name,
            **{key: value for key, value in card.get("facts", {}).items() if key != "address"},
            "model": card["model"],
            "built": card["built"],
            "changed": card["changed"],
            "pending_bytes": self._shelf.pending,
        }

    def map(self, method: str = "pca") -> NDArray[np.float32]:
        """Places of all items on a plane, [n, 2], in the order of ``items``; kept until they are stale.

        Parameters
            method  "pca": the two directions with the most spread; "tsne" keeps neighbours together.
        """
        return plane.places(self._shelf, method)

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

        Parameters
            query    a path, a Pillow image, the bytes of a picture file, uint8 pixels, a vector, or the id of an item,
                     which does not find itself.
            where    only among items like these, as ``{"label": "jay", "year": {">=": 2019}}``.
            expand   search again with the mean of the query and so many of its neighbours.
            rerank   "k_reciprocal": first those who would find the query in turn.
            label    the query's class, to tell right from wrong; an item's own unless told.
        """
        return asking.search(self, query, k, where=where, expand=expand, rerank=rerank, label=label)

    def search_vectors(
        self, vectors: NDArray[Any], k: int = 10, *, where: filters.Where | None = None
    ) -> list[list[Hit]]:
        """The k nearest items of each vector [q, d], the nearest first; fewer where there are no more."""
        scores, ids = self.nearest(vectors, k, allowed=None if where is None else self.select(where))
        return [
            [Hit(id, score) for id, score in zip(*row, strict=True) if id >= 0]
            for row in zip(ids.tolist(), scores.tolist(), strict=True)
        ]

    def nearest(self, vectors: NDArray[Any], k: int, *, allowed: Ids | None = None) -> tuple[Vectors, Ids]:
        """Scores and ids of the k nearest items, [q, k] each; −1 where there are no more."""
        whole("k", k)
        asked = building.checked_vectors("vectors", vectors, self.dim, self.measure)
        return self._shelf.state.backend.search(asked, k, allowed)

    def select(self, where: filters.Where) -> Ids:
        """The ids of the items that pass a filter."""
        table = self._shelf.table
        key = id(table), table.version, repr(where)
        found = self._masks.get(key)
        if found is None:
            found = filters.select(table.items(), where)
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

    # --- changing -----------------------------------------------------------------------------------------

    def add(self, pictures: Pictures, *, labels: Labels = "folder", watch: Watch | None = None) -> Update:
        """Add pictures: a folder, or a list of files. Those that are there already are passed over."""
        return building.update(self, pictures, labels=labels, watch=watch)

    def add_images(
        self, images: Iterable[tuple[str, Picture, str | None, Mapping[str, Any]]], *, batch_size: int = 64
    ) -> list[int]:
        """Add pictures by (name, picture, label, metadata), and return their ids. All of them or, on an error, none."""
        return building.add_images(self, list(images), batch_size=batch_size)

    def add_vectors(
        self,
        vectors: NDArray[Any],
        *,
        names: Sequence[str] | None = None,
        labels: Sequence[str | None] | None = None,
        metadata: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[int]:
        """Add vectors [n, d] that come from the same model."""
        return building.add_vectors(self, vectors, names=names, labels=labels, metadata=metadata)

    def remove(self, ids: Iterable[int]) -> None:
        """Remove items; all must be there. Their ids are never given to others."""
        self._shelf.remove([int(id) for id in ids])

    def update(
        self,
        pictures: Pictures,
        *,
        prune: bool = False,
        labels: Labels = "folder",
        metadata: Mapping[str, Mapping[str, Any]] | None = None,
        watch: Watch | None = None,
    ) -> Update:
        """Make the index follow a folder: only what is new is embedded, and what was moved keeps its id.

        Parameters
            prune   remove items whose pictures are gone.
        """
        return building.update(self, pictures, prune=prune, labels=labels, metadata=metadata, watch=watch)

    def save(self, *, backend: str | None = None, watch: Watch | None = None) -> None:
        """Fold the journal into the files, and perhaps change the backend. Nothing is lost without it."""
        self._shelf.save(backend=backend, progress=None if watch is None else watch("indexing"))

    compact = save

    def _checked(self, model: str | Path | Model, name: str) -> Encoder:
        """The model, if it is the one that the index was made with."""
        encoder = Encoder(saving.load(model) if isinstance(model, (str, Path)) else model, device=self._device)
        known = self._shelf.card["model"]
        if known is None or encoder.fingerprint != known["fingerprint"]:
            own = "no model, but vectors" if known is None else f"{known['name']} {known['fingerprint'][:12]}"
            raise folder.BadIndex(
                f"{name} ({encoder.fingerprint[:12]}) is not the model of {self.folder}, which was made with {own}; "
                "vectors of two models cannot be compared"
            )
        return encoder
