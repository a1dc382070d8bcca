"""An index folder from elsewhere connects to nothing that was not chosen here, and touches no data of others."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from fake_milvus import Servers, install
from search_cases import vectors

from nearfar.cli import main
from nearfar.search import Index
from nearfar.search.storage import BadIndex
from nearfar.search.storage.database import Database

MINE, OTHER = "http://mine:19530", "http://other:19530"
POINTS = vectors(20)


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Servers:
    monkeypatch.setenv("NEARFAR_CONFIG", str(tmp_path / "config"))
    return install(monkeypatch)


@pytest.fixture
def index(servers: Servers, tmp_path: Path) -> Path:
    Index.from_vectors(POINTS, out=tmp_path / "i", backend=f"milvus:{MINE}").close()
    return tmp_path / "i"


def change(folder: Path, **settings: object) -> None:
    database = Database(folder / "index.sqlite")
    database.write_settings(settings)
    database.close()


def test_an_index_that_was_made_here_is_opened_without_a_question(index: Path, servers: Servers) -> None:
    with Index.open(index) as opened:
        assert opened.search_vectors(POINTS[:1], 1)[0][0].id == 0
        opened.compact(backend=f"milvus:{OTHER}")
    index.rename(index.parent / "moved")
    with Index.open(index.parent / "moved") as opened:
        assert len(opened) == 20
    assert [len(each) for each in servers.collections.values()] == [0, 1]


def test_an_index_from_elsewhere_connects_to_nothing(
    index: Path, servers: Servers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(tmp_path / "config")  # as on another machine
    servers.asked.clear()
    for read_only in (False, True):
        with pytest.raises(BadIndex, match="uses the Milvus server http://mine:19530, which was not chosen on this"):
            Index.open(index, read_only=read_only)
    with pytest.raises(SystemExit):
        main(["index", "info", str(index)])
    assert "use --trust (trust=True in Python), or set NEARFAR_MILVUS" in capsys.readouterr().err
    assert servers.asked == []
    monkeypatch.setenv("NEARFAR_MILVUS", OTHER)
    with Index.open(index) as opened:
        assert opened.search_vectors(POINTS[:1], 1)[0][0].id == 0
    assert servers.asked == [OTHER]
    monkeypatch.delenv("NEARFAR_MILVUS")
    Index.open(index, trust=True).close()
    Index.open(index).close()  # once is enough
    assert servers.asked == [OTHER, MINE, MINE]


def test_a_changed_address_is_not_trusted(index: Path, servers: Servers) -> None:
    servers.asked.clear()
    change(index, uses=f"milvus:{OTHER}")
    with pytest.raises(BadIndex, match="not chosen on this machine"):
        Index.open(index)
    change(index, uses="exact", facts={}, backend=f"milvus:{OTHER}")
    with Index.open(index) as opened:
        opened.add_vectors(POINTS[:1])
        with pytest.raises(BadIndex, match="not chosen on this machine"):
            opened.compact()
    assert servers.asked == []


def test_no_collection_of_another_index_is_touched(index: Path, servers: Servers, tmp_path: Path) -> None:
    Index.from_vectors(POINTS[:3], out=tmp_path / "b", backend=f"milvus:{MINE}").close()
    (theirs, own), held = servers.collections[MINE], servers.collections[MINE]
    before = dict(held[theirs])
    change(tmp_path / "b", facts={"collection": theirs})
    with Index.open(tmp_path / "b") as opened:
        assert len(opened.search_vectors(POINTS[:1], 5)[0]) == 3
        opened.add_vectors(POINTS[3:4])
        opened.compact(backend="exact")
    assert held[theirs].keys() == before.keys()
    assert own in held


def test_a_copy_of_an_index_gets_a_collection_of_its_own(index: Path, servers: Servers, tmp_path: Path) -> None:
    shutil.copytree(index, tmp_path / "copy")
    with Index.open(tmp_path / "copy") as opened:
        opened.remove(range(15))
        assert len(opened.search_vectors(POINTS[:1], 9)[0]) == 5
    assert sorted(len(each) for each in servers.collections[MINE].values()) == [5, 20]
    with Index.open(index) as opened:
        assert opened.search_vectors(POINTS[:1], 1)[0][0].id == 0


def test_an_index_without_identity_gets_one_and_leaves_its_old_collection(index: Path, servers: Servers) -> None:
    (old,) = servers.collections[MINE]
    servers.collections[MINE]["nearfar_0123456789abcdef"] = servers.collections[MINE].pop(old)
    change(index, facts={"collection": "nearfar_0123456789abcdef"})
    database = Database(index / "index.sqlite")
    database._writer.execute("DELETE FROM settings WHERE key = 'identity'")
    database.close()
    with pytest.raises(BadIndex, match="--trust"):
        Index.open(index)
    for _ in range(2):
        with Index.open(index, trust=True) as opened:
            assert opened.search_vectors(POINTS[:1], 1)[0][0].id == 0
        assert len(servers.collections[MINE]) == 2


def test_searches_are_exact_while_a_server_is_dead(index: Path, servers: Servers) -> None:
    with Index.open(index) as opened:
        servers.dead = True
        servers.calls = 0
        for row in range(5):
            assert opened.search_vectors(POINTS[row : row + 1], 1)[0][0].id == row
        assert servers.calls == 1  # and it is not asked again at once
        assert opened.add_vectors(POINTS[:1] + 1) == [20]
        servers.dead = False
        opened.remove([20])
        assert [hit.id for hit in opened.search_vectors(POINTS[:1], 1)[0]] == [0]
