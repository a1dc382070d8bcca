"""The folder of an index: what lies where, and how it changes without ever being half changed.

    my.index/
      index.json       format, version, model, backend, and which generation of files counts
      model/           the model, so that an index needs nothing else to be searched by picture
      data-000002/     vectors.npy, ids.npy, items.json, thumbnails.bin and .npy, what the backend keeps
      journal-000002   changes since then
      map-pca.npz      places on a plane

A new generation is written beside the old one. It counts from the moment when index.json, which is replaced in one go,
names it; the old one goes away after that.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from nearfar.search.items import Item
from nearfar.search.storage import thumbnails
from nearfar.search.storage.table import Ids, Table, Vectors
from nearfar.utils.atomic import sync_folder, whole_file, write_json, write_text
from nearfar.utils.system import locked

FORMAT = "nearfar index"
VERSION = 1  # goes up when folders written from then on cannot be read by what is older
CARD, MODEL, LOCK = "index.json", "model", ".lock"
# What the card must tell.
KEYS = ("dim", "measure", "backend", "model", "generation", "next_id", "uses", "facts", "built", "changed")
BLOCK = 8192  # vectors that are written at once


class BadIndex(ValueError):
    """A folder that cannot be used as asked; the message says why and what to do."""


def data_folder(folder: Path, generation: int) -> Path:
    return folder / f"data-{generation:06}"


def journal_file(folder: Path, generation: int) -> Path:
    return folder / f"journal-{generation:06}"


def exists(folder: Path) -> bool:
    return (folder / CARD).is_file()


def read_card(folder: Path) -> dict[str, Any]:
    """What index.json says; refused where it is of a newer version or no index."""
    file = folder / CARD
    if not file.is_file():
        raise FileNotFoundError(f"{folder} contains no index: {CARD} does not exist")
    try:
        card = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise BadIndex(f"{file} is no JSON: {error}") from error
    if not isinstance(card, dict) or card.get("format") != FORMAT:
        raise BadIndex(f"{file} does not describe an index: its format is not {FORMAT!r}")
    version = card.get("version")
    if version != VERSION:
        newer = isinstance(version, int) and version > VERSION
        advice = "a newer nearfar wrote it, and reads it" if newer else "build it again"
        raise BadIndex(f"{folder} is an index of version {version!r}; this nearfar reads version {VERSION}: {advice}")
    absent = [key for key in KEYS if key not in card]
    if absent:
        raise BadIndex(f"{file} is damaged: it does not tell {', '.join(absent)}; build the index again")
    return card


def write_card(folder: Path, card: Mapping[str, Any]) -> None:
    write_json(folder / CARD, {"format": FORMAT, "version": VERSION, **card})
    sync_folder(folder)


@contextmanager
def owned(folder: Path) -> Iterator[None]:
    """The only writer among all processes; refused at once where there is another."""
    lock = folder / LOCK

    def refuse() -> None:
        raise BadIndex(f"{folder} is being changed by another process; wait for it, or open the index read-only")

    with locked(lock, waiting=refuse):
        yield


def write_table(place: Path, ids: Ids, items: Sequence[Item], blocks: Iterable[Vectors], dim: int) -> None:
    """Items and vectors into the folder of a new generation."""
    place.mkdir(parents=True, exist_ok=True)
    with whole_file(place / "vectors.npy") as draft, open(draft, "wb") as file:
        header = {"descr": "<f4", "fortran_order": False, "shape": (len(ids), dim)}
        np.lib.format.write_array_header_1_0(file, header)
        for block in blocks:
            file.write(np.ascontiguousarray(block, dtype="<f4").data)
        file.flush()
    with whole_file(place / "ids.npy") as draft, open(draft, "wb") as file:
        np.save(file, ids)
    columns = {
        "names": [item.name for item in items],
        "labels": [item.label for item in items],
        "hashes": [item.hash for item in items],
        "metadata": [dict(item.metadata) for item in items],
    }
    write_text(place / "items.json", json.dumps(columns, ensure_ascii=False, allow_nan=False))


def read_table(place: Path) -> Table:
    """Items and vectors of a generation; the vectors are mapped, not read."""
    with _readable(place / "ids.npy") as file:
        ids = np.load(file, allow_pickle=False)
    with _readable(place / "vectors.npy") as file:
        size = file.stat().st_size
        vectors: Vectors = np.load(file, mmap_mode="r" if len(ids) else None, allow_pickle=False)
    with _readable(place / "items.json") as file:
        columns = json.loads(file.read_text(encoding="utf-8"))
        names, labels, hashes, metadata = (list(columns[key]) for key in ("names", "labels", "hashes", "metadata"))
    counts = {len(ids), len(vectors), len(names), len(labels), len(hashes), len(metadata)}
    if len(counts) > 1 or vectors.ndim != 2 or (np.diff(ids) <= 0).any() or size < vectors.nbytes:
        raise BadIndex(f"{place} is damaged: its files do not fit each other; build the index again")
    rows = zip(ids.tolist(), names, labels, hashes, metadata, strict=True)
    return Table(vectors, [Item(*row) for row in rows])


def blocks(table: Table, ids: Ids) -> Iterator[Vectors]:
    """The vectors of items, some at a time."""
    for start in range(0, len(ids), BLOCK):
        yield table.vectors(ids[start : start + BLOCK])


def open_pack(place: Path) -> thumbnails.Pack | None:
    """The thumbnails of a generation, where it has any."""
    if not (place / thumbnails.PLACES).is_file():
        return None
    with _readable(place / thumbnails.PLACES):
        return thumbnails.Pack(place)


@contextmanager
def _readable(file: Path) -> Iterator[Path]:
    """A file to read: whatever it holds instead of what it should, the error names it."""
    try:
        yield file
    except FileNotFoundError:
        raise
    except (OSError, ValueError, EOFError, KeyError, TypeError) as error:
        raise BadIndex(f"{file} is damaged ({type(error).__name__}: {error}); build the index again") from error


@contextmanager
def new_generation(folder: Path, generation: int) -> Iterator[Path]:
    """A folder to write to; it gets its name when the block ends well."""
    place = data_folder(folder, generation)
    draft = folder / f".{place.name}.{os.getpid()}"
    for left in (draft, place):  # of a process that was killed before its generation counted
        shutil.rmtree(left, ignore_errors=True)
    try:
        draft.mkdir(parents=True)
        yield draft
        os.replace(draft, place)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def sweep(folder: Path, generation: int) -> None:
    """Remove what other generations left behind."""
    keep = {data_folder(folder, generation).name, journal_file(folder, generation).name}
    for path in folder.iterdir():
        name = path.name.lstrip(".")
        if path.name in keep or not name.startswith(("data-", "journal-")):
            continue
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
