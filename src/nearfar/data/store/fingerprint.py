"""Fingerprints of image files and archives: BLAKE2 hashes of their bytes.

Hashes are kept in a database in the cache folder, by path, size, times and inode of the file. A file is read again as
soon as one of these has changed.
"""

from __future__ import annotations

import hashlib
import os
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from nearfar.utils.system import cache_folder, processors

KIND = "blake2b:"  # how fingerprints of file contents begin
DATABASE = ".digests.db"  # in the cache folder
SETTLED = 100_000_000  # ns after which a change of a file changes its times as well
SIZE = 20  # bytes of a hash
TABLE = """
CREATE TABLE IF NOT EXISTS digests (
    path TEXT, start INTEGER, size INTEGER, mtime INTEGER, ctime INTEGER, inode INTEGER, digest BLOB,
    PRIMARY KEY (path, start)
) WITHOUT ROWID
"""

Location = tuple[str, int]  # a file, and where an image begins in it: 0, or the offset of a member of an archive
Stat = tuple[int, int, int, int]  # size, times of modification and of any change, inode


def fingerprint(
    names: Sequence[str], locations: Sequence[Location], read: Callable[[int], bytes], *, threads: int | None = None
) -> str:
    """Hash the names and contents of images, in their order; contents that have not changed are not read again.

    A folder, a zip and a tar with the same images under the same names have the same fingerprint.
    """
    paths = dict.fromkeys(path for path, _ in locations)
    before = {path: _stat(path) for path in paths}
    absolute = {path: os.path.abspath(path) for path in paths}

    def digest(index: int) -> bytes | None:
        try:
            return hashlib.blake2b(read(index), digest_size=SIZE).digest()
        except OSError:
            return None

    with _database() as database:
        digests = [_look_up(database, absolute[path], start, before[path]) for path, start in locations]
        missing = [index for index, known in enumerate(digests) if known is None]
        with ThreadPoolExecutor(threads or 2 * processors(), thread_name_prefix="digest") as pool:
            for index, made in zip(missing, pool.map(digest, missing), strict=True):
                digests[index] = made
        after = {locations[index][0]: _stat(locations[index][0]) for index in missing}
        settled = time.time_ns() - SETTLED
        rows = []
        for index in missing:
            path, start = locations[index]
            stat = before[path]
            if digests[index] is not None and stat is not None and stat == after[path] and max(stat[1:3]) < settled:
                rows.append((absolute[path], start, *stat, digests[index]))
        with suppress(sqlite3.Error):  # without a database it only takes longer
            database.executemany("INSERT OR REPLACE INTO digests VALUES (?, ?, ?, ?, ?, ?, ?)", rows)
            database.commit()
    whole = hashlib.blake2b(digest_size=SIZE)
    for name, known in zip(names, digests, strict=True):
        whole.update(f"{name}\0".encode(errors="surrogateescape"))
        whole.update(b"unreadable" if known is None else known)
    return KIND + whole.hexdigest()


def _look_up(database: sqlite3.Connection, path: str, start: int, stat: Stat | None) -> bytes | None:
    if stat is None:
        return None
    query = "SELECT size, mtime, ctime, inode, digest FROM digests WHERE path = ? AND start = ?"
    try:
        row = database.execute(query, (path, start)).fetchone()
    except (sqlite3.Error, UnicodeEncodeError):
        return None
    return row[4] if row is not None and tuple(row[:4]) == stat else None


def _stat(path: str) -> Stat | None:
    try:
        stat = os.stat(path)
    except OSError:
        return None
    return stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino & (2**63 - 1)


@contextmanager
def _database() -> Iterator[sqlite3.Connection]:
    """Open the database of hashes; an empty one in memory if the cache folder cannot be used."""
    try:
        folder = cache_folder()
        folder.mkdir(parents=True, exist_ok=True)
        database = _opened(folder / DATABASE)
    except (OSError, RuntimeError, sqlite3.Error):
        database = _opened(":memory:")
    with closing(database):
        yield database


def _opened(file: Path | str) -> sqlite3.Connection:
    database = sqlite3.connect(file, timeout=10)
    try:
        database.execute("PRAGMA synchronous = OFF")  # a lost hash is computed again
        database.execute(TABLE)
    except sqlite3.Error:
        database.close()
        raise
    return database
