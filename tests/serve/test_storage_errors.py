"""A full disk and a vanished index are told in one sentence, and nothing is acknowledged that is not stored."""

import errno
import os
import shutil

import pytest
from fake_index import encoded, picture

from nearfar.search import Index, projection
from nearfar.search.storage.database import Database

API = "/api/v1"


@pytest.fixture
def index(small_index, tmp_path):
    return Index.open(shutil.copytree(small_index, tmp_path / "my.index"), device="cpu")


def add(served):
    return served.post(f"{API}/items", files={"image": encoded(picture(3, side=200))})


def full(*_, **__):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_is_told(client, index):
    served, writer = client(index), index.storage.database._writer
    pages = writer.execute("PRAGMA page_count").fetchone()[0]
    writer.execute(f"PRAGMA max_page_count = {pages}")
    answers = [add(served) for _ in range(40)]
    assert {answer.status_code for answer in answers} <= {201, 507}
    refused = answers[-1].json()["error"]
    assert refused == {"code": "disk_full", "message": "the disk of the server is full; nothing was changed"}
    assert served.get(f"{API}/info").json()["count"] == 24 + [answer.status_code for answer in answers].count(201)
    writer.execute("PRAGMA max_page_count = 4294967294")
    assert add(served).status_code == 201


def test_a_full_disk_refuses_no_removal(client, index, monkeypatch):
    """Nothing can be written while the space is taken that is kept for removals."""
    real = Database.remove
    reserve = index.folder / "index.sqlite-reserve"
    monkeypatch.setattr(
        Database, "remove", lambda self, ids: full() if reserve.exists() and reserve.stat().st_size else real(self, ids)
    )
    served = client(index)
    assert [served.delete(f"{API}/items/{id}").status_code for id in (3, 4, 3)] == [200, 200, 404]
    assert reserve.exists()
    assert served.get(f"{API}/info").json()["count"] == 22


def test_an_upload_that_finds_no_room_is_told(client, index, monkeypatch):
    monkeypatch.setattr("starlette.datastructures.UploadFile.write", full)
    assert add(client(index)).status_code == 507


def test_the_map_needs_no_cache(client, index, monkeypatch):
    monkeypatch.setattr(projection.np, "savez", full)
    answer = client(index).get(f"{API}/map")
    assert answer.status_code == 200
    assert answer.content.startswith(b"NFMAP1")
    assert not (index.folder / "map-pca.npz").exists()


def test_a_vanished_index_takes_nothing_more(client, index, small_index):
    served = client(index)
    assert add(served).status_code == 201
    shutil.rmtree(index.folder)
    for _ in range(2):
        answer = add(served)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "index_gone")
        assert served.delete(f"{API}/items/3").status_code == 404
        assert served.get(f"{API}/info").json()["count"] == 25
        shutil.copytree(small_index, index.folder, dirs_exist_ok=True)  # another one in its place
