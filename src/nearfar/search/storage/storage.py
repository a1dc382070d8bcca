"""An opened index folder: durable items, vectors and thumbnails, and the backend that searches them."""

from __future__ import annotations

import errno
import logging
import math
import os
import threading
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nearfar.search.backends import check_name, choose, load, load_or_make, make
from nearfar.search.backends.base import Backend, BackendContext, GrowingRows, Ids, Vectors
from nearfar.search.backends.fallback import ExactFallback, discard
from nearfar.search.backends.milvus import SERVER
from nearfar.search.items import Item, Items, MissingItem
from nearfar.search.storage import files
from nearfar.search.storage.database import Database
from nearfar.search.storage.files import BadIndex
from nearfar.utils.atomic import DISK
from nearfar.utils.folders import claim
from nearfar.utils.formatting import command
from nearfar.utils.progress import Progress
from nearfar.utils.tensors import as_array, as_vectors, check_finite, check_values, unit_rows

MILVUS = "NEARFAR_MILVUS"  # an environment variable: the address of the server
SMALLEST = 1e-30  # squared length below which vectors are normalized in float64


class ItemTable:
    """Items by row. Rows are only appended, so that readers never wait for a writer."""

    def __init__(
        self, ids: Ids, vectors: Vectors, items: Sequence[Item], added: Mapping[int, Vectors] | None = None
    ) -> None:
        self.base_ids, self.base = ids, vectors  # as of the last compaction; some may have been removed since
        self.version = 0  # increases with every change
        self._lock = threading.RLock()
        self._tail = GrowingRows(vectors[:0], partial(np.empty, dtype=np.float32))
        self._ids = GrowingRows(ids, partial(np.empty, dtype=np.int64))  # by row, including removed items
        by_id = {item.id: item for item in items}
        self._items: list[Item | None] = [by_id.pop(id, None) for id in ids.tolist()]  # by row; None if removed
        self._rows = {item.id: row for row, item in enumerate(self._items) if item is not None}
        self._current: tuple[int, Items, Ids] | None = None
        if by_id:
            self.add(list(by_id.values()), np.stack([(added or {})[id] for id in by_id]))

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, id: object) -> bool:
        return id in self._rows

    @property
    def dim(self) -> int:
        """Dimensions of the vectors."""
        return int(self.base.shape[1])

    def add(self, items: Sequence[Item], vectors: Vectors) -> None:
        """Append items."""
        with self._lock:
            self._tail.append(vectors)
            self._ids.append(np.array([item.id for item in items], dtype=np.int64))
            for item in items:
                self._rows[item.id] = len(self._items)
                self._items.append(item)
            self.version += 1

    def remove(self, ids: Iterable[int]) -> None:
        """Remove items."""
        with self._lock:
            for id in ids:
                self._items[self._row(id)] = None
                del self._rows[id]
            self.version += 1

    def change(self, items: Iterable[Item]) -> None:
        """Replace items by others with the same ids."""
        with self._lock:
            for item in items:
                self._items[self._row(item.id)] = item
            self.version += 1

    def item(self, id: int) -> Item:
        """Return one item."""
        with self._lock:
            item = self._items[self._row(id)]
        assert item is not None
        return item

    def existing(self, ids: Iterable[int]) -> dict[int, Item]:
        """Return those of some items that exist, by id."""
        with self._lock:
            items = [self._items[self._rows[id]] for id in ids if id in self._rows]
        return {item.id: item for item in items if item is not None}

    def items(self) -> Items:
        """Return all items, ordered by id."""
        return self._now()[0]

    def ids(self) -> Ids:
        """Return the ids of all items, in ascending order."""
        return self._now()[1]

    def vector(self, id: int) -> Vectors:
        """Return the vector [d] of an item."""
        with self._lock:
            row, tail = self._row(id), self._tail.rows
        return np.array(self.base[row] if row < len(self.base) else tail[row - len(self.base)])

    def vectors(self, ids: Ids | None = None) -> Vectors:
        """Return the vectors of some items, or of all in the order of their ids."""
        with self._lock:
            wanted = self.ids() if ids is None else ids
            if ids is None and len(self._rows) == len(self.base) == len(self._items):
                return self.base
            rows = np.fromiter((self._row(id) for id in wanted.tolist()), dtype=np.int64, count=len(wanted))
            tail = self._tail.rows
        vectors = np.empty((len(rows), self.dim), dtype=np.float32)
        old = rows < len(self.base)
        vectors[old] = self.base[rows[old]]
        vectors[~old] = tail[rows[~old] - len(self.base)]
        return vectors

    def everything(self) -> tuple[Ids, Vectors]:
        """Return ids and vectors of all items, of the same moment."""
        with self._lock:
            return self.ids(), self.vectors()

    def changes(self) -> tuple[Ids, Vectors, Ids]:
        """Return what changed since the last compaction: ids and vectors that were added, and ids that were removed."""
        with self._lock:
            ids = self._ids.rows
            removed = np.setdiff1d(ids, self.ids(), assume_unique=True)
            return ids[len(self.base) :], self._tail.rows, removed

    def known(self, ids: Iterable[int]) -> tuple[Ids, Vectors]:
        """Return those of some ids that exist, and their vectors."""
        with self._lock:
            existing = np.array([id for id in ids if id in self._rows], dtype=np.int64)
            return existing, self.vectors(existing)

    def _now(self) -> tuple[Items, Ids]:
        with self._lock:
            if self._current is None or self._current[0] != self.version:
                items = Items([item for item in self._items if item is not None])
                self._current = self.version, items, np.array([item.id for item in items], dtype=np.int64)
            return self._current[1], self._current[2]

    def _row(self, id: int) -> int:
        if id not in self._rows:
            raise MissingItem(f"id is {id}; the index has no such item among its {len(self._rows):,}")
        return self._rows[id]


def checked_vectors(name: str, vectors: Any, dim: int | None, measure: str) -> Vectors:
    """Return vectors as they are compared: float32, and of length one for cosines."""
    points: Vectors
    vectors = as_array(name, vectors)
    check_values(name, vectors)
    if isinstance(vectors, np.ndarray) and vectors.dtype == np.float32 and vectors.ndim == 2 and vectors.size:
        points = np.ascontiguousarray(vectors)
    else:
        points = as_vectors(name, vectors).float().cpu().numpy()
    if dim is not None and points.shape[1] != dim:
        raise ValueError(f"{name} has {points.shape[1]} dimensions; those of this index have {dim}")
    if len(points) == 1 and abs(float(points[0] @ points[0]) - 1) < 1e-6:
        return points  # the fast path of a single query
    # NumPy alone: a query should not wake the threads of PyTorch, which would compete with those of FAISS.
    squares: Any = np.einsum("nd,nd->n", points, points)
    unusual = not np.isfinite(squares).all()
    if unusual:
        check_finite(name, as_vectors(name, vectors))  # very long vectors are allowed
    if measure != "cosine":
        return points
    if unusual or (squares < SMALLEST).any():
        return unit_rows(torch.from_numpy(points).double()).float().numpy()
    if (np.abs(squares - 1) < 1e-6).all():
        return points
    units: Vectors = points / np.sqrt(squares)[:, None]
    return units


Row = tuple[str, str | None, str, Mapping[str, Any]]  # name, label, hash of the file, and metadata of an item

RETRIES = 20  # of opening files while a writer replaces them
FEW = 16  # items that are removed at once from a full disk
FOLLOWED = 1000  # changes of another process that are read in the way of other readers

log = logging.getLogger("nearfar.search")


@dataclass
class _State:
    """Everything of one generation; compaction replaces it as a whole."""

    generation: int
    table: ItemTable
    backend: Backend
    last_change: int = 0


class IndexStorage:
    """An opened index folder.

    One thread writes at a time; any number of threads read without waiting. A storage that is open for reading follows
    the changes of a writer in another process.
    """

    def __init__(
        self,
        folder: Path,
        *,
        read_only: bool = False,
        device: torch.device | str = "cpu",
        written: tuple[int, Sequence[Item]] | None = None,  # a generation, and its items that need not be read
        milvus: str | None = None,
    ) -> None:
        self.folder, self.read_only, self.device = folder, read_only, device
        self._refusal = "was opened read-only; it cannot be changed" if read_only else ""
        self._writing, self._refreshing = threading.RLock(), threading.Lock()
        self._closed, self.milvus = False, milvus
        self._seen = 0
        self.looks = read_only  # for changes of another process, at each use
        self._identity = _identity(folder / files.DATABASE)
        with ExitStack() as stack:
            if not read_only and files.index_exists(folder):
                stack.enter_context(files.write_lock(folder))
            self.database = Database(folder / files.DATABASE, read_only=read_only)
            stack.callback(self.database.close)
            self.settings: dict[str, Any] = {}
            self._state = self._open(written=written)
            self._has_thumbnails = self.database.has_thumbnails()
            self.next_id = max(int(self.settings["next_id"]), self.database.highest_changed_id() + 1)
            self._obsolete: list[str] = list(self.settings.get("obsolete", ()))
            if not read_only:
                self._sweep()
            self._stack = stack.pop_all()

    @classmethod
    def create(
        cls,
        folder: Path,
        settings: Mapping[str, Any],
        vectors: Vectors,
        items: Sequence[Item],
        *,
        device: torch.device | str = "cpu",
        progress: Progress | None = None,
        prepare: Callable[[], object] | None = None,  # writes additional files while the folder is locked
        inputs: Iterable[Any] = (),  # paths that the folder may not overlap with
    ) -> IndexStorage:
        """Write a new index folder and open it for writing."""
        if files.index_exists(folder):
            raise BadIndex(f"{folder} already contains an index; update it, or choose another folder")
        claim(folder, "index", inputs)
        with files.write_lock(folder):
            if files.index_exists(folder):
                raise BadIndex(f"{folder} already contains an index; update it, or choose another folder")
            if prepare is not None:
                prepare()
            ids = np.array([item.id for item in items], dtype=np.int64)
            # An empty index has nothing to train a backend with; compaction builds the chosen one.
            name, address = check_name(settings["backend"])
            uses, identity = choose(name, len(ids)) if len(ids) else "exact", uuid.uuid4().hex
            given = {**settings, "backend": name, "identity": identity}
            with files.new_generation(folder) as (draft, number):
                files.write_vectors(draft, ids, vectors.__getitem__, vectors.shape[1])
                context = _context(folder, given, uses, address, device, progress)
                backend = make(vectors, ids, context)
                facts = backend.save(draft, ids, vectors)
                backend.close()
            now, free = _now(), int(ids[-1]) + 1 if len(ids) else 0
            made = {
                "generation": number,
                "files": files.digests(files.data_folder(folder, number)),
                "next_id": free,
                "uses": uses,
                "facts": facts,
                "built": now,
                "changed": now,
            }

            def fill(database: Database) -> None:
                database.write_settings({**given, **made})
                database.insert(items)

            Database.create(folder / files.DATABASE, fill)
        return cls(folder, device=device, written=(number, items), milvus=address or None)

    # --- reading ------------------------------------------------------------------------------------------

    @property
    def table(self) -> ItemTable:
        """All items and vectors, including the latest changes of other processes."""
        self._refresh()
        return self._state.table

    @property
    def loaded(self) -> ItemTable:
        """All items and vectors as of the last look for changes, for a search that has just looked."""
        return self._state.table

    @property
    def backend(self) -> Backend:
        """The backend that searches the vectors."""
        self._refresh()
        return self._state.backend

    def current(self) -> tuple[ItemTable, Backend]:
        """Return the items and the backend together, with one look for changes."""
        self._refresh()
        return self._state.table, self._state.backend

    @property
    def version(self) -> tuple[str, int, int]:
        """A value that changes whenever the items change, the same in all processes."""
        self._refresh()
        state = self._state
        return self.settings["identity"], state.generation, state.last_change

    def thumbnails(self, ids: Sequence[int]) -> dict[int, bytes]:
        """Return thumbnails by id; empty for an item without one. Ids that do not exist are left out."""
        table = self._state.table
        if self.read_only and not all(id in table for id in ids):
            table = self.table
        if not self._has_thumbnails:
            return {id: b"" for id in ids if id in table}
        jpegs = self.database.thumbnails([int(id) for id in ids])
        return {id: jpegs.get(id, b"") for id in ids if id in table}

    # --- changes ------------------------------------------------------------------------------------------

    def add(self, rows: Sequence[Row], vectors: Vectors, thumbnails: Sequence[bytes] = ()) -> list[int]:
        """Add items. When this returns, they are on disk."""
        with self._writing:
            self.check_writable()
            ids = range(self.next_id, self.next_id + len(rows))
            items = [Item(id, *row) for id, row in zip(ids, rows, strict=True)]
            if not items:
                return []
            self._catch_up()
            self.database.add(items, vectors, thumbnails or [b""] * len(items))
            self._has_thumbnails = self._has_thumbnails or any(thumbnails)
            self.next_id += len(items)
            self._state.table.add(items, vectors)
            self._state.last_change += len(items)
            self._pass_on(lambda backend: backend.add(np.array(ids, dtype=np.int64), vectors))
            return list(ids)

    def remove(self, ids: Sequence[int]) -> None:
        """Remove items."""
        with self._writing:
            self.check_writable()
            table = self._state.table
            for id in ids:
                table.item(id)
            if not ids:
                return
            gone = sorted({int(id) for id in ids})
            self._catch_up()
            try:
                self._remove(gone)
            except OSError as error:
                if error.errno not in DISK:
                    raise
                for start in range(0, len(gone), FEW):
                    with self.database.using_reserve():
                        self._remove(gone[start : start + FEW])

    def _remove(self, ids: list[int]) -> None:
        self.database.remove(ids)
        self._state.table.remove(ids)
        self._state.last_change += len(ids)
        self._pass_on(lambda backend: backend.remove(np.array(ids, dtype=np.int64)))

    def change(self, items: Sequence[Item]) -> None:
        """Store other names, labels or metadata of existing items."""
        with self._writing:
            self.check_writable()
            if items:
                self.database.change(items)
                self._state.table.change(items)
                self._state.last_change += len(items)

    def store(self, settings: Mapping[str, Any]) -> None:
        """Store settings that readers follow."""
        with self._writing:
            self.check_writable()
            self.database.write_settings(settings)
            self.settings = {**self.settings, **settings}

    def compact(self, *, backend: str | None = None, progress: Progress | None = None) -> None:
        """Write all vectors to a new data folder. Searches continue in the meantime; changes wait."""
        with self._writing:
            self.check_writable()
            if not (backend or self.database.changes()):
                return
            self._catch_up()
            old = self._state
            settings, address = {**self.settings, "next_id": self.next_id, "changed": _now()}, ""
            if backend is not None:
                settings["backend"], address = check_name(backend)
            items, ids = old.table.items(), old.table.ids()
            before = files.data_folder(self.folder, old.generation)
            _damaged_backend(before, settings, math.inf)  # vectors that were damaged must not get a new digest
            uses = choose(settings["backend"], len(ids))
            context = self._context(settings, uses, progress, address)
            successor = old.backend
            try:
                with files.new_generation(self.folder, self._note) as (draft, number):
                    files.write_vectors(draft, ids, lambda rows: old.table.vectors(ids[rows]), old.table.dim)
                    _, base = files.read_vectors(draft)
                    if backend is not None or uses != settings["uses"]:
                        successor = make(base, ids, context)
                    settings |= {"generation": number, "uses": uses, "facts": successor.save(draft, ids, base)}
                place = files.data_folder(self.folder, number)
                table = ItemTable(*files.read_vectors(place), items)
                renewed = load(table.base, ids, replace(context, known=successor), place, settings["facts"])
                new = files.contents(place, os.listdir(place))
                self._obsolete = [name for name in self._obsolete if name not in new]
                self._obsolete += files.contents(before, self.settings["files"])
                settings |= {"files": files.digests(place), "obsolete": self._obsolete}
                self.database.finish_compaction(settings)
            except BaseException:
                if successor is not old.backend:
                    discard(successor)
                raise
            self._state, self.settings = _State(number, table, renewed), settings
            self.milvus = context.address or self.milvus
            if successor is not old.backend:
                discard(old.backend)
            self._sweep()
            try:
                self.database.shrink()
            except OSError as error:
                log.warning("unused space of %s could not be released (%s)", self.folder, error)

    def check(self) -> list[str]:
        """Compare all files with their digests; return a sentence about each that is damaged."""
        state, settings = self._state, self.settings
        place = files.data_folder(self.folder, state.generation)
        wrong = self.database.damage()
        damages = [f"{self.database.file} is damaged ({wrong}): {files.LOST}"] if wrong else []
        words = command("index", "check", self.folder, "--repair")
        repair = f"nothing is lost, if the vectors are sound; repair it with: {words}"
        for name in files.changed(place, settings["files"], math.inf):
            damages.append(f"{place / name} is damaged: {files.LOST if name in files.VECTORS else repair}")
        wrong = state.backend.damage()
        return [*damages, f"{wrong}: {repair}"] if wrong else damages

    def close(self) -> None:
        """Close all files and release the lock. Every change is already on disk."""
        with self._writing, self._refreshing:
            if self._closed:
                return
            self._refusal, self._closed = "is closed; open it again to change it", True
            with self._stack:
                self._state.backend.close()

    # --- opening and following ----------------------------------------------------------------------------

    def _open(self, known: Backend | None = None, written: tuple[int, Sequence[Item]] | None = None) -> _State:
        """The current generation; tried again if a writer replaces its files in the meantime."""
        for _ in range(RETRIES):
            with self.database.snapshot():
                seen = self.database.data_version()
                settings = self.database.settings()
                if written and written[0] == settings["generation"] and not self.database.changes():
                    items = written[1]
                else:
                    items = self.database.items()
                added = self.database.new_vectors(int(settings["dim"]))
                _, last = self.database.changed_ids(0)
            try:
                state = self._load(settings, items, added, known)
            except Exception:
                if self.database.generation() == settings["generation"]:
                    raise
                continue
            self.settings, state.last_change, self._seen = settings, last, seen
            return state
        raise BadIndex(f"{self.folder} was compacted each time it was opened, {RETRIES} times; try again later")

    def _load(
        self, settings: Mapping[str, Any], items: Sequence[Item], added: dict[int, Vectors], known: Backend | None
    ) -> _State:
        generation = int(settings["generation"])
        place = files.data_folder(self.folder, generation)
        ids, vectors = files.read_vectors(place)
        damaged = _damaged_backend(place, settings, files.CHECKED)
        if vectors.shape[1] != settings["dim"]:
            raise BadIndex(f"{place} is damaged: its vectors have {vectors.shape[1]} dimensions, not {settings['dim']}")
        try:
            table = ItemTable(ids, vectors, items, added)
        except KeyError as error:
            raise BadIndex(f"{place} is damaged: item {error} has no vector; build the index again") from error
        facts, uses = settings["facts"], settings["uses"]
        context = replace(self._context(settings, uses), known=known)
        try:
            backend = load_or_make(vectors, ids, context, place, facts, damaged)
        except ValueError as error:
            raise BadIndex(f"{place} is damaged: {error}; build the index again") from error
        try:
            backend.replay(*table.changes())
        except Exception as error:  # a server; everything is in the folder
            ids, vectors = table.everything()
            backend = ExactFallback(backend, vectors, ids, measure=settings["measure"], error=error)
        return _State(generation, table, backend)

    def _context(
        self, settings: Mapping[str, Any], uses: str, progress: Progress | None = None, address: str = ""
    ) -> BackendContext:
        return _context(self.folder, settings, uses, address or self.milvus, self.device, progress, self.read_only)

    def is_outdated(self) -> bool:
        """Return whether to open the folder again: after many changes, after a compaction, or for another index."""
        if not self.read_only:
            self.check_writable()
            return False
        replaced = _identity(self.folder / files.DATABASE) != self._identity
        state, database = self._state, self.database
        return replaced or database.generation() != state.generation or database.changes(state.last_change) > FOLLOWED

    def _refresh(self) -> None:
        if self.looks:
            self.refresh()

    def refresh(self) -> None:
        """Follow the changes of another process. Threads do not wait for one that already does."""
        if not self.read_only or self._closed or not self._refreshing.acquire(blocking=False):
            return
        try:
            if self._closed or self.database.data_version() == self._seen:
                return
            self._has_thumbnails = self.database.has_thumbnails()
            if self.looks and self.database.generation() != self._state.generation:
                old = self._state.backend
                self._state = self._open(old)
                if self._state.backend.name != old.name:
                    old.close()
                return
            self._follow()
        finally:
            self._refreshing.release()

    def _follow(self) -> None:
        """Apply new changes of the same generation."""
        state, database = self._state, self.database
        with database.snapshot():
            settings, seen = database.settings(), database.data_version()
            if settings["generation"] != state.generation:
                return  # compacted just now: the next call reloads everything
            ids, last = database.changed_ids(state.last_change)
            vectors = database.new_vectors(state.table.dim, state.last_change)
            items = database.items_with_ids(ids)
        there = {item.id for item in items}
        added = [item for item in items if item.id not in state.table]
        removed = [id for id in ids if id in state.table and id not in there]
        state.table.change([item for item in items if item.id in state.table])
        if added:
            points = np.stack([vectors[item.id] for item in added])
            state.table.add(added, points)
            self._pass_on(lambda backend: backend.add(np.array([item.id for item in added], dtype=np.int64), points))
        if removed:
            state.table.remove(removed)
            self._pass_on(lambda backend: backend.remove(np.array(removed, dtype=np.int64)))
        self.settings, state.last_change, self._seen = settings, last, seen

    # --- the backend --------------------------------------------------------------------------------------

    def _pass_on(self, change: Callable[[Backend], None]) -> None:
        """Tell the backend about a change. If it fails, exact search takes over: the change itself is durable."""
        state = self._state
        try:
            change(state.backend)
        except BaseException as error:
            failed = state.backend.failed if isinstance(state.backend, ExactFallback) else state.backend
            ids, vectors = state.table.everything()
            state.backend = ExactFallback(failed, vectors, ids, measure=self.settings["measure"], error=error)
            if not isinstance(error, Exception):
                raise

    def _catch_up(self) -> None:
        """Return to a backend that failed, if it works again."""
        state, fallback = self._state, self._state.backend
        if not isinstance(fallback, ExactFallback):
            return
        try:
            place = files.data_folder(self.folder, state.generation)
            table, uses = state.table, self.settings["uses"]
            context = replace(self._context(self.settings, uses), known=fallback.failed)
            backend = load(table.base, table.base_ids, context, place, self.settings["facts"])
            backend.replay(*table.changes())
            state.backend = backend
        except Exception as error:
            fallback.error = error

    def written(self) -> list[str]:
        """Return the names of the data folders that were written, with their files."""
        current = files.data_folder(self.folder, self._state.generation)
        return [*self._obsolete, *files.contents(current, self.settings["files"])]

    def _note(self, names: list[str]) -> None:
        """List names in the database as obsolete before they are created; a compaction that succeeds needs them."""
        self._obsolete += names
        self.database.write_settings({"obsolete": self._obsolete})

    def _sweep(self) -> None:
        """Remove the files that the database lists as obsolete."""
        if self._obsolete:
            files.sweep(self.folder, self._obsolete)
            self._obsolete = []
            self.database.write_settings({"obsolete": []})

    def check_writable(self) -> None:
        """Raise an error if the index was opened read-only, is closed, or was removed or replaced."""
        if self._refusal:
            raise BadIndex(f"{self.folder} {self._refusal}")
        if _identity(self.database.file) != self._identity:  # SQLite would go on writing to a file without a name
            raise FileNotFoundError(errno.ENOENT, "the index was removed or replaced; open it again", str(self.folder))


def _context(
    folder: Path,
    settings: Mapping[str, Any],
    uses: str,
    address: str | None,
    device: torch.device | str,
    progress: Progress | None = None,
    read_only: bool = False,
) -> BackendContext:
    """What a backend needs; the address of a server never comes from the folder, whose author could name any."""
    address = (address or os.environ.get(MILVUS, "")) if uses == SERVER else ""
    if uses == SERVER and not address:
        raise BadIndex(f"{folder} uses a Milvus server; set {MILVUS} to its address, such as http://localhost:19530")
    # A copy of a folder gets another identity, and so a collection of its own.
    identity = sha256(f"{settings['identity']} {folder.resolve()}".encode()).hexdigest()[:32]
    return BackendContext(uses, settings["measure"], folder, device, progress, read_only, identity, address)


def _damaged_backend(place: Path, settings: Mapping[str, Any], most: float) -> list[str]:
    """Files of the backend that are not what was written; damaged vectors are an error."""
    damaged = files.changed(place, settings["files"], most)
    for name in files.VECTORS:
        if name in damaged:
            raise BadIndex(f"{place / name} is damaged: {files.LOST}")
    return damaged


def _identity(file: Path | str) -> tuple[int, int] | None:
    """Device and inode of a file; None if it does not exist."""
    try:
        status = os.stat(file)
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
