"""The journal of an index: every change, on disk before it is acknowledged.

A record is a mark, the lengths of a JSON header and of a payload, a checksum of both, and both. A record that was cut
short by a crash is the last one and nobody was told of it: it is passed over, and cut off by the next writer. A record
that was damaged later, with whole ones behind it, is passed over as well, and counted.
"""

from __future__ import annotations

import json
import os
import struct
import threading
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nearfar.utils.atomic import sync_folder

MARK = b"\x89NFJ"
HEAD = struct.Struct("<4sIQI")  # mark, length of the header, length of the payload, checksum
PIECE = 1 << 20  # bytes that are looked through at once for the next mark


@dataclass(frozen=True)
class Record:
    """A change.

    Args:
        header: What changed, as JSON has it.
        payload: Bytes that belong to it.
        offset: Where the payload begins in the file.
    """

    header: dict[str, Any]
    payload: bytes
    offset: int


class Journal:
    """A file of changes.

    Args:
        file: Made when the first change comes.
        read_only: Nothing is written, nor is a torn end cut off.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder, Journal(Path(folder) / "journal") as journal:
    ...     offset = journal.append({"do": "add"}, b"pixels")
    ...     [(record.header, record.payload) for record in journal.records()], journal.read(offset, 3)
    ([({'do': 'add'}, b'pixels')], b'pix')
    """

    def __init__(self, file: Path, *, read_only: bool = False) -> None:
        self._handle: int | None = None
        self.file, self.read_only = file, read_only
        self.damaged = 0  # records that cannot be read, though others come after them
        self._lock = threading.Lock()
        if read_only:
            if file.exists():
                self._handle = os.open(file, os.O_RDONLY | getattr(os, "O_BINARY", 0))
        else:
            self._handle = os.open(file, os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o666)
            sync_folder(file.parent)
        self.size = 0  # bytes up to the end of the last whole record
        for record in self.records():
            self.size = record.offset + len(record.payload)
        if not read_only and self._handle is not None:
            os.ftruncate(self._handle, self.size)

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def append(self, header: Mapping[str, Any], payload: bytes = b"") -> int:
        """Add a change, and return where its payload begins; it is on disk then."""
        if self._handle is None or self.read_only:
            raise ValueError(f"{self.file} is open for reading only")
        words = json.dumps(header, ensure_ascii=False, allow_nan=False).encode()
        crc = zlib.crc32(payload, zlib.crc32(words))
        record = HEAD.pack(MARK, len(words), len(payload), crc) + words + payload
        with self._lock:
            start = self.size
            try:
                os.lseek(self._handle, start, os.SEEK_SET)
                view = memoryview(record)
                while len(view):
                    view = view[os.write(self._handle, view) :]
                os.fsync(self._handle)
            except OSError:
                os.ftruncate(self._handle, start)  # as on a full disk: what is there stays whole
                raise
            self.size = start + len(record)
        return start + HEAD.size + len(words)

    def read(self, offset: int, length: int) -> bytes:
        """A piece of a payload; shorter only where the file ends."""
        parts: list[bytes] = []
        while length and (part := self._part(offset, length)):  # no system gives gigabytes at once
            parts.append(part)
            offset, length = offset + len(part), length - len(part)
        return b"".join(parts)

    def records(self) -> Iterator[Record]:
        """All changes that are whole, in their order."""
        if self._handle is None:
            return
        end = os.fstat(self._handle).st_size
        place = self.damaged = skipped = 0
        while place < end:
            record = self._record(place, end)
            if record is None:
                place, skipped = self._next_mark(place + 1, end), 1
                continue
            self.damaged += skipped
            skipped = 0
            yield record
            place = record.offset + len(record.payload)

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the file; whoever only drops the journal does the same."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def _part(self, offset: int, length: int) -> bytes:
        """What the system gives at once."""
        if self._handle is None:
            raise ValueError(f"{self.file} is closed")
        if hasattr(os, "pread"):
            return os.pread(self._handle, length, offset)
        with self._lock:  # Windows
            os.lseek(self._handle, offset, os.SEEK_SET)
            return os.read(self._handle, length)

    def _inside(self, offset: int, length: int) -> bytes:
        """A piece of the file that must be there: a writer that saw less would cut off the rest as torn."""
        data = self.read(offset, length)
        if len(data) < length and not self.read_only:
            raise OSError(f"{self.file} gave {len(data):,} bytes at {offset:,}, and should have {length:,}; try again")
        return data

    def _record(self, place: int, end: int) -> Record | None:
        """The record that begins at a place; None where there is none, or not all of it."""
        start = place + HEAD.size
        head = self._inside(place, min(HEAD.size, end - place))
        if len(head) < HEAD.size:
            return None
        mark, words, payload, crc = HEAD.unpack(head)
        if mark != MARK or start + words + payload > end:
            return None
        body = self._inside(start, words + payload)
        if zlib.crc32(body) != crc:
            return None
        try:
            header = json.loads(body[:words])
        except ValueError:
            return None
        return Record(header, body[words:], start + words) if isinstance(header, dict) else None

    def _next_mark(self, place: int, end: int) -> int:
        """Where a record may begin, at a place or behind it; ``end`` where none does."""
        while place < end:
            found = self._inside(place, min(PIECE, end - place)).find(MARK)
            if found >= 0:
                return place + found
            place += PIECE - len(MARK) + 1  # a mark may lie across two pieces
        return end
