"""Items, vectors and thumbnails on disk and in memory: what changes is in the journal before anybody is told."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nearfar.search.backends import Backend, Behind, Surroundings, choose, let_go, make, reopen
from nearfar.search.items import Item, missing
from nearfar.search.storage import changes, folder
from nearfar.search.storage import thumbnails as packs
from nearfar.search.storage.journal import Journal
from nearfar.search.storage.table import Ids, Table, Vectors
from nearfar.utils.progress import Progress

TRIES = 20  # of opening files that a writer replaces meanwhile


@dataclass
class State:
    """A generation and what has come since; replaced as a whole when the journal is folded in."""

    generation: int
    table: Table
    backend: Backend
    pack: packs.Pack | None
    journal: Journal
    places: dict[int, tuple[int, int]] = field(default_factory=dict)  # thumbnails in the journal, by id

    def close(self) -> None:
        try:
            self.backend.close()
        finally:
            self.journal.close()


class IndexStorage:
    """An opened index folder.

    Args:
        place: The folder.
        read_only: Others may write meanwhile; what they write is not seen.
        device: Where exact search computes.

    One thread writes at a time; any number read, and never wait.
    """

    def __init__(self, place: Path, *, read_only: bool = False, device: torch.device | str = "cpu") -> None:
        self.folder, self.read_only, self.device = place, read_only, device
        self._refusal = "was opened read-only; nothing can be changed" if read_only else ""
        self._writing = threading.RLock()
        self._stack = ExitStack()
        self.settings = folder.read_card(place)
        try:
            if not read_only:
                self._stack.enter_context(folder.owned(place))
            self.state = self._opened()
            self.next_id = max(int(self.settings["next_id"]), self._replay())
            self.state.backend.settle(self.table.ids(), self.table.vectors())
            if not read_only:
                folder.sweep(place, self.state.generation)
        except BaseException:
            self._stack.close()
            raise

    @classmethod
    def create(
        cls,
        place: Path,
        card: Mapping[str, Any],
        vectors: Vectors,
        items: Sequence[Item],
        *,
        device: torch.device | str = "cpu",
        progress: Progress | None = None,
        prepare: Callable[[], object] | None = None,
    ) -> IndexStorage:
        """A new index folder with these items.

        Args:
            card: What is known of it: "dim", "measure", "backend", "model".
            prepare: Is called when the folder is sure to be nobody else's, to put there what belongs to the index.
        """
        table = Table(vectors, items)
        place.mkdir(parents=True, exist_ok=True)
        with folder.owned(place):
            if folder.exists(place):
                raise folder.BadIndex(f"{place} already contains an index; update it, or choose another folder")
            if prepare is not None:
                prepare()
            ids = table.ids()
            # Without items there is nothing to choose by, or to train: the backend that is wanted comes with ``save``.
            uses = choose(card["backend"], len(table)) if len(table) else "exact"
            with folder.new_generation(place, 1) as draft:
                folder.write_table(draft, ids, table.items(), folder.blocks(table, ids), table.dim)
                backend = make(uses, table.base, ids, Surroundings(card["measure"], place, device, progress))
                facts = backend.save(draft, ids, table.base)
                backend.close()
            now, free = _now(), int(ids[-1]) + 1 if len(ids) else 0
            own = {"generation": 1, "next_id": free, "uses": uses, "facts": facts, "built": now, "changed": now}
            folder.write_card(place, {**card, **own})
        return cls(place, device=device)

    @property
    def table(self) -> Table:
        return self.state.table

    @property
    def backend(self) -> Backend:
        """What is searched."""
        return self.state.backend

    def snapshot(self) -> tuple[tuple[int, int], Table]:
        """The items, and a value that changes whenever they do."""
        state = self.state
        return (state.generation, state.table.version), state.table

    def add(
        self,
        names: Sequence[str],
        vectors: Vectors,
        *,
        labels: Sequence[str | None],
        hashes: Sequence[str],
        metadata: Sequence[Mapping[str, Any]],
        thumbnails: Sequence[bytes],
    ) -> list[int]:
        """New items; when this returns, they are on disk."""
        with self._writing:
            self._check_writable()
            ids = range(self.next_id, self.next_id + len(names))
            rows = zip(ids, names, labels, hashes, metadata, strict=True)
            change = changes.Added([Item(*row) for row in rows], vectors, thumbnails)
            self._commit(change)
            return list(ids)

    def remove(self, ids: Sequence[int]) -> None:
        """Items that are not to be found any more; all must be there."""
        with self._writing:
            self._check_writable()
            for id in ids:
                if id not in self.table:
                    raise missing(id, len(self.table))
            if ids:
                self._commit(changes.Removed(sorted({int(id) for id in ids})))

    def change(self, items: Sequence[Item]) -> None:
        """Other names, labels or metadata for items that are there."""
        with self._writing:
            self._check_writable()
            if items:
                self._commit(changes.Changed(items))

    def thumbnail(self, id: int) -> bytes:
        """A small JPEG of an item; empty where it has none."""
        state = self.state
        row = state.table.row(id)
        if id in state.places:
            offset, length = state.places[id]
            return state.journal.read(offset, length)
        if state.pack is None or row >= len(state.table.base):
            return b""
        return state.pack.get(row)

    @property
    def pending(self) -> int:
        """Bytes of the journal: what ``save`` would fold in."""
        return self.state.journal.size

    def compact(self, *, backend: str | None = None, progress: Progress | None = None) -> None:
        """Fold the journal into the files. Reads go on meanwhile, changes wait."""
        with self._writing:
            self._check_writable()
            if not (self.pending or backend):
                return
            self._catch_up()
            old = self.state
            number, table = old.generation + 1, old.table
            items, ids = table.items(), table.ids()
            card = {**self.settings, "generation": number, "next_id": self.next_id, "changed": _now()}
            if backend is not None:
                card["backend"] = backend
            uses = choose(card["backend"], len(ids))
            with folder.new_generation(self.folder, number) as draft:
                folder.write_table(draft, ids, items, folder.blocks(table, ids), table.dim)
                packs.pack(draft, (self.thumbnail(id) for id in ids.tolist()))
                vectors = folder.read_table(draft).base
                around = Surroundings(card["measure"], self.folder, self.device, progress)
                found = old.backend if uses == self.settings["uses"] else make(uses, vectors, ids, around)
                card |= {"uses": uses, "facts": found.save(draft, ids, vectors)}
            self.state = self._make_count(card, found)
            self.settings = card
            if found is not old.backend:
                let_go(old.backend)
            folder.sweep(self.folder, number)

    def close(self) -> None:
        """Let go of the folder; nothing is lost that was acknowledged."""
        with self._writing:
            self._refusal = "is closed; open it again to change it"
            try:
                self.state.close()
            finally:
                self._stack.close()

    # --- from disk ----------------------------------------------------------------------------------------

    def _opened(self) -> State:
        """The generation that counts, still after it was opened: a writer may replace it, and remove its files."""
        for _ in range(TRIES):
            self.settings = folder.read_card(self.folder)
            try:
                state = self._open(self.settings)
            except Exception:
                if self._counts():
                    raise
                continue
            if self._counts():
                return state
            state.close()
        raise folder.BadIndex(f"{self.folder} was saved again each time it was opened, {TRIES} times; try again later")

    def _counts(self) -> bool:
        """Whether the generation that was opened is still the one that counts."""
        return bool(folder.read_card(self.folder)["generation"] == self.settings["generation"])

    def _make_count(self, card: Mapping[str, Any], found: Backend) -> State:
        """The new generation, opened before it counts: if it cannot be, all goes on with the old one and its journal.

        Args:
            card: Of the new generation.
            found: The backend that has saved itself there.
        """
        new = found is not self.state.backend
        try:
            opened = self._open(card, found)
        except BaseException:
            if new:
                let_go(found)
            raise
        # Stays where the card was replaced but may not be on disk: nobody knows which journal would count.
        self._refusal = "could not be saved to its end; open it again to change it"
        try:
            folder.write_card(self.folder, card)
        except BaseException:
            opened.journal.close()
            if self._counts():
                self._refusal = ""
                if new:
                    let_go(found)
            raise
        self._refusal = ""
        return opened

    def _open(self, card: Mapping[str, Any], known: Backend | None = None) -> State:
        """The generation that a card names; ``known`` is the backend that has saved itself there."""
        generation = int(card["generation"])
        place = folder.data_folder(self.folder, generation)
        table = folder.read_table(place)
        if table.dim != card["dim"]:
            raise folder.BadIndex(f"{place} is damaged: its vectors have {table.dim} dimensions, not {card['dim']}")
        journal = Journal(folder.journal_file(self.folder, generation), read_only=self.read_only)
        around = Surroundings(card["measure"], self.folder, self.device, read_only=self.read_only)
        ids, facts = table.ids(), card["facts"]
        if known is not None:
            backend = known.renew(place, ids, table.base, facts)
        else:
            backend = reopen(card["uses"], table.base, ids, around, folder=place, facts=facts)
        return State(generation, table, backend, folder.open_pack(place), journal)

    def _replay(self) -> int:
        """Carry out what the journal says, and return the next free id."""
        highest = -1
        state = self.state
        for record in state.journal.records():
            change = changes.read(record)
            if isinstance(change, changes.Added):
                highest = max([highest, *(item.id for item in change.items)])
                state.places.update(change.places(record.offset))
            elif isinstance(change, changes.Removed):
                # A damaged record may have brought them.
                change = replace(change, ids=[id for id in change.ids if id in state.table])
            else:
                change = replace(change, items=[item for item in change.items if item.id in state.table])
            self._enter(change)
            self._pass_on(change)
        if state.journal.damaged:
            warnings.warn(
                f"{state.journal.file} has {state.journal.damaged} damaged places; what was written there is lost",
                stacklevel=4,
            )
        return highest + 1

    # --- changes ------------------------------------------------------------------------------------------

    def _commit(self, change: changes.Change) -> None:
        """Done from the moment when the journal has it, whatever the backend says: that can catch up."""
        self._catch_up()
        offset = self.state.journal.append(*change.record())
        if isinstance(change, changes.Added):
            self.next_id += len(change.items)
            self.state.places.update(change.places(offset))
        self._enter(change)
        try:
            self._pass_on(change)
        except BaseException as error:
            state, measure = self.state, self.settings["measure"]
            state.backend = Behind(state.backend, state.table, measure=measure, error=error)
            if not isinstance(error, Exception):
                raise

    def _enter(self, change: changes.Change) -> None:
        """Into the table."""
        table = self.state.table
        if isinstance(change, changes.Added):
            table.add(change.items, change.vectors)
        elif isinstance(change, changes.Removed):
            table.remove(change.ids)
        else:
            for item in change.items:
                table.change(item)

    def _pass_on(self, change: changes.Change) -> None:
        """To the backend."""
        if isinstance(change, changes.Added):
            self.state.backend.add(_ids(item.id for item in change.items), change.vectors)
        elif isinstance(change, changes.Removed):
            self.state.backend.remove(_ids(change.ids))

    def _catch_up(self) -> None:
        """Go back to a backend that failed, where it is well again."""
        state = self.state
        if isinstance(state.backend, Behind):
            place = folder.data_folder(self.folder, state.generation)
            state.backend = state.backend.caught_up(place, self.settings["facts"])

    def _check_writable(self) -> None:
        if self._refusal:
            raise folder.BadIndex(f"{self.folder} {self._refusal}")


def _ids(numbers: Any) -> Ids:
    return np.fromiter(numbers, dtype=np.int64)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
