"""Milvus servers: whose address and collection is used, and what happens when they lag behind, lose data or fail."""

import shutil

import numpy as np
import pytest
from fake_milvus import Client, install
from search_cases import vectors

from nearfar.search import Index
from nearfar.search.backends import milvus
from nearfar.search.backends.fallback import ExactFallback
from nearfar.search.storage import BadIndex
from nearfar.search.storage.database import Database

SERVER, OTHER = "http://far:19530", "http://other:19530"
POINTS = vectors(40)


@pytest.fixture
def servers(monkeypatch):
    monkeypatch.setenv("NEARFAR_MILVUS", SERVER)
    monkeypatch.setattr(milvus, "REST", 0.0)
    return install(monkeypatch)


@pytest.fixture
def folder(servers, tmp_path):
    """An index of 30 vectors, of which one was removed and two were added since the last compaction."""
    with Index.from_vectors(POINTS[:28], out=tmp_path / "i", backend=f"milvus:{SERVER}") as index:
        index.add_vectors(POINTS[28:30])
        index.remove([4])
    return tmp_path / "i"


def found(index):
    """The ids that searches find."""
    return sorted(hit.id for hit in index.search_vectors(POINTS[:1], 100)[0])


def nearest(index, row):
    return index.search_vectors(POINTS[row : row + 1], 1)[0][0].id


def collection(servers):
    (held,) = servers.collections[SERVER].values()
    return held


@pytest.mark.parametrize("is_open", [True, False])
def test_a_reader_knows_more_than_a_server_that_lags_behind(servers, folder, is_open):
    with Index.open(folder) as writer, Index.open(folder, read_only=True) as early:
        assert nearest(early, 7) == 7
        servers.dead = True
        writer.add_vectors(POINTS[30:33])
        writer.remove([7, 29])
        servers.dead = False
        assert set(collection(servers)) == {*range(30)} - {4}
        reader = early if is_open else Index.open(folder, read_only=True)
        calls = servers.calls
        assert nearest(reader, 31) == 31
        assert nearest(reader, 28) == 28
        assert 7 not in [hit.id for hit in reader.search_vectors(POINTS[7:8], 5)[0]]
        assert servers.calls > calls, "the server was not asked"
        assert found(reader) == found(writer) == sorted({*range(33)} - {4, 7, 29})
        reader.close()


def test_a_reader_does_not_ask_a_collection_that_is_being_filled(servers, folder):
    for id in range(10, 20):
        del collection(servers)[id]
    with Index.open(folder, read_only=True) as reader:
        assert [nearest(reader, row) for row in range(10, 20)] == list(range(10, 20))


def test_a_collection_that_is_lost_is_filled_with_the_changes(servers, folder):
    servers.collections[SERVER].clear()
    with Index.open(folder) as index:
        assert found(index) == sorted({*range(30)} - {4})
    assert set(collection(servers)) == {*range(30)} - {4}


@pytest.mark.parametrize("wrong", ["dimension", "measure"])
def test_a_collection_of_another_schema_is_made_again(servers, folder, monkeypatch, wrong):
    if wrong == "dimension":
        collection(servers).update({id: np.ones(32) for id in range(30)})
    else:
        monkeypatch.setattr(Client, "describe_index", lambda *_, **__: {"metric_type": "L2"})
        collection(servers)[7] = -POINTS[7]
    with Index.open(folder) as index:
        calls = servers.calls
        assert [nearest(index, row) for row in (7, 20)] == [7, 20]
        assert servers.calls == calls + 2


def test_a_server_that_comes_back_empty_is_filled(servers, folder):
    with Index.open(folder) as index:
        servers.dead = True
        index.add_vectors(POINTS[30:31])
        servers.collections[SERVER].clear()
        servers.dead = False
        index.add_vectors(POINTS[31:32])
        assert not isinstance(index.storage.backend, ExactFallback)
        assert set(collection(servers)) == {*range(32)} - {4}
        assert found(index) == sorted({*range(32)} - {4})


def test_vectors_that_a_server_lost_are_noticed_after_it_failed(servers, folder):
    with Index.open(folder) as index:
        servers.dead = True
        assert nearest(index, 7) == 7
        del collection(servers)[7]
        servers.dead = False
        assert nearest(index, 7) == 7
        index.compact()
        assert set(collection(servers)) == {*range(30)} - {4}
        assert nearest(index, 7) == 7


def test_an_index_opens_though_the_server_fails_and_catches_up(servers, folder, caplog):
    servers.dead = True
    with Index.open(folder) as index, Index.open(folder, read_only=True) as reader:
        assert "milvus:server failed (TimeoutError: deadline exceeded)" in caplog.text
        assert index.add_vectors(POINTS[30:31]) == [30]
        assert found(index) == found(reader) == sorted({*range(31)} - {4})
        with pytest.raises(RuntimeError, match="nothing is lost: compact again when it works"):
            index.compact()
        servers.dead = False
        index.compact()
        assert set(collection(servers)) == {*range(31)} - {4}
        assert found(index) == found(reader) == sorted({*range(31)} - {4})


def test_a_server_that_fails_while_it_is_filled_is_an_error_that_names_it(servers, tmp_path, monkeypatch):
    monkeypatch.setattr(milvus, "BATCH", 10)
    with monkeypatch.context() as patch:
        patch.setattr("fake_milvus.Client.insert", lambda *_, **__: 1 / 0)
        with pytest.raises(ConnectionError, match=f"Milvus at {SERVER} failed while its collection was filled"):
            Index.from_vectors(POINTS, out=tmp_path / "new", backend=f"milvus:{SERVER}")
    assert not servers.collections[SERVER]
    with Index.from_vectors(POINTS, out=tmp_path / "new", backend=f"milvus:{SERVER}") as index:
        assert found(index) == list(range(40))


def test_nothing_listens_at_the_address(tmp_path, monkeypatch):
    monkeypatch.setattr(milvus, "SECONDS", 1.0)
    with pytest.raises(ConnectionError, match=r"Milvus at http://127\.0\.0\.1:9 does not answer .*is the server"):
        Index.from_vectors(POINTS, out=tmp_path / "i", backend="milvus:http://127.0.0.1:9")


def test_a_filter_of_many_ids_is_searched_exactly(servers, folder, monkeypatch):
    monkeypatch.setattr(milvus, "MOST", 20)
    with Index.open(folder) as index:
        calls = servers.calls
        assert len(index.search_vectors(POINTS[:1], 5, where={"id": list(range(25))})[0]) == 5
        assert servers.calls == calls


# --- addresses and collections -------------------------------------------------------------------------------


@pytest.fixture
def index(servers, monkeypatch, tmp_path):
    """An index whose address is not in the environment."""
    monkeypatch.delenv("NEARFAR_MILVUS")
    monkeypatch.setattr(milvus, "REST", 30.0)
    Index.from_vectors(POINTS[:20], out=tmp_path / "i", backend=f"milvus:{SERVER}").close()
    return tmp_path / "i"


def change(folder, **settings):
    database = Database(folder / "index.sqlite")
    database.write_settings(settings)
    database.close()


def test_the_address_comes_from_an_argument_or_the_environment(index, servers, monkeypatch, nearfar):
    assert all(b"far:19530" not in file.read_bytes() for file in index.rglob("*") if file.is_file())
    servers.asked.clear()
    for read_only in (False, True):
        with pytest.raises(BadIndex, match="uses a Milvus server; set NEARFAR_MILVUS to its address"):
            Index.open(index, read_only=read_only)
    assert "set NEARFAR_MILVUS" in nearfar("index", "info", index, code=1).err
    assert servers.asked == []
    with Index.open(index, milvus=SERVER) as opened:
        assert opened.search_vectors(POINTS[:1], 1)[0][0].id == 0
        opened.compact(backend=f"milvus:{OTHER}")
        opened.compact(backend="milvus:server")
    assert [len(held) for held in servers.collections.values()] == [0, 1]
    monkeypatch.setenv("NEARFAR_MILVUS", OTHER)
    with Index.open(index) as opened:
        assert opened.search_vectors(POINTS[:1], 1)[0][0].id == 0
    assert servers.asked == [SERVER, OTHER, OTHER, OTHER]


def test_an_address_in_the_folder_is_damage(index, servers):
    servers.asked.clear()
    change(index, uses=f"milvus:{OTHER}")
    with pytest.raises(BadIndex, match="uses missing or wrong"):
        Index.open(index, milvus=SERVER)
    assert servers.asked == []


def test_no_collection_of_another_index_is_touched(index, servers, tmp_path):
    Index.from_vectors(POINTS[:3], out=tmp_path / "b", backend=f"milvus:{SERVER}").close()
    (theirs, own), held = servers.collections[SERVER], servers.collections[SERVER]
    before = dict(held[theirs])
    change(tmp_path / "b", facts={"collection": theirs})
    with Index.open(tmp_path / "b", milvus=SERVER) as opened:
        assert len(opened.search_vectors(POINTS[:1], 5)[0]) == 3
        opened.add_vectors(POINTS[3:4])
        opened.compact(backend="exact")
    assert held[theirs].keys() == before.keys()
    assert own in held


def test_a_copy_of_an_index_gets_a_collection_of_its_own(index, servers, tmp_path):
    shutil.copytree(index, tmp_path / "copy")
    with Index.open(tmp_path / "copy", milvus=SERVER) as opened:
        opened.remove(range(15))
        assert len(opened.search_vectors(POINTS[:1], 9)[0]) == 5
    assert sorted(len(each) for each in servers.collections[SERVER].values()) == [5, 20]
    with Index.open(index, milvus=SERVER) as opened:
        assert opened.search_vectors(POINTS[:1], 1)[0][0].id == 0


def test_searches_are_exact_while_a_server_is_dead(index, servers):
    with Index.open(index, milvus=SERVER) as opened:
        servers.dead = True
        servers.calls = 0
        for row in range(5):
            assert opened.search_vectors(POINTS[row : row + 1], 1)[0][0].id == row
        assert servers.calls == 1  # and it is not asked again at once
        assert opened.add_vectors(POINTS[:1] + 1) == [20]
        servers.dead = False
        opened.remove([20])
        assert [hit.id for hit in opened.search_vectors(POINTS[:1], 1)[0]] == [0]
