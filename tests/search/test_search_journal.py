"""The journal: what it says is done, and what was torn or damaged is passed over."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from search_cases import vectors

from nearfar.search import Index
from nearfar.search.storage import folder, journal
from nearfar.search.storage.folder import journal_file
from nearfar.search.storage.journal import HEAD, Journal


def filled(file: Path) -> list[int]:
    """Three records; where each ends."""
    ends = []
    with Journal(file) as journal:
        for number in range(3):
            journal.append({"number": number}, bytes([number]) * 50)
            ends.append(journal.size)
    return ends


def numbers(file: Path, **settings: bool) -> list[int]:
    with Journal(file, **settings) as journal:
        return [record.header["number"] for record in journal.records()]


def test_records_come_back_in_order(tmp_path: Path) -> None:
    filled(tmp_path / "j")
    with Journal(tmp_path / "j") as journal:
        assert [record.payload for record in journal.records()] == [bytes([n]) * 50 for n in range(3)]


def test_every_torn_end_is_passed_over(tmp_path: Path) -> None:
    """Cut at any byte, the journal holds the records that are whole, and goes on behind them."""
    ends = filled(tmp_path / "whole")
    data = (tmp_path / "whole").read_bytes()
    for length in range(len(data) + 1):
        file = tmp_path / "cut"
        file.write_bytes(data[:length])
        whole = [n for n, end in enumerate(ends) if end <= length]
        assert numbers(file, read_only=True) == whole
        assert file.stat().st_size == length  # whoever reads changes nothing
        with Journal(file) as journal:
            journal.append({"number": 9})
        assert numbers(file) == [*whole, 9]


def test_a_damaged_record_costs_only_itself(tmp_path: Path) -> None:
    ends = filled(tmp_path / "j")
    data = bytearray((tmp_path / "j").read_bytes())
    for place in (ends[0], ends[0] + HEAD.size - 1, ends[0] + HEAD.size + 3, ends[1] - 1):
        damaged = bytearray(data)
        damaged[place] ^= 0xFF
        (tmp_path / "k").write_bytes(damaged)
        with Journal(tmp_path / "k") as journal:
            assert [record.header["number"] for record in journal.records()] == [0, 2]
            assert journal.damaged == 1


@pytest.mark.parametrize("piece", [4, 5, 60])
def test_the_next_record_is_found_across_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    ends = filled(tmp_path / "j")
    data = bytearray((tmp_path / "j").read_bytes())
    data[ends[0]] ^= 0xFF
    (tmp_path / "j").write_bytes(data)
    monkeypatch.setattr(journal, "PIECE", piece)
    assert numbers(tmp_path / "j") == [0, 2]


def test_a_system_may_give_little_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Linux does beyond 2 GiB: nothing is taken for torn."""
    ends = filled(tmp_path / "j")
    read = os.pread
    monkeypatch.setattr(os, "pread", lambda handle, length, offset: read(handle, min(length, 7), offset))
    assert numbers(tmp_path / "j") == [0, 1, 2]
    assert (tmp_path / "j").stat().st_size == ends[-1]
    with Journal(tmp_path / "j") as opened:
        assert opened.read(ends[-1] - 50, 50) == bytes([2]) * 50


def test_what_could_not_be_read_is_not_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ends = filled(tmp_path / "j")
    read = os.pread
    with monkeypatch.context() as patch:
        patch.setattr(os, "pread", lambda handle, length, offset: read(handle, length, offset)[: ends[1] - offset])
        with pytest.raises(OSError, match="gave 0 bytes at"):
            Journal(tmp_path / "j")
    assert numbers(tmp_path / "j") == [0, 1, 2]


def test_a_reader_that_meets_a_save_misses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, saved = folder.read_table, []
    with Index.from_vectors(vectors(20), out=tmp_path / "i") as index:
        index.add_vectors(vectors(2))

        def late(place: Path) -> object:
            table = read(place)
            if not saved:
                saved.append(place)
                index.compact()
            return table

        monkeypatch.setattr(folder, "read_table", late)
        with Index.open(tmp_path / "i", read_only=True) as other:
            assert saved
            assert len(other) == 22


def test_an_index_survives_garbage_behind_its_journal(tmp_path: Path) -> None:
    points = vectors(30)
    with Index.from_vectors(points, out=tmp_path / "i") as index:
        ids = index.add_vectors(points[:2])
        index.remove([0])
    file = journal_file(tmp_path / "i", 1)
    with open(file, "ab") as out:
        out.write(os.urandom(333))
    with Index.open(tmp_path / "i") as index:
        assert len(index) == 31
        assert index.add_vectors(points[:1]) == [ids[-1] + 1]
    with Index.open(tmp_path / "i") as index:
        assert len(index) == 32


def test_an_index_warns_of_a_damaged_record(tmp_path: Path) -> None:
    points = vectors(30)
    with Index.from_vectors(points, out=tmp_path / "i") as index:
        index.add_vectors(points[:1])
        end = journal_file(tmp_path / "i", 1).stat().st_size
        index.add_vectors(points[1:2])
        index.remove([30])
    file = journal_file(tmp_path / "i", 1)
    data = bytearray(file.read_bytes())
    data[end - 5] ^= 0xFF
    file.write_bytes(data)
    with pytest.warns(UserWarning, match="1 damaged places"):
        opened = Index.open(tmp_path / "i")
    with opened as index:
        assert [item.id for item in index.items] == [*range(30), 31]
        assert index.add_vectors(points[:1]) == [32]


def test_folding_in_leaves_one_generation_and_the_same_items(tmp_path: Path) -> None:
    points = vectors(30)
    with Index.from_vectors(points, out=tmp_path / "i", labels=["a"] * 30) as index:
        index.add_vectors(points[:2], labels=["b", "b"], metadata=[{"x": 1}, {}])
        index.remove([4, 30])
        before = (list(index.items), np.array(index.vectors()))
        index.compact()
        names = sorted(path.name for path in (tmp_path / "i").iterdir())
        assert names == [".lock", "data-000002", "index.json", "journal-000002"]
        assert list(index.items) == before[0]
        np.testing.assert_array_equal(index.vectors(), before[1])
    with Index.open(tmp_path / "i") as index:
        assert list(index.items) == before[0]
        np.testing.assert_array_equal(index.vectors(), before[1])


def test_a_failed_save_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    points = vectors(30)
    with Index.from_vectors(points, out=tmp_path / "i") as index:
        index.add_vectors(points[:2])

        def full(*_: object) -> None:
            raise OSError("no space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(folder, "write_card", full)
            with pytest.raises(OSError, match="no space"):
                index.compact()
        assert index.add_vectors(points[:1]) == [32]
    with Index.open(tmp_path / "i") as index:
        assert len(index) == 33
        index.compact()
        assert len(index) == 33
