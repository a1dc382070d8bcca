"""An index: pictures that can be found by pictures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from nearfar.search import build as building
from nearfar.search import update as updating
from nearfar.search.encoder import Model, Picture
from nearfar.search.lookup import Lookup
from nearfar.search.pictures import Labels, Pictures
from nearfar.search.storage.shelf import Shelf
from nearfar.search.update import Update
from nearfar.utils.inputs import as_device
from nearfar.utils.progress import Watch


class Index(Lookup):
    """Pictures, what a model makes of them, and how to find them. ``build`` makes one, ``open`` opens it.

    Searches may come from many threads, also while one of them adds. When ``add``, ``add_images`` or ``remove`` return,
    what they did survives whatever happens to the process.

    >>> import tempfile
    >>> import numpy as np
    >>> points = np.array([[1, 0], [0.8, 0.6], [0, 1]], dtype=np.float32)
    >>> with tempfile.TemporaryDirectory() as place:
    ...     with Index.from_vectors(points, labels=["jay", "jay", "wren"], out=f"{place}/my.index") as index:
    ...         hits = index.search_vectors(points[:1], 2)[0]
    ...         [(hit.id, round(hit.score, 3)) for hit in hits], index.item(1).label
    ([(0, 1.0), (1, 0.8)], 'jay')
    """

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

        Args:
            model: A folder with model.safetensors and model.json, or a model, as ``nearfar.load`` gives it.
            pictures: A folder or an archive of pictures, a list of files, or a ``nearfar.data.Dataset``.
            out: The folder of the index, a new one.
            backend: "exact", "faiss" (or "faiss:flat", "faiss:ivf", "faiss:hnsw"), "milvus" (or
                "milvus:http://host:19530"); "auto" is exact for few pictures and faiss for many.
            labels: "folder": a picture's class is the folder it lies in; a mapping from names; None for no classes.
            metadata: More about pictures, by name, to filter by.
            measure: What is near: "cosine" or "euclidean".
            device: Where the model computes: "auto", "cpu", "cuda", …
            batch_size: Pictures that the model reads at once.
            watch: Is told of the progress, see ``nearfar.utils.progress``.
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

        Args:
            read_only: Anybody may; for changes there is one process at a time.
            model: To search with; the index has its own, and any other is refused.
        """
        found = cls(Shelf(Path(place), read_only=read_only, device=as_device("device", device)), device=device)
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

    # --- changing -----------------------------------------------------------------------------------------

    def add(
        self,
        pictures: Pictures,
        *,
        labels: Labels = "folder",
        metadata: Mapping[str, Mapping[str, Any]] | None = None,
        watch: Watch | None = None,
    ) -> Update:
        """Add pictures: a folder, or a list of files. Those that are there already are passed over."""
        return updating.update(self, pictures, follow=False, labels=labels, metadata=metadata, watch=watch)

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

        Args:
            prune: Remove items whose pictures are gone.
        """
        return updating.update(self, pictures, prune=prune, labels=labels, metadata=metadata, watch=watch)

    def save(self, *, backend: str | None = None, watch: Watch | None = None) -> None:
        """Fold the journal into the files, and perhaps change the backend. Nothing is lost without it."""
        self._shelf.save(backend=backend, progress=None if watch is None else watch("indexing"))
