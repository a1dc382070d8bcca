"""Opening the database of an index, and upgrading index folders of version 1.

Version 1 had everything but vectors in other files: settings in index.json, items in data-NNNNNN/items.json, packed
thumbnails beside them, and changes in a journal of checksummed records. The upgrade copies them to index.sqlite;
vectors and the files of the backend stay as they are. Replacing index.json is the last step, so a crash leaves the old
index as it was.
"""

from __future__ import annotations

import json
import logging
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from nearfar.search.items import Item
from nearfar.search.storage import files
from nearfar.search.storage.database import MEMORY, SETTINGS, Database
from nearfar.search.storage.files import BadIndex, readable

MARK = b"\x89NFJ"
HEAD = struct.Struct("<4sIQI")  # mark, length of the JSON header, length of the payload, checksum of both

log = logging.getLogger("nearfar.search")


def open_database(folder: Path, *, read_only: bool) -> Database:
    """Open the database of an index; a folder of version 1 is upgraded first.

    A folder of version 1 that cannot be written, or is open for writing elsewhere, is read into memory instead.
    """
    if files.read_card(folder)["version"] < files.VERSION:
        if not read_only:
            _upgrade(folder)
        else:
            try:
                with files.write_lock(folder):
                    _upgrade(folder)
            except (BadIndex, OSError) as error:
                if files.read_card(folder)["version"] < files.VERSION:
                    log.warning("%s of index version 1 cannot be upgraded now (%s)", folder, error)
                    database = Database(MEMORY)
                    with database.transaction():
                        _import(folder, database)
                    return database
    return Database(folder / files.DATABASE, read_only=read_only)


def _upgrade(folder: Path) -> None:
    card = files.read_card(folder)
    if card["version"] == files.VERSION:  # another process was faster
        return
    file = folder / files.DATABASE
    if file.exists():  # of an upgrade that was interrupted; another file is refused
        Database(file).close()
    else:
        Database.create(file, lambda database: _import(folder, database))
    files.write_card(folder)
    files.sweep(folder, _obsolete(card))
    log.warning("%s was upgraded from index version 1 to version %d", folder, files.VERSION)


def _import(folder: Path, database: Database) -> None:
    """Copy settings, items, thumbnails and changes of version 1."""
    card = files.read_card(folder)
    absent = [key for key in SETTINGS if key not in card]
    if absent:
        raise BadIndex(f"{folder / files.CARD} is damaged: {', '.join(absent)} missing; build the index again")
    place = files.data_folder(folder, int(card["generation"]))
    ids, _ = files.read_vectors(place)
    with readable(place / "items.json") as file:
        columns = json.loads(file.read_text(encoding="utf-8"))
        names, labels, hashes, metadata = (list(columns[key]) for key in ("names", "labels", "hashes", "metadata"))
    if len({len(ids), len(names), len(labels), len(hashes), len(metadata)}) > 1:
        raise BadIndex(f"{place} is damaged: its files do not match each other; build the index again")
    rows = zip(ids.tolist(), names, labels, hashes, metadata, strict=True)
    database.insert((Item(*row) for row in rows), _thumbnails(place, ids.tolist()))
    there, highest, damaged = set(ids.tolist()), -1, 0
    for header, payload in _journal(folder / f"journal-{card['generation']:06}"):
        if header is None:
            damaged += 1
        elif header["do"] == "remove":
            gone = [int(id) for id in header["ids"] if id in there]  # a damaged record may have added the others
            database.remove(gone)
            there.difference_update(gone)
        else:
            items = [Item(*values) for values in header["items"]]
            if header["do"] == "change":
                database.change([item for item in items if item.id in there])
                continue
            size = 4 * header["dim"] * len(items)
            vectors = np.frombuffer(payload[:size], dtype="<f4").reshape(len(items), header["dim"])
            database.add(items, vectors, list(_cut(payload[size:], header["thumbnails"])))
            there.update(item.id for item in items)
            highest = max([highest, *(item.id for item in items)])
    if damaged:
        log.warning("the journal of %s has %d damaged places; the changes there are lost", folder, damaged)
    settings = {key: card[key] for key in SETTINGS}
    settings |= {"next_id": max(int(card["next_id"]), highest + 1), "obsolete": _obsolete(card)}
    database.write_settings(settings)


def _obsolete(card: dict[str, Any]) -> list[str]:
    """Return the names of the files of version 1 that version 2 does not need."""
    number = int(card["generation"])
    old = ("items.json", "thumbnails.bin", "thumbnails.npy")
    return [f"journal-{number:06}", *(f"data-{number:06}/{name}" for name in old)]


def _thumbnails(place: Path, ids: list[int]) -> Iterator[tuple[int, bytes]]:
    """Ids and thumbnails of a data folder of version 1: one file of JPEGs, and one of their offsets."""
    if not (place / "thumbnails.npy").is_file():
        return
    with readable(place / "thumbnails.npy") as file:
        offsets = np.load(file, allow_pickle=False)
        if offsets.shape != (len(ids) + 1,) or (place / "thumbnails.bin").stat().st_size != int(offsets[-1]):
            raise ValueError("its offsets do not match thumbnails.bin")
        with open(place / "thumbnails.bin", "rb") as pictures:
            for id, length in zip(ids, np.diff(offsets).tolist(), strict=True):
                yield id, pictures.read(length)


def _journal(file: Path) -> Iterator[tuple[dict[str, Any] | None, bytes]]:
    """Header and payload of each record. A damaged one before others is None; an incomplete last one is left out."""
    data = file.read_bytes() if file.is_file() else b""
    place, skipped = 0, False
    while 0 <= place < len(data):
        record = _record(data, place)
        if record is None:
            place, skipped = data.find(MARK, place + 1), True
            continue
        if skipped:
            yield None, b""
            skipped = False
        header, payload, place = record
        yield header, payload


def _record(data: bytes, place: int) -> tuple[dict[str, Any], bytes, int] | None:
    """The record at an offset, and where it ends; None if there is no complete one."""
    start = place + HEAD.size
    if start > len(data):
        return None
    mark, words, length, checksum = HEAD.unpack_from(data, place)
    end = start + words + length
    if mark != MARK or end > len(data) or zlib.crc32(data[start:end]) != checksum:
        return None
    try:
        header = json.loads(data[start : start + words])
    except ValueError:
        return None
    return (header, data[start + words : end], end) if isinstance(header, dict) else None


def _cut(data: bytes, lengths: list[int]) -> Iterator[bytes]:
    place = 0
    for length in lengths:
        yield data[place : place + length]
        place += length
