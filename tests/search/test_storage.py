"""The files of an index: what was acknowledged is there, and nothing is half done."""

import shutil
import sqlite3

import numpy as np
import pytest
from search_cases import digit, model, photos, repeated, vectors

from nearfar.search import Index
from nearfar.search.storage import BadIndex, database, files

POINTS = vectors(30)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_compaction_leaves_one_generation_and_the_same_items(tmp_path):
    with Index.from_vectors(POINTS, out=tmp_path / "i", labels=["a"] * 30) as index:
        index.add_vectors(POINTS[:2], labels=["b", "b"], metadata=[{"x": 1}, {}])
        index.remove([4, 30])
        before = (list(index.items), np.array(index.vectors()))
        assert index.info()["pending_bytes"] > 0
        index.compact()
        assert index.info()["pending_bytes"] == 0
        assert list(index.items) == before[0]
        np.testing.assert_array_equal(index.vectors(), before[1])
    assert names(tmp_path / "i") == [".lock", ".nearfar", "data-000002", "index.sqlite", "index.sqlite-reserve"]
    with Index.open(tmp_path / "i") as index:
        assert list(index.items) == before[0]
        np.testing.assert_array_equal(index.vectors(), before[1])


def test_changes_are_there_before_compaction(tmp_path):
    with Index.from_vectors(POINTS, out=tmp_path / "i", labels=["a"] * 30) as index:
        index.add_vectors(POINTS[:2] + 1, names=["x", "y"], labels=["b", None], metadata=[{"größe": 1.5}, {}])
        index.remove([4, 31])
        before = (list(index.items), np.array(index.vectors()), index.search_vectors(POINTS[:3], 40))
    with Index.open(tmp_path / "i") as index:
        assert list(index.items) == before[0]
        np.testing.assert_array_equal(index.vectors(), before[1])
        for one, other in zip(index.search_vectors(POINTS[:3], 40), before[2], strict=True):
            assert [hit.id for hit in one] == [hit.id for hit in other]
        assert index.add_vectors(POINTS[:1]) == [32]  # ids are never reused


def test_acknowledged_changes_are_synced(tmp_path):
    with Index.from_vectors(POINTS, out=tmp_path / "i") as index:
        writer = index.storage.database._writer
        assert writer.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        assert writer.execute("PRAGMA synchronous").fetchone() == (2,)
        assert writer.execute("PRAGMA foreign_keys").fetchone() == (1,)
        assert writer.execute("PRAGMA user_version").fetchone() == (1,)


def test_readers_see_changes_without_reopening(tmp_path):
    with (
        Index.from_vectors(POINTS, out=tmp_path / "i", labels=["a"] * 30) as index,
        Index.open(tmp_path / "i", read_only=True) as reader,
    ):
        new = index.add_vectors(POINTS[:2] + 5, names=["x", "y"], labels=["b", "b"])
        assert len(reader) == 32
        assert reader.item(new[0]).name == "x"
        assert reader.search_vectors(POINTS[:1] + 5, 1)[0][0].id == new[0]
        assert reader.select({"label": "b"}).tolist() == new
        index.remove([0, new[1]])
        assert 0 not in reader
        assert reader.select({"label": "b"}).tolist() == new[:1]
        assert [hit.id for hit in reader.search_vectors(POINTS[:1], 40)[0]] == [
            hit.id for hit in index.search_vectors(POINTS[:1], 40)[0]
        ]
        index.compact()
        index.add_vectors(POINTS[:1], names=["after"])
        assert [item.name for item in reader.items] == [item.name for item in index.items]
        np.testing.assert_array_equal(reader.vectors(), index.vectors())
        index.compact(backend="faiss:flat")
        assert reader.info()["backend"] == "faiss:flat"
        assert reader.search_vectors(POINTS[1:2], 1)[0][0].id == 1


def test_readers_follow_a_busy_writer(tmp_path):
    """Threads of a reader search while another thread of the process writes and compacts."""
    with Index.from_vectors(POINTS, out=tmp_path / "i") as index, Index.open(tmp_path / "i", read_only=True) as reader:

        def ask():
            assert reader.search_vectors(POINTS[:2], 1)[0][0].id == 0
            assert len(reader.items) >= 30

        with repeated(ask):
            for number in range(40):
                index.remove(index.add_vectors(vectors(3, seed=number + 1))[:1])
                if number % 10 == 9:
                    index.compact()
        assert len(reader) == len(index) == 30 + 2 * 40


def test_a_reader_that_meets_a_compaction_misses_nothing(tmp_path, monkeypatch):
    read, compacted = files.read_vectors, []
    with Index.from_vectors(vectors(20), out=tmp_path / "i") as index:
        index.add_vectors(vectors(2))

        def late(place):
            if not compacted:
                compacted.append(place)
                index.compact()
            return read(place)

        monkeypatch.setattr(files, "read_vectors", late)
        with Index.open(tmp_path / "i", read_only=True) as other:
            assert compacted
            assert len(other) == 22


def test_a_folder_without_write_permission_can_be_read(tmp_path, monkeypatch):
    """As on a medium that is read-only: there is no room for shared memory, and none is needed."""
    Index.from_vectors(POINTS, out=tmp_path / "i").close()
    real = database._connect

    def refused(file, options=""):
        return real(file if "immutable" in options else tmp_path / "no" / "file", options)

    with monkeypatch.context() as patch:
        patch.setattr(database, "_connect", refused)
        with Index.open(tmp_path / "i", read_only=True) as index:
            assert len(index) == 30
            assert index.search_vectors(POINTS[:1], 1)[0][0].id == 0
        (tmp_path / "i" / "index.sqlite-wal").write_bytes(b"changes that the file alone does not have")
        with pytest.raises(OSError, match=r"Permission denied .*index\.sqlite"):
            Index.open(tmp_path / "i", read_only=True)


def test_a_full_disk_refuses_a_change_and_loses_nothing(tmp_path):
    with Index.from_vectors(POINTS, out=tmp_path / "i") as index:
        index.add_vectors(POINTS[:1], names=["before"])
        writer = index.storage.database._writer
        pages = writer.execute("PRAGMA page_count").fetchone()[0]
        writer.execute(f"PRAGMA max_page_count = {pages}")
        with pytest.raises(OSError, match=r"No space left on device: .*index\.sqlite"):
            index.add_vectors(np.repeat(POINTS, 40, axis=0))
        assert len(index) == 31
        assert len(index.search_vectors(POINTS[:1], 2000)[0]) == 31
        writer.execute("PRAGMA max_page_count = 1000000")
        assert index.add_vectors(POINTS[:1], names=["after"]) == [31]
    with Index.open(tmp_path / "i") as index:
        assert [item.name for item in index.items[-2:]] == ["before", "after"]


def test_space_of_removed_items_is_released(tmp_path):
    photos(tmp_path / "photos", 3)
    with Index.build(model(), tmp_path / "photos", out=tmp_path / "i", device="cpu") as index:
        file = tmp_path / "i" / "index.sqlite"
        before = file.stat().st_size
        index.remove(index.add_images([(str(n), digit(n), None, {}) for n in range(100)]))
        index.compact()
        assert file.stat().st_size <= before + 3 * 8192
        assert not (tmp_path / "i" / "index.sqlite-wal").stat().st_size


def test_files_of_a_crash_are_removed_and_no_others(tmp_path, monkeypatch):
    """The folder is copied at each step of a compaction, as if the process had been killed there."""
    strangers = ("data-birds/wren.jpg", "journal-covers/1.png", ".data-000007.77/vectors.npy", "data-000001/notes.txt",
                 ".index.sqlite.77", ".index.json.4711-0123abcd", "items.json", "data-²/x")  # fmt: skip
    steps = []

    def copy(place):
        steps.append(tmp_path / f"killed-{len(steps)}")
        shutil.copytree(tmp_path / "i", steps[-1])

    with Index.from_vectors(POINTS, out=tmp_path / "i") as index:
        for name in strangers:
            (tmp_path / "i" / name).parent.mkdir(exist_ok=True)
            (tmp_path / "i" / name).write_text("mine")
        index.add_vectors(POINTS[:1])
        with monkeypatch.context() as patch:
            patch.setattr(files, "sync_folder", copy)
            patch.setattr(files, "sweep", lambda folder, obsolete: copy(folder))
            index.compact()
    assert len(steps) == 3
    for killed in steps:
        with Index.open(killed) as index:
            index.add_vectors(POINTS[:1])
            index.compact()
            assert len(index) == 32
            current = index.storage.written()
        left = {str(path.relative_to(killed)) for path in killed.rglob("*") if path.is_file()}
        assert left == {*strangers, *current[:-1], ".lock", ".nearfar", "index.sqlite", "index.sqlite-reserve"}
        assert all((killed / name).read_text() == "mine" for name in strangers)


@pytest.mark.parametrize("content", [b"", b"nothing", b"SQLite format 3\0" + bytes(4000)])
def test_a_damaged_database_is_named(tmp_path, content):
    Index.from_vectors(POINTS, out=tmp_path / "i").close()
    (tmp_path / "i" / "index.sqlite").write_bytes(content)
    with pytest.raises(BadIndex, match=r"index\.sqlite is damaged"):
        Index.open(tmp_path / "i")


def test_missing_settings_and_vectors_are_named(tmp_path):
    with Index.from_vectors(POINTS, out=tmp_path / "i") as index:
        index.add_vectors(POINTS[:1])
    connection = sqlite3.connect(tmp_path / "i" / "index.sqlite")
    connection.execute("UPDATE changes SET vector = NULL")
    connection.commit()
    with pytest.raises(BadIndex, match="is damaged: item 30 has no vector"):
        Index.open(tmp_path / "i")
    connection.execute("DELETE FROM settings WHERE key = 'measure'")
    connection.commit()
    connection.close()
    with pytest.raises(BadIndex, match=r"index\.sqlite is damaged: measure missing"):
        Index.open(tmp_path / "i")


def test_a_failed_transaction_changes_nothing(tmp_path):
    with Index.from_vectors(POINTS, out=tmp_path / "i") as index:
        stored = index.storage.database

        def half():
            with stored.transaction():
                stored.remove([1, 2])
                raise ValueError("stop")

        with pytest.raises(ValueError, match="stop"):
            half()
        assert len(stored.items()) == 30
        assert not stored.changes()
        with pytest.raises(ValueError, match="not JSON compliant"):
            index.add_vectors(POINTS[:2], metadata=[{}, {"x": float("nan")}])
        assert len(index) == len(stored.items()) == 30
        assert index.add_vectors(POINTS[:1]) == [30]
