"""The SQLite database of an index: settings, items, thumbnails, and changes since the last compaction.

The database is in WAL mode with ``synchronous=FULL``: a committed change survives a crash of the process and of the
machine, and readers in other processes see it at once. A new item's vector is stored with its change until compaction
moves it to vectors.npy.
"""

from __future__ import annotations

import errno
import json
import os
import re
import sqlite3
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from nearfar.search.backends.base import MEASURES, Ids, Vectors
from nearfar.search.items import Item
from nearfar.search.storage.files import BadIndex
from nearfar.utils.atomic import draft_of, no_link, sync_folder

APPLICATION = 0x4E464958  # PRAGMA application_id of an index
VERSION = 1  # PRAGMA user_version, increased when older versions of nearfar cannot read new folders
PAGE_SIZE = 8192  # bytes; holds three vectors of 512 dimensions
HEADER = ("application_id", "user_version")
BUSY_SECONDS = 30.0
LOG_PAGES = 128  # of the write-ahead log, from which on it is merged into the file
RESERVE = 2 * LOG_PAGES * PAGE_SIZE  # bytes: enough to merge the log, and to remove some items
AMONG = "id IN (SELECT value FROM json_each(?))"
CHECKED = 50_000  # items whose checksums are compared when all are read; it takes 0.1 s

BACKEND = re.compile("auto|exact(:int8)?|faiss(:flat|:ivf|:hnsw)?|milvus(:server)?")
SCHEMA = """
CREATE TABLE settings (key TEXT PRIMARY KEY, value TEXT NOT NULL, checksum INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE items (
    id INTEGER PRIMARY KEY, name TEXT NOT NULL, label TEXT, hash TEXT NOT NULL, metadata TEXT NOT NULL,
    checksum INTEGER NOT NULL
);
CREATE TABLE thumbnails (
    id INTEGER PRIMARY KEY REFERENCES items (id) ON DELETE CASCADE, jpeg BLOB NOT NULL, checksum INTEGER NOT NULL
);
CREATE TABLE changes (number INTEGER PRIMARY KEY, id INTEGER NOT NULL, vector BLOB, checksum INTEGER NOT NULL);
"""
COLUMNS = {  # which the checksum of a row covers
    "settings": "key, value",
    "items": "id, name, label, hash, metadata",
    "thumbnails": "id, jpeg",
    "changes": "id, vector",
}
INDEXES = "CREATE INDEX items_by_label ON items (label);"
SETTINGS: dict[str, Callable[[Any], bool]] = {  # with what they must be like
    "dim": lambda value: type(value) is int and value > 0,
    "measure": lambda value: value in MEASURES,
    "backend": lambda value: isinstance(value, str) and bool(BACKEND.fullmatch(value)),
    "identity": lambda value: isinstance(value, str),
    "model": lambda value: value is None or (isinstance(value, dict) and {"name", "fingerprint"} <= value.keys()),
    "generation": lambda value: type(value) is int and value >= 0,
    "next_id": lambda value: type(value) is int and value >= 0,
    "uses": lambda value: isinstance(value, str) and bool(BACKEND.fullmatch(value)),
    "facts": lambda value: isinstance(value, dict),
    "files": lambda value: isinstance(value, dict),
    "built": lambda value: isinstance(value, str),
    "changed": lambda value: isinstance(value, str),
}

_json = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode


class Database:
    """An opened database. One connection reads and one writes, so that reading never waits for a commit."""

    def __init__(self, file: Path, *, read_only: bool = False) -> None:
        self.file, self.read_only = file, read_only
        self._read_lock, self._write_lock = threading.RLock(), threading.RLock()
        if not file.is_file():
            missing = f"contains no index: it has no {file.name}" if file.parent.exists() else "does not exist"
            raise FileNotFoundError(f"{file.parent} {missing}; an index is needed")
        if not read_only and file.is_symlink():
            raise BadIndex(f"{file} is a link; an index can be changed only where its files are")
        self._reserve = Path(f"{file}-reserve")  # takes space that removals need on a full disk
        if not read_only and _application(file) == APPLICATION:
            with suppress(OSError):
                self._reserve.unlink()
        with self._errors():
            self._reader = _connect_for_reading(file)
            self._writer = self._reader if read_only else _connect(file)
            kind, version = (self._reader.execute(f"PRAGMA {name}").fetchone()[0] for name in HEADER)
        if (kind, version) != (APPLICATION, VERSION):
            self.close()
            if kind != APPLICATION:
                raise BadIndex(f"{file} is damaged or not the database of an index; build the index again")
            advice = "a newer version of nearfar wrote it" if version > VERSION else "build it again"
            raise BadIndex(f"{file} is of version {version}; this version of nearfar reads version {VERSION}: {advice}")
        if not read_only:
            self._keep_reserve()

    @classmethod
    def create(cls, file: Path, fill: Any) -> None:
        """Write a new database file. The file appears under its name when it is complete."""
        draft = draft_of(file)
        try:
            connection = _connect(draft)
            connection.executescript(
                f"PRAGMA page_size = {PAGE_SIZE}; PRAGMA auto_vacuum = INCREMENTAL; PRAGMA journal_mode = OFF;"
                f"PRAGMA synchronous = OFF; {SCHEMA}"
                f"PRAGMA application_id = {APPLICATION}; PRAGMA user_version = {VERSION};"
            )
            made = cls.__new__(cls)
            made.file, made.read_only, made._reader, made._writer = file, False, connection, connection
            made._read_lock = made._write_lock = threading.RLock()
            try:
                with made.transaction():
                    fill(made)
                with made._errors():
                    connection.executescript(INDEXES)  # faster than to update them with each item
                    connection.execute("PRAGMA journal_mode = WAL").fetchall()
            finally:
                connection.close()
            with open(draft, "rb+") as written:
                os.fsync(written.fileno())
            _remove(file)  # with its write-ahead log, which does not belong to the new file
            os.replace(draft, file)
            sync_folder(file.parent)
        finally:
            _remove(draft)

    # --- reading ------------------------------------------------------------------------------------------

    def data_version(self) -> int:
        """Return a number that changes when another connection commits. Every query of a reader calls this."""
        try:
            with self._read_lock:
                return int(self._reader.execute("PRAGMA data_version").fetchone()[0])
        except sqlite3.Error:
            with self._errors():
                raise
            raise

    def generation(self) -> int:
        """Return the number of the current data folder."""
        try:
            return int(self._rows("SELECT value FROM settings WHERE key = 'generation'")[0][0])
        except (LookupError, TypeError, ValueError) as error:
            raise BadIndex(f"{self.file} is damaged: generation missing or wrong; build the index again") from error

    @contextmanager
    def snapshot(self) -> Iterator[None]:
        """Let all reads in the block see the same state."""
        with self._read_lock:
            if self._reader.in_transaction:
                yield
                return
            with self._errors():
                self._reader.execute("BEGIN")
            try:
                yield
            finally:
                self._reader.execute("ROLLBACK")

    def settings(self) -> dict[str, Any]:
        """Return all settings."""
        try:
            rows = self._checked("SELECT key, value, checksum FROM settings")
            settings = {key: json.loads(value) for key, value, _ in rows}
        except (TypeError, ValueError, RecursionError) as error:
            raise BadIndex(f"{self.file} is damaged ({error}); build the index again") from error
        wrong = [key for key, fits in SETTINGS.items() if key not in settings or not fits(settings[key])]
        if wrong:
            raise BadIndex(f"{self.file} is damaged: {', '.join(wrong)} missing or wrong; build the index again")
        return settings

    def items(self) -> list[Item]:
        """Return all items, ordered by id."""
        return self._items("SELECT * FROM items ORDER BY id")

    def items_with_ids(self, ids: Sequence[int]) -> list[Item]:
        """Return the items with some ids, ordered by id; ids that do not exist are left out."""
        return self._items(f"SELECT * FROM items WHERE {AMONG} ORDER BY id", [json.dumps(ids)])

    def changed_ids(self, after: int) -> tuple[list[int], int]:
        """Return the ids of items that were added, changed or removed."""
        rows = self._rows("SELECT number, id FROM changes WHERE number > ? ORDER BY number", (after,))
        return sorted({id for _, id in rows}), rows[-1][0] if rows else after

    def new_vectors(self, dim: int, after: int = 0) -> dict[int, Vectors]:
        """Return the vectors [d] of items that were added since the last compaction, by id."""
        rows = self._checked(
            "SELECT id, vector, checksum FROM changes WHERE number > ? AND vector IS NOT NULL ORDER BY id", (after,)
        )
        vectors: dict[int, Vectors] = {}
        for id, data, _ in rows:
            if len(data) != 4 * dim:
                raise BadIndex(f"{self.file} is damaged: a vector has {len(data)} bytes, not {4 * dim}")
            vectors[id] = np.frombuffer(data, dtype="<f4").astype(np.float32, copy=False)
        return vectors

    def highest_changed_id(self) -> int:
        """Return the highest id among the changes; −1 if there are none."""
        return int(self._rows("SELECT COALESCE(MAX(id), -1) FROM changes")[0][0])

    def pending_bytes(self) -> int:
        """Return the approximate size of the changes since the last compaction."""
        return int(self._rows("SELECT COALESCE(SUM(16 + COALESCE(LENGTH(vector), 0)), 0) FROM changes")[0][0])

    def changes(self, after: int = 0) -> int:
        """Return the number of changes after one of them, or since the last compaction."""
        return int(self._rows("SELECT COALESCE(MAX(number), 0) FROM changes")[0][0]) - after

    def thumbnails(self, ids: Sequence[int]) -> dict[int, bytes]:
        """Return the thumbnails of some items that have one, by id."""
        return dict(self._rows(f"SELECT id, jpeg FROM thumbnails WHERE {AMONG}", [json.dumps(ids)]))

    def has_thumbnails(self) -> bool:
        """Return whether any item has a thumbnail."""
        return bool(self._rows("SELECT EXISTS (SELECT 1 FROM thumbnails)")[0][0])

    def ids_with_labels(self, labels: Iterable[str | None]) -> Ids:
        """Return the ids of all items with one of some labels, in ascending order."""
        ids: list[int] = []
        for label in dict.fromkeys(labels):
            ids += [id for (id,) in self._rows("SELECT id FROM items WHERE label IS ?", (label,))]
        return np.sort(np.array(ids, dtype=np.int64))

    # --- writing ------------------------------------------------------------------------------------------

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Commit all changes of the block together; on an error, none of them."""
        with self._write_lock, self._errors():
            if self._writer.in_transaction:
                yield
                return
            self._writer.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._writer.execute("COMMIT")
            except BaseException:
                if self._writer.in_transaction:
                    self._writer.execute("ROLLBACK")
                raise

    def write_settings(self, settings: Mapping[str, Any]) -> None:
        """Store settings."""
        rows = [_summed(key, json.dumps(value, ensure_ascii=False)) for key, value in settings.items()]
        with self.transaction():
            self._writer.executemany("INSERT OR REPLACE INTO settings VALUES (?, ?, ?)", rows)

    def insert(self, items: Iterable[Item], thumbnails: Iterable[tuple[int, bytes]] = ()) -> None:
        """Insert items without recording a change, for a new database."""
        with self.transaction():
            self._writer.executemany("INSERT INTO items VALUES (?, ?, ?, ?, ?, ?)", map(_row, items))
            kept = (_summed(id, jpeg) for id, jpeg in thumbnails if jpeg)
            self._writer.executemany("INSERT INTO thumbnails VALUES (?, ?, ?)", kept)

    def add(self, items: Sequence[Item], vectors: Vectors, thumbnails: Sequence[bytes]) -> None:
        """Add new items. When this returns, they are on disk."""
        data, size = memoryview(np.ascontiguousarray(vectors, dtype="<f4").tobytes()), 4 * vectors.shape[1]
        rows = [_summed(item.id, data[row * size : (row + 1) * size]) for row, item in enumerate(items)]
        with self.transaction():
            self.insert(items, zip((item.id for item in items), thumbnails, strict=True))
            self._writer.executemany("INSERT INTO changes (id, vector, checksum) VALUES (?, ?, ?)", rows)

    def remove(self, ids: Sequence[int]) -> None:
        """Remove items."""
        with self.transaction():
            self._writer.executemany("DELETE FROM items WHERE id = ?", [(id,) for id in ids])
            self._note_changes(ids)

    @contextmanager
    def using_reserve(self) -> Iterator[None]:
        """Make room on a full disk for a removal of a few items."""
        with self._write_lock:
            self._reserve.unlink(missing_ok=True)
            with suppress(OSError):
                self._merge_log()
            try:
                yield
            finally:
                with suppress(OSError):
                    self._merge_log()
                self._keep_reserve()

    def change(self, items: Sequence[Item]) -> None:
        """Store other names, labels or metadata of existing items."""
        rows = [(*_row(item)[1:], item.id) for item in items]
        with self.transaction():
            self._writer.executemany(
                "UPDATE items SET name = ?, label = ?, hash = ?, metadata = ?, checksum = ? WHERE id = ?", rows
            )
            self._note_changes([item.id for item in items])

    def finish_compaction(self, settings: Mapping[str, Any]) -> None:
        """Make a new generation the current one, and forget the changes that it contains."""
        with self.transaction():
            self.write_settings(settings)
            self._writer.execute("DELETE FROM changes")

    def shrink(self) -> None:
        """Return unused pages to the file system."""
        with self._write_lock, self._errors():
            self._writer.executescript("PRAGMA incremental_vacuum")  # execute would stop after one page
            self._merge_log()

    def damage(self) -> str:
        """Return what is damaged in the file; empty if nothing is. Other readers do not wait."""
        with self._errors():
            reader = _connect_for_reading(self.file)
            try:
                for (text,) in reader.execute("PRAGMA integrity_check(1)"):
                    if text != "ok":
                        return str(text)
                for table, columns in COLUMNS.items():
                    for *row, checksum in reader.execute(f"SELECT {columns}, checksum FROM {table}"):
                        if _checksum(row) != checksum:
                            return f"a row of {table} is not what was written"
            finally:
                reader.close()
        return ""

    def close(self) -> None:
        """Close the connections. The last one to close merges the write-ahead log into the file."""
        with self._write_lock, self._read_lock:
            for connection in dict.fromkeys((self._reader, self._writer)):
                connection.close()

    def _note_changes(self, ids: Iterable[int]) -> None:
        rows = [_summed(id, None) for id in ids]
        self._writer.executemany("INSERT INTO changes (id, vector, checksum) VALUES (?, ?, ?)", rows)

    def _merge_log(self) -> None:
        with self._errors():
            self._writer.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    def _keep_reserve(self) -> None:
        with suppress(OSError), open(self._reserve, "wb", opener=no_link) as file:  # as much as there is room for
            file.write(bytes(RESERVE))

    def _rows(self, statement: str, values: Sequence[Any] = ()) -> list[Any]:
        with self._read_lock, self._errors():
            return self._reader.execute(statement, values).fetchall()

    def _checked(self, statement: str, values: Sequence[Any] = ()) -> list[Any]:
        """Rows that end with their checksums; those of many rows are not compared."""
        rows = self._rows(statement, values)
        if len(rows) <= CHECKED and any(_checksum(row[:-1]) != row[-1] for row in rows):
            raise BadIndex(f"{self.file} is damaged: a row is not what was written; build the index again")
        return rows

    def _items(self, statement: str, values: Sequence[Any] = ()) -> list[Item]:
        rows = self._checked(statement, values)
        try:
            metadata = json.loads(f"[{','.join(row[4] for row in rows)}]")  # much faster than one at a time
            return [
                Item(id, name, label, hash, more)
                for (id, name, label, hash, *_), more in zip(rows, metadata, strict=True)
            ]
        except (TypeError, ValueError, RecursionError) as error:
            raise BadIndex(f"{self.file} is damaged ({error}); build the index again") from error

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Raise OSError for a full or broken disk and BadIndex for a damaged file, both with the file's name."""
        try:
            yield
        except UnicodeError as error:  # in a name, or in a message about one
            raise BadIndex(f"{self.file} is damaged ({error}); build the index again") from error
        except sqlite3.Error as error:
            name = getattr(error, "sqlite_errorname", "") or ""
            if name.startswith("SQLITE_FULL"):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.file)) from error
            if name.startswith("SQLITE_IOERR"):
                raise OSError(errno.EIO, f"{os.strerror(errno.EIO)} ({name})", str(self.file)) from error
            if name.startswith(("SQLITE_READONLY", "SQLITE_PERM", "SQLITE_CANTOPEN")):
                raise OSError(errno.EACCES, f"{os.strerror(errno.EACCES)} ({error})", str(self.file)) from error
            if name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
                raise OSError(errno.EBUSY, f"{os.strerror(errno.EBUSY)} ({error})", str(self.file)) from error
            if isinstance(error, sqlite3.ProgrammingError):
                raise BadIndex(f"{self.file} is closed; open it again") from error
            raise BadIndex(f"{self.file} is damaged ({error}); build the index again") from error


def _connect(file: Path, options: str = "") -> sqlite3.Connection:
    """A connection for any thread; whoever uses it holds a lock."""
    address = f"{file.absolute().as_uri()}{options}"
    connection = sqlite3.connect(address, uri=True, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False)
    connection.execute("PRAGMA foreign_keys = ON")
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute(f"PRAGMA wal_autocheckpoint = {LOG_PAGES}").fetchall()
    return connection


def _application(file: Path) -> int:
    """Return the application in the header of a database without opening it, which a full disk may not allow."""
    with open(file, "rb") as opened:
        opened.seek(68)
        return int.from_bytes(opened.read(4), "big")


def _connect_for_reading(file: Path) -> sqlite3.Connection:
    """A connection that cannot write, also where the folder is not writable."""
    for options in ("?mode=ro", "?mode=ro&immutable=1"):
        try:
            connection = _connect(file, options)
            connection.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()
            return connection
        except sqlite3.OperationalError as error:
            # A folder without write permission has no room for shared memory; without a log, the file alone is enough.
            log = Path(f"{file}-wal")
            blocked = (error.sqlite_errorname or "").startswith(("SQLITE_CANTOPEN", "SQLITE_READONLY"))
            if "immutable" in options or not blocked or (log.exists() and log.stat().st_size):
                raise
    raise AssertionError("unreachable")


def _row(item: Item) -> tuple[Any, ...]:
    metadata = _json(dict(item.metadata)) if item.metadata else "{}"
    return _summed(item.id, item.name, item.label, item.hash, metadata)


def _summed(*row: Any) -> tuple[Any, ...]:
    return *row, _checksum(row)


def _checksum(row: Sequence[Any]) -> int:
    """A checksum of a row: SQLite cannot see that a byte of a value was changed."""
    if isinstance(row[-1], (bytes, memoryview)):
        return zlib.crc32(row[-1], zlib.crc32(str(row[0]).encode()))
    return zlib.crc32("\0".join(map(str, row)).encode("utf-8", "surrogatepass"))


def _remove(file: Path) -> None:
    for ending in ("", "-wal", "-shm", "-journal"):
        Path(f"{file}{ending}").unlink(missing_ok=True)
