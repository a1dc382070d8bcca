"""When something fails in the middle: what was acknowledged stays, and what was refused is not there."""

import pytest
from search_cases import vectors

from nearfar.search import Index
from nearfar.search.backends.exact import Exact
from nearfar.search.backends.faiss import Faiss
from nearfar.search.storage import BadIndex, files
from nearfar.search.storage.database import Database

POINTS = vectors(30)


def fails(*_, **__):
    raise OSError(24, "Too many open files")


@pytest.mark.parametrize(
    ("place", "name"),
    [(files, "read_vectors"), (files, "write_vectors"), (Exact, "open"), (Database, "finish_compaction")],
)
def test_a_compaction_that_cannot_be_opened_changes_nothing(tmp_path, monkeypatch, place, name):
    with Index.from_vectors(POINTS, out=tmp_path / "i") as index:
        index.add_vectors(POINTS[:1], names=["before"])
        with monkeypatch.context() as patch:
            patch.setattr(place, name, fails)
            with pytest.raises(OSError, match="Too many open files"):
                index.compact()
        index.add_vectors(POINTS[:1], names=["after"])
    with Index.open(tmp_path / "i") as index:
        assert [item.name for item in index.items[-2:]] == ["before", "after"]
        index.compact()
        assert [item.name for item in index.items[-2:]] == ["before", "after"]


def test_a_new_backend_of_a_failed_compaction_is_discarded(tmp_path, monkeypatch):
    gone = []
    monkeypatch.setattr(Faiss, "discard", lambda backend: gone.append(backend))
    with Index.from_vectors(POINTS, out=tmp_path / "i") as index:
        for place, name in ((Faiss, "open"), (Database, "finish_compaction")):
            with monkeypatch.context() as patch:
                patch.setattr(place, name, fails)
                with pytest.raises(OSError, match="Too many open files"):
                    index.compact(backend="faiss:flat")
        assert [type(each) for each in gone] == [Faiss, Faiss]
        assert index.info()["backend"] == "exact"


@pytest.mark.parametrize("measure", ["cosine", "euclidean"])
@pytest.mark.parametrize(("name", "kind"), [("exact", Exact), ("faiss:hnsw", Faiss)])
def test_a_backend_that_fails_keeps_no_change_from_being_done(tmp_path, monkeypatch, caplog, name, kind, measure):
    first, second = vectors(2, seed=1)
    with Index.from_vectors(POINTS, out=tmp_path / "i", backend=name, measure=measure) as index:
        index.add_vectors(POINTS[3:4])
        with monkeypatch.context() as patch:
            patch.setattr(kind, "add", fails)
            patch.setattr(kind, "open", fails)
            assert index.add_vectors(first[None]) == [31]
            assert "failed (OSError: [Errno 24] Too many open files)" in caplog.text
            if kind is not Exact:  # which answers meanwhile, and fails here
                assert index.search_vectors(first[None], 1)[0][0].id == 31
        with monkeypatch.context() as patch:
            patch.setattr(kind, "open", fails)
            index.remove([4, 30])
            assert index.add_vectors(second[None]) == [32]
            assert _all(index) == [0, 1, 2, 3, *range(5, 30), 31, 32]
            assert [index.search_vectors(each[None], 1)[0][0].id for each in (first, second)] == [31, 32]
            with pytest.raises(RuntimeError, match="has not recovered since it failed"):
                index.compact()
            with Index.open(tmp_path / "i", read_only=True) as other:
                assert _all(other) == _all(index)
        # With the next change all is well again.
        index.remove([5])
        assert type(index.storage.backend) is kind
        assert _all(index) == [0, 1, 2, 3, *range(6, 30), 31, 32]
        index.compact()
        assert _all(index) == [0, 1, 2, 3, *range(6, 30), 31, 32]
    with Index.open(tmp_path / "i") as index:
        assert _all(index) == [0, 1, 2, 3, *range(6, 30), 31, 32]


def _all(index):
    """What searches find, which must be what there is."""
    found = sorted(hit.id for hit in index.search_vectors(POINTS[:1], 100)[0])
    assert found == [item.id for item in index.items]
    return found


def test_a_removal_that_fails_is_done_all_the_same(tmp_path, monkeypatch):
    with Index.from_vectors(POINTS, out=tmp_path / "i", backend="faiss:flat") as index:
        with monkeypatch.context() as patch:
            patch.setattr(Faiss, "remove", fails)
            index.remove([3])
            assert 3 not in index
            assert 3 not in _all(index)
        index.compact()
        assert 3 not in _all(index)
    with Index.open(tmp_path / "i") as index:
        assert 3 not in _all(index)


def test_whoever_leaves_a_backend_that_is_gone_is_not_stopped(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(Faiss, "add", fails)
    monkeypatch.setattr(Faiss, "open", fails)
    monkeypatch.setattr(Faiss, "discard", fails)
    with Index.from_vectors(POINTS, out=tmp_path / "i", backend="faiss:flat") as index:
        index.add_vectors(POINTS[:1])
        index.compact(backend="exact")
        assert index.info()["backend"] == "exact"
        assert len(_all(index)) == 31
    assert "data of faiss:flat could not be removed" in caplog.text


def test_a_closed_index_says_so(tmp_path):
    index = Index.from_vectors(POINTS, out=tmp_path / "i")
    index.close()
    for change in (lambda: index.add_vectors(POINTS[:1]), lambda: index.remove([0]), index.compact):
        with pytest.raises(BadIndex, match="i is closed; open it again to change it"):
            change()


def test_closing_lets_go_of_the_folder_though_the_backend_fails(tmp_path, monkeypatch):
    index = Index.from_vectors(POINTS, out=tmp_path / "i")
    with monkeypatch.context() as patch:
        patch.setattr(Exact, "close", fails)
        with pytest.raises(OSError, match="Too many open files"):
            index.close()
    Index.open(tmp_path / "i").close()
