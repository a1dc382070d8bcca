"""Milvus as a server: it passes the battery of backends, and may hang, or be killed and come back."""

import tempfile
import threading
import time
from pathlib import Path

import pytest
from filelock import FileLock
from milvus_server import Server
from search_cases import ranked_by_hand, vectors
from test_backends import check_backend, create
from waiting import wait_for

from nearfar.search import Index
from nearfar.search.backends import milvus

POINTS = vectors(60)
pytest.importorskip("milvus", reason="the package milvus, which contains the server, is not installed")


@pytest.fixture(scope="module")
def milvus_server(tmp_path_factory):
    """A server for all tests. There can be one on a machine, as it locks a file in a fixed place."""
    with FileLock(Path(tempfile.gettempdir()) / "nearfar-milvus.lock"):
        server = Server(tmp_path_factory.mktemp("milvus"))
        server.start()
        yield server
        server.stop()


@pytest.mark.parametrize("measure", ["cosine", "euclidean"])
def test_a_server_passes_the_battery(milvus_server, tmp_path, measure, asked):
    check_backend(create(tmp_path / "i", f"milvus:{milvus_server.address}", measure))
    assert asked


def neighbors(index, k=5):
    return [[hit.id for hit in row] for row in index.search_vectors(POINTS[:8], k)]


def exact(points, k=5):
    return ranked_by_hand(points, POINTS[:8], k, "cosine")[0].tolist()


@pytest.fixture
def asked(monkeypatch):
    """Grows with every search that the server has answered."""
    answers = []
    find = milvus.Milvus._find

    def spied(*arguments):
        found = find(*arguments)
        answers.append(len(arguments[1]))
        return found

    monkeypatch.setattr(milvus.Milvus, "_find", spied)
    return answers


def test_a_server_killed_during_adds_loses_nothing(milvus_server, tmp_path, asked, monkeypatch):
    monkeypatch.setattr(milvus, "REST", 0.0)
    with Index.from_vectors(POINTS[:40], out=tmp_path / "i", backend=f"milvus:{milvus_server.address}") as index:
        assert neighbors(index) == exact(POINTS[:40])
        assert len(asked) == 1
        acknowledged = []
        adding = threading.Thread(target=add_one_by_one, args=(index, acknowledged))
        adding.start()
        wait_for(lambda: len(acknowledged) >= 3)
        milvus_server.kill()
        try:
            adding.join()
            assert acknowledged == list(range(40, 58))
            asked.clear()
            assert neighbors(index) == exact(POINTS[:58])
            assert not asked, "a dead server has answered"
        finally:
            milvus_server.start()
        index.add_vectors(POINTS[58:])
        wait_for(lambda: compacted(index), seconds=180.0)
        wait_for(lambda: answered(index, asked), seconds=180.0)
    with Index.open(tmp_path / "i", milvus=milvus_server.address) as index:
        assert answered(index, asked)


def add_one_by_one(index, acknowledged):
    for row in range(40, 58):
        acknowledged += index.add_vectors(POINTS[row : row + 1])


def answered(index, asked):
    """Whether the server, and not exact search, has found the neighbors; they are right in both cases."""
    before = len(asked)
    assert neighbors(index) == exact(POINTS)
    return len(asked) > before


def compacted(index):
    """Whether the server has what it missed; for some seconds after its start, it accepts nothing."""
    from pymilvus.exceptions import MilvusException

    try:
        index.compact()
    except (RuntimeError, MilvusException):
        return False
    return True


def test_a_server_that_hangs_holds_nobody_up(milvus_server, tmp_path, asked, monkeypatch):
    with Index.from_vectors(POINTS, out=tmp_path / "i", backend=f"milvus:{milvus_server.address}") as index:
        assert neighbors(index) == exact(POINTS)
        assert len(asked) == 1
        monkeypatch.setattr(milvus, "SECONDS", 0.5)
        with milvus_server.hanging():
            start = time.monotonic()
            assert neighbors(index) == exact(POINTS)
            assert neighbors(index) == exact(POINTS)
            assert time.monotonic() - start < 10.0
        assert len(asked) == 1
