"""How pictures and vectors get into an index."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from nearfar.inputs import as_vectors, check_finite
from nearfar.networks import saving
from nearfar.progress import Watch
from nearfar.search import folder
from nearfar.search.backends import MEASURES, check_name
from nearfar.search.encoder import Encoder, Model, Picture, Pixels, ahead, device_of
from nearfar.search.gathering import FOLDER, Labels, Listed, Pictures, check_labels, digest, gather
from nearfar.search.items import Item
from nearfar.search.shelf import Shelf
from nearfar.search.table import Table, Vectors
from nearfar.settings import one_of, whole

if TYPE_CHECKING:
    from nearfar.search.index import Index

__all__ = ["Labels", "Pictures", "Update", "add_images", "add_vectors", "build", "checked_vectors", "from_vectors"]

SMALLEST = 1e-30  # lengths of vectors that have no direction


@dataclass
class Update:
    """What became of pictures.

    Parameters
        added      ids of pictures that are new, or new at this place.
        moved      ids of pictures that are called otherwise now.
        replaced   ids that are gone, as their pictures are others now.
        missing    ids of items whose pictures are not there.
        pruned     whether those were removed.
        unchanged  how many are as they were.
        skipped    name and reason of what is no picture.
    """

    added: list[int] = field(default_factory=list)
    moved: list[int] = field(default_factory=list)
    replaced: list[int] = field(default_factory=list)
    missing: list[int] = field(default_factory=list)
    pruned: bool = False
    unchanged: int = 0
    skipped: list[tuple[str, str]] = field(default_factory=list)


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
    loaded = saving.load(model) if isinstance(model, (str, Path)) else model
    encoder = Encoder(loaded, device=device)
    new = not out.exists()
    known = {"name": str(saving.describe(loaded).get("name", "ensemble")), "fingerprint": encoder.fingerprint}
    saving.save(loaded, out / folder.MODEL)
    card = {"dim": encoder.dim, "measure": measure, "backend": backend, "model": known}
    empty = Table(np.empty((0, encoder.dim), dtype=np.float32), [])
    shelf = Shelf.create(out, {**card, "backend": "exact"}, empty, device=device_of(device))
    index = kind(shelf, device=device, encoder=encoder)
    try:
        update(index, listed, labels=labels, metadata=metadata, batch_size=batch_size, watch=watch)
        if not len(index) and new:
            shutil.rmtree(out)
            raise ValueError("none of the pictures can be read; the first reason: " + _first_reason(listed, encoder))
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


def update(
    index: Index,
    pictures: Pictures,
    *,
    prune: bool = False,
    follow: bool = True,
    labels: Labels = FOLDER,
    metadata: Mapping[str, Mapping[str, Any]] | None = None,
    batch_size: int = 64,
    watch: Watch | None = None,
) -> Update:
    """See ``Index.update``; without ``follow`` nothing that is there is moved or removed."""
    listed, shelf, result = gather(pictures, labels), index._shelf, Update(pruned=prune)
    more = metadata or {}
    hashes = _hashes(listed, result, watch)
    items = index.items
    names = {each.name for each in listed}
    there = {item.name: item for item in items}
    by_hash: dict[str, Item] = {item.hash: item for item in items if item.hash}
    left: dict[str, list[Item]] = {}  # pictures that are no longer where they were
    for item in items if follow else ():
        if hashes.get(item.name) != item.hash:
            left.setdefault(item.hash, []).append(item)
    changed, copied, fresh = [], [], []
    for each in listed:
        if each.name not in hashes:
            continue
        mine, about = there.get(each.name), more.get(each.name)
        if mine is not None and mine.hash == hashes[each.name]:
            result.unchanged += 1
        elif left.get(hashes[each.name]):
            mine = left[hashes[each.name]].pop(0)
            result.moved.append(mine.id)
        elif hashes[each.name] in by_hash:
            copied.append((each, by_hash[hashes[each.name]]))
            continue
        else:
            fresh.append(each)
            continue
        now = Item(mine.id, each.name, each.label, mine.hash, mine.metadata if about is None else dict(about))
        if now != mine:
            changed.append(now)
    shelf.change(changed)
    if copied:
        result.added += shelf.add(
            [each.name for each, _ in copied],
            np.stack([index.vector(old.id) for _, old in copied]),
            labels=[each.label for each, _ in copied],
            hashes=[old.hash for _, old in copied],
            metadata=[dict(more.get(each.name, {})) for each, _ in copied],
            pictures=[index.thumbnail(old.id) for _, old in copied],
        )
    result.added += _embed(index, fresh, more, batch_size, result, watch)
    for item in (item for group in left.values() for item in group):
        (result.replaced if item.name in names else result.missing).append(item.id)
    shelf.remove(result.replaced + (result.missing if prune else []))
    return result


def checked_vectors(name: str, vectors: NDArray[Any], dim: int | None, measure: str) -> Vectors:
    """Vectors [n, d] as they are compared: float32, and of length one for cosines."""
    points = as_vectors(name, vectors)
    if dim is not None and points.shape[1] != dim:
        raise ValueError(f"{name} has {points.shape[1]} dimensions; those of this index have {dim}")
    check_finite(name, points)
    points = points.float()
    if measure == "cosine":
        points = points / torch.linalg.vector_norm(points, dim=1, keepdim=True).clamp_(min=SMALLEST)
    found: Vectors = np.ascontiguousarray(points.cpu().numpy(), dtype=np.float32)
    return found


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


def _hashes(listed: Sequence[Listed], result: Update, watch: Watch | None) -> dict[str, str]:
    """Of all pictures that can be read, by name."""

    def work(each: Listed) -> str | OSError:
        try:
            return digest(each.read())
        except OSError as error:
            return error

    progress = None if watch is None else watch("reading")
    found = {}
    for done, (each, value) in enumerate(zip(listed, ahead(work, listed), strict=True), start=1):
        if isinstance(value, OSError):
            result.skipped.append((each.name, str(value)))
        else:
            found[each.name] = value
        if progress is not None:
            progress(done, len(listed))
    return found


def _embed(
    index: Index,
    fresh: Sequence[Listed],
    metadata: Mapping[str, Mapping[str, Any]],
    batch_size: int,
    result: Update,
    watch: Watch | None,
) -> list[int]:
    """Add pictures batch by batch; each batch is on disk before the next begins."""
    if not fresh:
        return []
    encoder, ids, done = index.encoder, [], 0
    progress = None if watch is None else watch("embedding")
    for batch in _batches(fresh, encoder, batch_size):
        good: list[tuple[Listed, Pixels, bytes, str]] = []
        for each, seen in batch:
            if isinstance(seen, Exception):
                result.skipped.append((each.name, " ".join(str(seen).split()) or type(seen).__name__))
            else:
                good.append((each, *seen))
        if good:
            points = encoder.vectors([pixels for _, pixels, _, _ in good])
            ids += index._shelf.add(
                [each.name for each, _, _, _ in good],
                checked_vectors("vectors", points, index.dim, index.measure),
                labels=[each.label for each, _, _, _ in good],
                hashes=[hash for _, _, _, hash in good],
                metadata=[dict(metadata.get(each.name, {})) for each, _, _, _ in good],
                pictures=[picture for _, _, picture, _ in good],
            )
        done += len(batch)
        if progress is not None:
            progress(done, len(fresh))
    return ids


Seen = tuple[Pixels, bytes, str] | Exception


def _batches(fresh: Sequence[Listed], encoder: Encoder, size: int) -> Iterator[list[tuple[Listed, Seen]]]:
    def work(each: Listed) -> Seen:
        try:
            picture = each.read()
            return (*encoder.look_twice(picture), digest(picture))
        except (OSError, ValueError) as error:  # no picture, or not to be read
            return error

    batch: list[tuple[Listed, Seen]] = []
    for each, seen in zip(fresh, ahead(work, fresh, most=2 * size), strict=True):
        batch.append((each, seen))
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch


def _first_reason(listed: Sequence[Listed], encoder: Encoder) -> str:
    try:
        encoder.look(listed[0].read())
    except (OSError, ValueError) as error:
        return f"{listed[0].name}: {error}"
    return "unknown"
