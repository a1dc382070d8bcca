"""An index folder from elsewhere connects to nothing that was not chosen here, and touches no data of others."""

import shutil

import pytest
from fake_milvus import install
from search_cases import vectors

from nearfar.search import Index
from nearfar.search.storage import BadIndex
from nearfar.search.storage.database import Database

MINE, OTHER = "http://mine:19530", "http://other:19530"
POINTS = vectors(20)


@pytest.fixture
def servers(monkeypatch):
    monkeypatch.delenv("NEARFAR_MILVUS", raising=False)
    return install(monkeypatch)


@pytest.fixture
def index(servers, tmp_path):
    Index.from_vectors(POINTS, out=tmp_path / "i", backend=f"milvus:{MINE}").close()
    return tmp_path / "i"


def change(folder, **settings):
    database = Database(folder / "index.sqlite")
    database.write_settings(settings)
    database.close()


def test_the_address_comes_from_an_argument_or_the_environment(index, servers, monkeypatch, nearfar):
    assert all(b"mine" not in file.read_bytes() for file in index.rglob("*") if file.is_file())
    servers.asked.clear()
    for read_only in (False, True):
        with pytest.raises(BadIndex, match="uses a Milvus server; set NEARFAR_MILVUS to its address"):
            Index.open(index, read_only=read_only)
    assert "set NEARFAR_MILVUS" in nearfar("index", "info", index, code=1).err
    assert servers.asked == []
    with Index.open(index, milvus=MINE) as opened:
        assert opened.search_vectors(POINTS[:1], 1)[0][0].id == 0
        opened.compact(backend=f"milvus:{OTHER}")
        opened.compact(backend="milvus:server")
    assert [len(held) for held in servers.collections.values()] == [0, 1]
    monkeypatch.setenv("NEARFAR_MILVUS", OTHER)
    with Index.open(index) as opened:
        assert opened.search_vectors(POINTS[:1], 1)[0][0].id == 0
    assert servers.asked == [MINE, OTHER, OTHER, OTHER]


def test_an_address_in_the_folder_is_damage(index, servers):
    servers.asked.clear()
    change(index, uses=f"milvus:{OTHER}")
    with pytest.raises(BadIndex, match="uses missing or wrong"):
        Index.open(index, milvus=MINE)
    assert servers.asked == []


def test_no_collection_of_another_index_is_touched(index, servers, tmp_path):
    Index.from_vectors(POINTS[:3], out=tmp_path / "b", backend=f"milvus:{MINE}").close()
    (theirs, own), held = servers.collections[MINE], servers.collections[MINE]
    before = dict(held[theirs])
    change(tmp_path / "b", facts={"collection": theirs})
    with Index.open(tmp_path / "b", milvus=MINE) as opened:
        assert len(opened.search_vectors(POINTS[:1], 5)[0]) == 3
        opened.add_vectors(POINTS[3:4])
        opened.compact(backend="exact")
    assert held[theirs].keys() == before.keys()
    assert own in held


def test_a_copy_of_an_index_gets_a_collection_of_its_own(index, servers, tmp_path):
    shutil.copytree(index, tmp_path / "copy")
    with Index.open(tmp_path / "copy", milvus=MINE) as opened:
        opened.remove(range(15))
        assert len(opened.search_vectors(POINTS[:1], 9)[0]) == 5
    assert sorted(len(each) for each in servers.collections[MINE].values()) == [5, 20]
    with Index.open(index, milvus=MINE) as opened:
        assert opened.search_vectors(POINTS[:1], 1)[0][0].id == 0


def test_searches_are_exact_while_a_server_is_dead(index, servers):
    with Index.open(index, milvus=MINE) as opened:
        servers.dead = True
        servers.calls = 0
        for row in range(5):
            assert opened.search_vectors(POINTS[row : row + 1], 1)[0][0].id == row
        assert servers.calls == 1  # and it is not asked again at once
        assert opened.add_vectors(POINTS[:1] + 1) == [20]
        servers.dead = False
        opened.remove([20])
        assert [hit.id for hit in opened.search_vectors(POINTS[:1], 1)[0]] == [0]
