"""The index: embeddings of images that can be searched by image, by vector or by item.

Python, the command line and the HTTP server all search through ``Index.search_batch``.
"""

from __future__ import annotations

import hashlib
import threading
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from nearfar.data.store.decode import BadImage
from nearfar.metrics.calibration import SearchThreshold, Threshold
from nearfar.metrics.retrieval import RERANKINGS
from nearfar.networks.weights import save
from nearfar.search import filters, projection
from nearfar.search.backends import check_name
from nearfar.search.backends.base import MEASURES, NO_ID
from nearfar.search.encoder import Encoder, ImageInput, Model
from nearfar.search.engines import ENGINES, Embed, embed_batches, ray_engine
from nearfar.search.images import Images, Labels, check_labels, digest, list_images
from nearfar.search.items import Hit, Item, Items
from nearfar.search.reranking import expanded, k_reciprocal
from nearfar.search.results import Neighbor, Results
from nearfar.search.storage import (
    MODEL,
    VERSION,
    BadIndex,
    Ids,
    IndexStorage,
    Vectors,
    checked_vectors,
    erase,
    index_exists,
)
from nearfar.search.storage.storage import Row
from nearfar.search.update import Update, update
from nearfar.utils import deadline
from nearfar.utils.progress import Watch
from nearfar.utils.tensors import ArrayInput, Frame, as_array, as_device, check_values
from nearfar.utils.validation import number, one_of, whole

if TYPE_CHECKING:
    from nearfar.search.clusters import Clusters
    from nearfar.search.duplicates import DuplicateGroup

CACHED_FILTERS = 32

QueryInput = ImageInput | int | NDArray[Any] | Tensor | Frame  # an image, the id of an item, or a vector

_hit = partial(tuple.__new__, Hit)  # of an (id, score) pair; faster than calling Hit


@dataclass(frozen=True, kw_only=True)
class VectorQuery:
    """A query whose vector is known.

    Args:
        vector: The vector [d].
        k: Number of neighbors.
        where: Only items that pass this filter, such as ``{"label": "jay", "year": {">=": 2019}}``.
        expand: Search again with the mean of the query and this many of its neighbors.
        rerank: "k_reciprocal" ranks items first that would find the query in turn.
        exclude: Id of an item to leave out, usually the one that the vector belongs to.

    Example:
        >>> VectorQuery(vector=np.array([1.0, 0.0]), k=3).rerank is None
        True
    """

    vector: NDArray[Any]
    k: int = 10
    where: filters.Where | None = None
    expand: int = 0
    rerank: str | None = None
    exclude: int | None = None

    def __post_init__(self) -> None:
        whole("k", self.k)
        whole("expand", self.expand, low=0)
        if self.rerank is not None:
            one_of("rerank", self.rerank, RERANKINGS)

    @property
    def has_similarities(self) -> bool:
        """Whether scores are similarities of the query itself, which a threshold applies to."""
        return not self.expand and self.rerank is None


class Index:
    """Images, their embeddings, and a way to search them. ``build`` makes a new index, ``open`` opens one.

    Searches may run in many threads, also while one thread adds items. When ``add``, ``add_images``, ``add_vectors`` or
    ``remove`` return, the change is on disk and survives a crash of the process.

    Args:
        storage: The opened index folder.
        device: Device for the model: "auto", "cpu", "cuda", …
        encoder: The model, if it is already loaded.

    Attributes:
        dim: Dimensions of the vectors.
        measure: "cosine" or "euclidean".
        skipped: Names of files that ``build`` could not read, each with the reason.

    Example:
        >>> import tempfile
        >>> points = np.array([[1, 0], [0.8, 0.6], [0, 1]], dtype=np.float32)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with Index.from_vectors(points, labels=["jay", "jay", "wren"], out=f"{folder}/my.index") as index:
        ...         hits = index.search_vectors(points[:1], 2)[0]
        ...         [(hit.id, round(hit.score, 3)) for hit in hits], index.item(1).label
        ([(0, 1.0), (1, 0.8)], 'jay')
    """

    def __init__(self, storage: IndexStorage, *, device: str = "auto", encoder: Encoder | None = None) -> None:
        self.storage, self._device, self._encoder = storage, device, encoder
        self.skipped: list[tuple[str, str]] = []
        self.dim, self.measure = int(storage.settings["dim"]), str(storage.settings["measure"])
        self._loading, self._filtering = threading.Lock(), threading.Lock()
        self._filtered: OrderedDict[tuple[object, str], Ids] = OrderedDict()
        weakref.finalize(self, storage.close).atexit = False

    # --- building and opening -----------------------------------------------------------------------------

    @classmethod
    def build(
        cls,
        model: str | Path | Model,
        images: Images,
        *,
        out: str | Path,
        backend: str = "auto",
        labels: Labels = "folder",
        metadata: Mapping[str, Mapping[str, Any]] | None = None,
        measure: str = "cosine",
        threshold: Threshold | SearchThreshold | None = None,
        device: str = "auto",
        batch_size: int = 64,
        engine: str = "local",
        jobs: int | None = None,
        ray_address: str | None = None,
        watch: Watch | None = None,
    ) -> Index:
        """Embed images and write a new index folder. ``update`` resumes a build that was interrupted.

        Args:
            model: A folder with model.safetensors and model.json, the name of a network with published weights, or a
                model as ``nearfar.load`` returns it.
            images: A folder or archive of images, a list of files, a ``nearfar.data.Dataset``, or a file of vectors for
                a model that reads vectors.
            out: The new folder of the index.
            backend: "exact", "exact:int8" (the same neighbors, for many vectors on a CPU), "faiss" (or "faiss:flat",
                "faiss:ivf", "faiss:hnsw"), "milvus" (or "milvus:http://host:19530"); "auto" uses exact search for few
                images and FAISS for many.
            labels: "folder": the class of an image is the name of its folder; a mapping from names to classes; or None.
            metadata: Additional data for images, by name, to filter by.
            measure: "cosine" or "euclidean".
            threshold: The score from which on an item matches a query; see ``set_threshold``.
            device: Device for the model: "auto", "cpu", "cuda", …
            batch_size: Number of images per forward pass.
            engine: "local", or "ray": workers of a Ray cluster embed the images. ``model`` and ``images`` must then be
                paths that all machines can read. The result is the same.
            jobs: Number of Ray workers; by default as many as there are GPUs or, without any, CPUs.
            ray_address: Address of the Ray cluster.
            watch: Receives the progress; see ``nearfar.utils.progress``.

        Returns:
            The new index, open for writing.

        Raises:
            BadIndex: The folder already contains an index.
            ValueError: None of the images can be read, or an argument has a value that is not allowed.
        """
        out = Path(out)
        check_name(backend)
        check_labels(labels)
        one_of("measure", measure, MEASURES)
        whole("batch_size", batch_size)
        one_of("engine", engine, ENGINES)
        if index_exists(out):
            raise BadIndex(f"{out} already contains an index; update it, or choose another folder")
        listed = list_images(images, labels)
        loaded = save.load(model) if isinstance(model, (str, Path)) else model
        encoder = Encoder(loaded, device=device)
        is_new = not out.exists()
        known: dict[str, Any] = {
            "name": str(save.describe(loaded).get("name", "ensemble")),
            "fingerprint": encoder.fingerprint,
            **({} if encoder.in_dim is None else {"in_dim": encoder.in_dim}),
        }
        workers: AbstractContextManager[Embed] = nullcontext(partial(embed_batches, encoder=encoder, size=batch_size))
        if engine == "ray":
            workers = ray_engine(model, images, device=device, batch_size=batch_size, jobs=jobs, address=ray_address)
        with workers as embed:
            storage = IndexStorage.create(
                out,
                {"dim": encoder.dim, "measure": measure, "backend": backend, "model": known},
                np.empty((0, encoder.dim), dtype=np.float32),
                [],
                device=as_device("device", device),
                prepare=lambda: save.save(loaded, out / MODEL),
                inputs=(model, images),
            )
            index = cls(storage, device=device, encoder=encoder)
            try:
                index.skipped = update(index, listed, metadata=metadata, embed=embed, watch=watch).skipped
                if not len(index) and is_new:
                    raise ValueError(f"none of the images can be read; the first reason: {': '.join(index.skipped[0])}")
                index.compact(backend=backend, watch=watch)
                index.set_threshold(threshold)
            except BaseException as error:
                # What was interrupted is resumed by an update; an error would find the index in its way the next time.
                useless = isinstance(error, Exception) and is_new and not len(index)
                written = index.storage.written() if useless else ()
                index.close()
                if useless:
                    erase(out, written)
                raise
        return index

    @classmethod
    def from_vectors(
        cls,
        vectors: ArrayInput,
        *,
        out: str | Path,
        names: Sequence[str] | Frame | None = None,
        labels: Sequence[str | None] | Frame | None = None,
        metadata: Sequence[Mapping[str, Any]] | Frame | None = None,
        backend: str = "auto",
        measure: str = "cosine",
        watch: Watch | None = None,
    ) -> Index:
        """Write a new index of existing vectors. It has no model and is searched by vector or by item.

        Args:
            vectors: The vectors [n, d]: an array, a tensor or a DataFrame.
            out: The new folder of the index.
            names: A name for each vector; by default its id.
            labels: A class for each vector: a list, an array or a Series.
            metadata: Additional data for each vector, to filter by: a list of tables, or a DataFrame.
            backend: As for ``build``.
            measure: "cosine" or "euclidean".
            watch: Receives the progress.

        Returns:
            The new index, open for writing.
        """
        check_name(backend)
        one_of("measure", measure, MEASURES)
        points = checked_vectors("vectors", vectors, None, measure)
        items = [Item(id, *row) for id, row in enumerate(_rows(len(points), names, labels, metadata, first=0))]
        settings = {"dim": points.shape[1], "measure": measure, "backend": backend, "model": None}
        progress = None if watch is None else watch("indexing")
        return cls(IndexStorage.create(Path(out), settings, points, items, progress=progress), device="cpu")

    @classmethod
    def open(
        cls,
        place: str | Path,
        *,
        read_only: bool = False,
        device: str = "auto",
        model: str | Path | Model | None = None,
        milvus: str | None = None,
    ) -> Index:
        """Open an index folder.

        Args:
            place: The folder.
            read_only: Open for reading. Any number of processes may read; only one at a time may write.
            device: Device for the model: "auto", "cpu", "cuda", …
            model: The model to search with. By default the index loads its own copy; a different model is refused.
            milvus: Address of the Milvus server, for an index that uses one. It is not stored in the folder; the
                default is that in the environment variable NEARFAR_MILVUS.

        Returns:
            The opened index.

        Raises:
            FileNotFoundError: The folder contains no index.
            BadIndex: The index is damaged, of a newer version, open for writing elsewhere, or of another model.
        """
        storage = IndexStorage(Path(place), read_only=read_only, device=as_device("device", device), milvus=milvus)
        index = cls(storage, device=device)
        if model is not None:
            try:
                index._encoder = index._checked(model, str(model) if isinstance(model, (str, Path)) else "model")
            except BaseException:
                index.close()
                raise
        return index

    def refreshed(self) -> Index:
        """Follow the changes of other processes now. From the first call on, other methods no longer do so themselves.

        Returns:
            This index; or a new one, if it was opened read-only and the folder was compacted or built again. Then this
            one can still be searched, and is closed when nothing refers to it.

        Raises:
            FileNotFoundError: The folder was removed or, if the index is open for writing, replaced.
            BadIndex: What is in the folder now cannot be opened.
        """
        storage = self.storage
        storage.looks = False
        if not storage.is_outdated():
            storage.refresh()
            return self
        fresh = Index.open(self.folder, read_only=True, device=self._device, milvus=storage.milvus)
        fresh.storage.looks = False
        if fresh.storage.settings["model"] == storage.settings["model"]:
            fresh._encoder = self._encoder
        return fresh

    def close(self) -> None:
        """Close all files and release the lock of the folder."""
        self.storage.close()

    def __enter__(self) -> Index:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- items --------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self.storage.table)

    def __contains__(self, id: object) -> bool:
        return id in self.storage.table

    @property
    def folder(self) -> Path:
        """The folder of the index."""
        return self.storage.folder

    @property
    def identity(self) -> str:
        """A text that no other index has, one that was built in the same folder included."""
        return str(self.storage.settings["identity"])

    @property
    def version(self) -> str:
        """A text that changes whenever the items change, the same in all processes."""
        return hashlib.sha256(repr(self.storage.version).encode()).hexdigest()[:16]

    @property
    def items(self) -> Items:
        """All current items, ordered by id."""
        return self.storage.table.items()

    def item(self, id: int) -> Item:
        """Return one item.

        Args:
            id: Id of the item.

        Raises:
            MissingItem: There is no such item.
        """
        return self.storage.table.item(_id(id))

    def vector(self, id: int) -> Vectors:
        """Return the vector [d] of an item; it has length one where cosines are compared.

        Args:
            id: Id of the item.
        """
        return self.storage.table.vector(_id(id))

    def vectors(self) -> Vectors:
        """Return all vectors [n, d], in the order of ``items``."""
        return self.storage.table.vectors()

    def thumbnail(self, id: int) -> bytes:
        """Return a JPEG with at most 160 pixels per side; empty for an item without an image.

        Args:
            id: Id of the item.
        """
        item = self.item(id)
        return self.thumbnails([item.id]).get(item.id, b"")

    def thumbnails(self, ids: Sequence[int]) -> dict[int, bytes]:
        """Return the thumbnails of several items by id. Items that do not exist are left out.

        Args:
            ids: Ids of the items.
        """
        return self.storage.thumbnails(ids)

    def info(self) -> dict[str, Any]:
        """Return facts about the index as JSON-compatible data, without paths or server addresses."""
        settings = self.storage.settings
        return {
            "format": VERSION,
            "count": len(self),
            "classes": len(self.items.labels()),
            "dim": self.dim,
            "measure": self.measure,
            "backend": self.storage.backend.name,
            **{key: value for key, value in settings.get("facts", {}).items() if key != "collection"},
            "model": settings["model"],
            "threshold": None if self.threshold is None else self.threshold.to_json(),
            "built": settings["built"],
            "changed": settings["changed"],
            "pending_bytes": self.storage.database.pending_bytes(),
        }

    # --- changes ------------------------------------------------------------------------------------------

    def add(
        self,
        images: Images,
        *,
        labels: Labels = "folder",
        metadata: Mapping[str, Mapping[str, Any]] | None = None,
        watch: Watch | None = None,
    ) -> Update:
        """Add images. Images that are already in the index under the same name are skipped.

        Args:
            images: A folder or archive of images, a list of files, or a ``nearfar.data.Dataset``.
            labels: As for ``build``.
            metadata: Additional data for images, by name.
            watch: Receives the progress.

        Returns:
            What was added and what was skipped.
        """
        return update(self, images, follow=False, labels=labels, metadata=metadata, watch=watch)

    def add_images(
        self, images: Iterable[tuple[str, ImageInput, str | None, Mapping[str, Any]]], *, batch_size: int = 64
    ) -> list[int]:
        """Add images that are already in memory. If one of them cannot be read, none is added.

        Args:
            images: Tuples of name, image, label and metadata.
            batch_size: Number of images per forward pass.

        Returns:
            The ids of the new items.
        """
        encoder, rows, inputs, thumbnails = self.encoder, [], [], []
        for name, image, label, metadata in images:
            pixels, small = encoder.preprocess_with_thumbnail(image)
            rows.append((str(name), None if label is None else str(label), digest(image), dict(metadata or {})))
            inputs.append(pixels)
            thumbnails.append(small)
        if not rows:
            return []
        batches = [inputs[start : start + batch_size] for start in range(0, len(inputs), batch_size)]
        points = np.concatenate([encoder.vectors(batch) for batch in batches])
        return self.storage.add(rows, checked_vectors("vectors", points, self.dim, self.measure), thumbnails)

    def add_vectors(
        self,
        vectors: ArrayInput,
        *,
        names: Sequence[str] | Frame | None = None,
        labels: Sequence[str | None] | Frame | None = None,
        metadata: Sequence[Mapping[str, Any]] | Frame | None = None,
    ) -> list[int]:
        """Add vectors of the same model.

        Args:
            vectors: The vectors [n, d].
            names: A name for each vector; by default its id.
            labels: A class for each vector.
            metadata: Additional data for each vector.

        Returns:
            The ids of the new items.
        """
        points = checked_vectors("vectors", vectors, self.dim, self.measure)
        return self.storage.add(_rows(len(points), names, labels, metadata, first=self.storage.next_id), points)

    def remove(self, ids: Iterable[int]) -> None:
        """Remove items. If one of them does not exist, none is removed. Ids are never reused.

        Args:
            ids: Ids of the items.

        Raises:
            MissingItem: There is no item with one of the ids.
            TypeError: One of the ids is not a whole number.
        """
        self.storage.remove([_id(id) for id in ids])

    def update(
        self,
        images: Images,
        *,
        prune: bool = False,
        most: float = 1.0,
        labels: Labels = "folder",
        metadata: Mapping[str, Mapping[str, Any]] | None = None,
        watch: Watch | None = None,
    ) -> Update:
        """Make the index match a folder. Only new images are embedded; moved images keep their ids.

        Args:
            images: A folder or archive of images, a list of files, or a ``nearfar.data.Dataset``.
            prune: Remove items whose images no longer exist.
            most: The largest share of the items that ``prune`` removes; of more it removes none.
            labels: As for ``build``.
            metadata: Additional data for images, by name.
            watch: Receives the progress.

        Returns:
            What was added, moved, replaced and skipped.
        """
        most = number("most", most, low=0.0, high=1.0) if prune else 0.0
        return update(self, images, most=most, labels=labels, metadata=metadata, watch=watch)

    def compact(self, *, backend: str | None = None, watch: Watch | None = None) -> None:
        """Merge recent changes into the main files, and optionally change the backend.

        Changes are durable without it. Compaction makes searches and opening faster after many changes.

        Args:
            backend: The backend to build, as for ``build``; by default, changes are added to the one that is there.
            watch: Receives the progress.
        """
        self.storage.compact(backend=backend, progress=None if watch is None else watch("indexing"))

    def set_threshold(self, threshold: Threshold | SearchThreshold | None) -> None:
        """Store the score from which on an item matches a query, for ``Results.matches`` and ``Results.unknown``.

        Args:
            threshold: A threshold of the model of the index, as ``nearfar.metrics.calibrate_search`` or
                ``nearfar.training.calibrate`` returns it; it follows the number of items. One of pairs alone, as
                ``nearfar.metrics.calibrate`` returns it, does not. None removes it.

        Raises:
            ValueError: It is of another measure or of another model.
        """
        if threshold is not None:
            if isinstance(threshold, Threshold) and threshold.search is not None:
                threshold = threshold.search
            if threshold.measure != self.measure:
                raise ValueError(f"threshold is of measure {threshold.measure!r}; {self.folder} uses {self.measure!r}")
            model, known = threshold.about.get("model"), self.storage.settings["model"]
            if model is not None and known is not None and model != known["fingerprint"]:
                raise ValueError(
                    f"threshold is of the model {model[:12]}; {self.folder} was built with {known['fingerprint'][:12]}"
                )
        self.storage.store({"threshold": None if threshold is None else threshold.to_json()})

    def check(self) -> list[str]:
        """Compare all files with their digests, and the data of a Milvus server with the vectors.

        Opening an index does so for the first 128 MiB of vectors and 50,000 items.

        Returns:
            What is damaged: a sentence for each file, with what to do. A backend that is damaged costs nothing, since
            the vectors are kept: ``compact`` builds it again if it is given its name.
        """
        damages = self.storage.check()
        if self.storage.settings["model"] is not None:
            try:
                self._checked(self.folder / MODEL, str(self.folder / MODEL))
            except (OSError, ValueError) as error:
                damages.append(f"{error}; restore {self.folder / MODEL} from a copy, or save the model there again")
        return damages

    # --- searching ----------------------------------------------------------------------------------------

    @property
    def encoder(self) -> Encoder:
        """The model of the index, loaded on first use."""
        with self._loading:
            if self._encoder is None:
                if self.storage.settings["model"] is None:
                    raise ValueError(
                        f"{self.folder} was built from vectors and has no model; search by vector or by id"
                    )
                self._encoder = self._checked(self.folder / MODEL, str(self.folder / MODEL))
            return self._encoder

    @property
    def threshold(self) -> Threshold | SearchThreshold | None:
        """The score from which on an item matches a query, for the current number of items; None if not known."""
        known = self.storage.settings.get("threshold")
        if known is None or "table" not in known:
            return None if known is None else Threshold(**known)
        return SearchThreshold(**known).at(len(self))

    def embed(self, images: Sequence[ImageInput], *, batch_size: int = 64) -> Vectors:
        """Return the embeddings [n, d] of images, or of vectors if the model reads vectors.

        Args:
            images: Paths, bytes of image files, Pillow images, or uint8 arrays [h, w], [h, w, 1] or [h, w, 3]. Arrays
                are used as they are; nothing is decoded again.
            batch_size: Number of images per forward pass.
        """
        return self.encoder.encode(images, batch_size=batch_size)

    @property
    def in_dim(self) -> int | None:
        """Dimensions of the vectors that the model reads; None if it reads images, or if there is no model."""
        dim: int | None = (self.storage.settings["model"] or {}).get("in_dim")
        return dim

    def embedded(self, vector: NDArray[Any]) -> Vectors:
        """Return the embedding of a vector if the model reads vectors, and otherwise the vector, as float32.

        Args:
            vector: The vector [in_dim], or an embedding [dim].
        """
        return vector.astype(np.float32) if self.in_dim is None else self.encoder.encode(vector[None])[0]

    def search(
        self,
        query: QueryInput,
        k: int = 10,
        *,
        where: filters.Where | None = None,
        expand: int = 0,
        rerank: str | None = None,
        label: str | None = None,
    ) -> Results:
        """Find the k items that are nearest to a query.

        Args:
            query: A path, the bytes of an image file, a Pillow image, uint8 pixels, a vector, or the id of an item,
                which is not among its own results. If the model reads vectors, a vector is embedded first; otherwise it
                is an embedding.
            k: Number of neighbors.
            where: Only items that pass this filter, such as ``{"label": "jay", "year": {">=": 2019}}``.
            expand: Search again with the mean of the query and this many of its neighbors.
            rerank: "k_reciprocal" ranks items first that would find the query in turn.
            label: Class of the query, to mark right and wrong results; by default that of an item that is the query.

        Returns:
            The query with its neighbors, nearest first.
        """
        name, vector, id, thumbnail, known = self._read(query)
        wanted = VectorQuery(vector=vector, k=k, where=where, expand=expand, rerank=rerank, exclude=id)
        (nearest,) = self.search_batch([wanted])
        thumbnails = self.thumbnails([neighbor.item.id for neighbor in nearest])
        # Others were removed in the meantime.
        neighbors = tuple(neighbor for neighbor in nearest if neighbor.item.id in thumbnails)
        shown = (thumbnail, *(thumbnails[neighbor.item.id] for neighbor in neighbors))
        threshold = self.threshold if wanted.has_similarities else None
        return Results(name, known if label is None else label, neighbors, shown, threshold)

    def search_batch(self, queries: Sequence[VectorQuery]) -> list[list[Neighbor]]:
        """Find the neighbors of several vectors, each with its own filter and settings.

        Args:
            queries: The queries; those with equal filters share one search.

        Returns:
            The neighbors of each query, nearest first.
        """
        groups: dict[str, list[int]] = defaultdict(list)
        for place, query in enumerate(queries):
            groups[repr(query.where)].append(place)
        answers: list[list[Neighbor]] = [[] for _ in queries]
        for places in groups.values():
            where = queries[places[0]].where
            allowed = None if where is None else self.select(where)
            plain = [place for place in places if queries[place].rerank is None]
            if plain:
                rows = [self._expanded(queries[place], allowed) for place in plain]
                points = rows[0][None] if len(rows) == 1 else np.stack(rows)
                most = max(queries[place].k + (queries[place].exclude is not None) for place in plain)
                scores, ids = self.nearest(points, most, allowed=allowed)
                for row, place in enumerate(plain):
                    answers[place] = self._neighbors(queries[place], scores[row], ids[row])
            for place in places:
                query = queries[place]
                if query.rerank is not None:
                    point = self._expanded(query, allowed)[None]
                    scores, ids = k_reciprocal(self, point, query.k, allowed=allowed, exclude=query.exclude)
                    answers[place] = self._neighbors(query, scores[0], ids[0])
        return answers

    def search_vectors(
        self, vectors: ArrayInput, k: int = 10, *, where: filters.Where | None = None
    ) -> list[list[Hit]]:
        """Find the ids of the k items nearest to each vector.

        Args:
            vectors: The query vectors [q, d].
            k: Number of neighbors.
            where: Only items that pass this filter.

        Returns:
            Ids and scores for each query, nearest first; fewer than k where there are no more.
        """
        scores, ids = self.nearest(vectors, k, allowed=None if where is None else self.select(where))
        return [_hits(*row) for row in zip(ids.tolist(), scores.tolist(), strict=True)]

    def nearest(self, vectors: ArrayInput, k: int, *, allowed: Ids | None = None) -> tuple[Vectors, Ids]:
        """Return scores and ids of the k items nearest to each vector, as arrays [q, k].

        Args:
            vectors: The query vectors [q, d].
            k: Number of neighbors; at most the number of items is used.
            allowed: Only these ids, in ascending order.

        Returns:
            Scores and ids. Where there are fewer than k items, ids are −1 and scores −inf.
        """
        deadline.check()
        table, backend = self.storage.current()
        most = max(1, min(whole("k", k), len(table)))
        return backend.search(checked_vectors("vectors", vectors, self.dim, self.measure), most, allowed)

    def select(self, where: filters.Where) -> Ids:
        """Return the ids of the items that pass a filter, in ascending order.

        Args:
            where: The filter; see ``nearfar.search.filters.select``.
        """
        key = self.storage.version, repr(where)
        with self._filtering:
            ids = self._filtered.get(key)
        if ids is None:
            ids = self._select(where)
            with self._filtering:
                self._filtered[key] = ids
                while len(self._filtered) > CACHED_FILTERS:
                    self._filtered.popitem(last=False)
        return ids

    # --- the whole index ----------------------------------------------------------------------------------

    def map(self, method: str = "pca") -> NDArray[np.float32]:
        """Project all items to a plane.

        Args:
            method: "pca", or "tsne", which keeps neighbors together better and takes longer.

        Returns:
            Coordinates [n, 2] in the order of ``items``. They are cached until too many items have changed.
        """
        return self.map_with_ids(method)[1]

    def map_with_ids(self, method: str = "pca") -> tuple[Ids, NDArray[np.float32]]:
        """Project all items to a plane, and return the ids [n] with the coordinates [n, 2].

        Args:
            method: "pca" or "tsne".
        """
        ids, vectors = self.storage.table.everything()
        return projection.project(self.folder, ids, vectors, method, write=not self.storage.read_only)

    def near_duplicates(self, threshold: float = 0.95, *, watch: Watch | None = None) -> list[DuplicateGroup]:
        """Find groups of items that are nearly the same.

        Args:
            threshold: Lowest cosine of two duplicates, from 0 to 1. Copies of one file always belong together.
            watch: Receives the progress.

        Returns:
            The groups, largest first.
        """
        from nearfar.search.duplicates import find

        return find(self, threshold, watch=watch)

    def clusters(self, k: int | None = None, *, seed: int = 0, watch: Watch | None = None) -> Clusters:
        """Group all items with k-means.

        Args:
            k: Number of clusters; by default the square root of half the number of items.
            seed: Seed of the initial centers.
            watch: Receives the progress.

        Returns:
            The clusters, largest first.
        """
        from nearfar.search.clusters import find

        return find(self, k, seed=seed, watch=watch)

    def _expanded(self, query: VectorQuery, allowed: Ids | None) -> NDArray[Any]:
        if not query.expand:
            return query.vector
        mean: Vectors = expanded(self, query.vector[None], query.expand, allowed, query.exclude)[0]
        return mean

    def _neighbors(self, query: VectorQuery, scores: Vectors, ids: Ids) -> list[Neighbor]:
        """The items of the first k ids, without the excluded one and any that were removed in the meantime."""
        numbers = ids.tolist()
        items = self.storage.loaded.existing(numbers)
        pairs = zip(numbers, scores.tolist(), strict=True)
        neighbors = [Neighbor(items[id], score) for id, score in pairs if id in items and id != query.exclude]
        return neighbors[: query.k]

    def _read(self, query: QueryInput) -> tuple[str, Vectors, int | None, bytes, str | None]:
        """Name, vector, item id, thumbnail and label of a query."""
        if isinstance(query, (int, np.integer)) and not isinstance(query, bool):
            item = self.item(int(query))
            return item.name, self.vector(item.id), item.id, self.thumbnail(item.id), item.label
        query = as_array("query", query)
        if isinstance(query, (Tensor, np.ndarray)):
            check_values("query", query)
        if isinstance(query, Tensor):
            query = query.detach().cpu().numpy()
        if isinstance(query, np.ndarray) and (
            query.dtype.kind == "f" or (query.ndim == 1 and query.dtype.kind in "iu")
        ):
            if query.ndim != 1:
                raise ValueError(f"query has shape {query.shape}; it must be one vector [{self.in_dim or self.dim}]")
            return "a vector", self.embedded(query), None, b"", None
        if isinstance(query, (str, Path)):
            file = Path(query)
            if not file.is_file():
                reason = "that is not a file" if file.exists() else "there is no such file"
                raise FileNotFoundError(f"query is {str(query)!r}; {reason}")
            data = file.read_bytes()
            try:
                vector, thumbnail = self.encoder.encode_with_thumbnail(data)
            except BadImage as error:
                raise BadImage(f"{query}: {error}") from None
            return file.name, vector, None, thumbnail, None
        if isinstance(query, (bytes, Image.Image)) or (isinstance(query, np.ndarray) and query.dtype == np.uint8):
            vector, thumbnail = self.encoder.encode_with_thumbnail(query)
            return "an image", vector, None, thumbnail, None
        raise TypeError(
            f"query is a {type(query).__name__}; it must be a path, an image, a vector of floats, or the id of an item"
        )

    def _select(self, where: filters.Where) -> Ids:
        """Look up labels in the database, which has an index of them, and check other conditions in Python."""
        table = self.storage.table
        labels = filters.exact_labels(where)
        if labels is None:
            return filters.select(table.items(), where)
        items = table.existing(self.storage.database.ids_with_labels(labels).tolist())
        if len(where) == 1:
            return np.array(list(items), dtype=np.int64)
        return filters.select(table.items(), where, list(items.values()))

    def _checked(self, model: str | Path | Model, name: str) -> Encoder:
        """The encoder of a model, refused unless the index was built with this model."""
        encoder = Encoder(save.load(model) if isinstance(model, (str, Path)) else model, device=self._device)
        known = self.storage.settings["model"]
        if known is None or encoder.fingerprint != known["fingerprint"]:
            origin = "vectors, without a model" if known is None else f"{known['name']} {known['fingerprint'][:12]}"
            raise BadIndex(
                f"{name} ({encoder.fingerprint[:12]}) is not the model of {self.folder}, which was built with {origin}"
                "; vectors of two models cannot be compared"
            )
        return encoder


def _id(value: object) -> int:
    """An id, which is a whole number: 4.7 and True stand for no item."""
    if isinstance(value, (int, np.integer)) and not isinstance(value, bool):
        return int(value)
    raise TypeError(f"id is {value!r}; a whole number is needed")


def _hits(ids: list[int], scores: list[float]) -> list[Hit]:
    """Ids and scores of one query, without placeholders."""
    hits = list(map(_hit, zip(ids, scores, strict=True)))
    return hits if not ids or ids[-1] != NO_ID else [hit for hit in hits if hit.id != NO_ID]


def _rows(
    count: int,
    names: Sequence[str] | Frame | None,
    labels: Sequence[str | None] | Frame | None,
    metadata: Sequence[Mapping[str, Any]] | Frame | None,
    *,
    first: int,
) -> list[Row]:
    """A row for each vector."""
    records: Any = metadata
    if hasattr(records, "to_dict"):  # a DataFrame
        records = records.to_dict("records")
    given = {"names": as_array("names", names), "labels": as_array("labels", labels), "metadata": records}
    for name, values in given.items():
        if values is not None and len(values) != count:
            raise ValueError(f"{name} has {len(values)} entries; it must have {count}, one for each vector")
    words = range(first, first + count) if names is None else given["names"]
    classes = [None] * count if labels is None else given["labels"]
    return [
        (str(word), None if label is None or label != label else str(label), "", dict(record))  # NaN is no label
        for word, label, record in zip(words, classes, records or [{}] * count, strict=True)
    ]
