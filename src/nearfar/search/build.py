"""How pictures and vectors get into an index."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from nearfar.networks.weights import save
from nearfar.search.backends import MEASURES, check_name
from nearfar.search.encoder import Encoder, Model, Picture
from nearfar.search.items import Item
from nearfar.search.pictures import Labels, Pictures, check_labels, digest, gather
from nearfar.search.storage import folder
from nearfar.search.storage.shelf import Shelf
from nearfar.search.storage.table import Table, checked_vectors
from nearfar.search.update import update
from nearfar.utils.inputs import as_device
from nearfar.utils.progress import Watch
from nearfar.utils.validation import one_of, whole

if TYPE_CHECKING:
    from nearfar.search.index import Index


def build(
    kind: type[Index],
    model: str | Path | Model,
    pictures: Pictures,
    *,
    out: Path,
    backend: str,
    labels: Labels,
    metadata: Mapping[str, Mapping[str, Any]] | None,
    measure: str,
    device: str,
    batch_size: int,
    watch: Watch | None,
) -> Index:
    """See ``Index.build``."""
    check_name(backend)
    check_labels(labels)
    one_of("measure", measure, MEASURES)
    whole("batch_size", batch_size)
    if folder.exists(out):
        raise folder.BadIndex(f"{out} holds an index already; update it, or name another folder")
    listed = gather(pictures, labels)
    loaded = save.load(model) if isinstance(model, (str, Path)) else model
    encoder = Encoder(loaded, device=device)
    new = not out.exists()
    known = {"name": str(save.describe(loaded).get("name", "ensemble")), "fingerprint": encoder.fingerprint}
    card = {"dim": encoder.dim, "measure": measure, "backend": backend, "model": known}
    empty = Table(np.empty((0, encoder.dim), dtype=np.float32), [])
    shelf = Shelf.create(
        out,
        card,
        empty,
        device=as_device("device", device),
        prepare=lambda: save.save(loaded, out / folder.MODEL),
    )
    index = kind(shelf, device=device, encoder=encoder)
    try:
        found = update(index, listed, labels=labels, metadata=metadata, batch_size=batch_size, watch=watch)
        index.skipped = found.skipped
        if not len(index) and new:
            shutil.rmtree(out)
            raise ValueError(f"none of the pictures can be read; the first reason: {': '.join(found.skipped[0])}")
        index.save(backend=backend, watch=watch)
    except BaseException:
        index.close()
        raise
    return index


def from_vectors(
    kind: type[Index],
    vectors: NDArray[Any],
    *,
    out: Path,
    names: Sequence[str] | None,
    labels: Sequence[str | None] | None,
    metadata: Sequence[Mapping[str, Any]] | None,
    backend: str,
    measure: str,
    watch: Watch | None,
) -> Index:
    """See ``Index.from_vectors``."""
    check_name(backend)
    one_of("measure", measure, MEASURES)
    points = checked_vectors("vectors", vectors, None, measure)
    columns = _columns(len(points), names, labels, metadata, first=0)
    items = [Item(id, *row) for id, row in enumerate(zip(*columns, strict=True))]
    card = {"dim": points.shape[1], "measure": measure, "backend": backend, "model": None}
    progress = None if watch is None else watch("indexing")
    shelf = Shelf.create(out, card, Table(points, items), progress=progress)
    return kind(shelf, device="cpu")


def add_images(
    index: Index, images: Sequence[tuple[str, Picture, str | None, Mapping[str, Any]]], *, batch_size: int
) -> list[int]:
    """See ``Index.add_images``."""
    encoder, seen = index.encoder, []
    for _, picture, _, _ in images:
        seen.append((*encoder.look_twice(picture), digest(picture)))
    parts = [seen[start : start + batch_size] for start in range(0, len(seen), batch_size)]
    if not parts:
        return []
    points = np.concatenate([encoder.vectors([pixels for pixels, _, _ in part]) for part in parts])
    return index._shelf.add(
        [str(name) for name, _, _, _ in images],
        checked_vectors("vectors", points, index.dim, index.measure),
        labels=[label for _, _, label, _ in images],
        hashes=[each[2] for each in seen],
        metadata=[dict(more or {}) for _, _, _, more in images],
        pictures=[each[1] for each in seen],
    )


def add_vectors(
    index: Index,
    vectors: NDArray[Any],
    *,
    names: Sequence[str] | None,
    labels: Sequence[str | None] | None,
    metadata: Sequence[Mapping[str, Any]] | None,
) -> list[int]:
    """See ``Index.add_vectors``."""
    points = checked_vectors("vectors", vectors, index.dim, index.measure)
    words, classes, hashes, more = _columns(len(points), names, labels, metadata, first=index._shelf.next_id)
    return index._shelf.add(words, points, labels=classes, hashes=hashes, metadata=more, pictures=[b""] * len(points))


def _columns(
    count: int,
    names: Sequence[str] | None,
    labels: Sequence[str | None] | None,
    metadata: Sequence[Mapping[str, Any]] | None,
    *,
    first: int,
) -> tuple[list[str], list[str | None], list[str], list[dict[str, Any]]]:
    """What is known of vectors, one for each."""
    for name, given in (("names", names), ("labels", labels), ("metadata", metadata)):
        if given is not None and len(given) != count:
            raise ValueError(f"{name} has {len(given)} entries; needed are {count}, one for each vector")
    words = [str(first + row) for row in range(count)] if names is None else [str(name) for name in names]
    given = [None] * count if labels is None else labels
    classes = [None if label is None else str(label) for label in given]
    return words, classes, [""] * count, [{} if metadata is None else dict(metadata[row]) for row in range(count)]
