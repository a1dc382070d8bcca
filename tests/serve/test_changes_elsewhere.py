"""A read-only server answers like one that was just started, whatever another process did to its folder."""

import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
from fake_index import encoded, picture
from fastapi.testclient import TestClient
from waiting import wait_for

from nearfar.search import Index
from nearfar.search.storage.database import Database

API = "/api/v1"
Client = Callable[..., TestClient]
Do = Callable[[str], None]
CHANGES = {
    "add": "index.add_images([('new.png', picture(9), 'class 9', {'year': 2020})])",
    "remove": "index.remove([3, 23])",
    "relabel": "index.storage.change([replace(item, label='other', name='x') for item in index.items[:5]])",
    "threshold": "index.set_threshold(threshold(0.5))",
    "compact": "index.remove([4]); index.compact()",
    "another backend": "index.compact(backend='exact:int8')",
    "all at once": "index.remove([0]); index.compact(); index.add_images([('a.png', picture(1), None, {})])",
    "rebuild": "index.close(); shutil.rmtree(place); index = Index.from_vectors(points, out=place, labels=['a'] * 9)",
    "rebuild with the same ids": "index.close(); shutil.rmtree(place); shutil.copytree(other, place); index = opened()",
    "exchange": "index.close(); place.rename(f'{place}.old'); shutil.copytree(other, place); index = opened()",
}
PROGRAM = """
import shutil, sys
from dataclasses import replace
from pathlib import Path
import numpy as np
from fake_index import picture, threshold
from nearfar.search import Index
place, other = map(Path, sys.argv[1:])
points = np.random.default_rng(0).normal(size=(9, 5)).astype(np.float32)
opened = lambda: Index.open(place, device="cpu")
for line in sys.stdin:
    exec(line, globals())
    print("done", flush=True)
"""


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory, small_index):
    """A folder, and a function that changes it in another process."""
    folder = tmp_path_factory.mktemp("elsewhere")
    other = shutil.copytree(small_index, folder / "other.index")
    with Index.open(other, device="cpu") as index:
        index.storage.database.write_settings({"identity": "another"})
        index.remove([5])
        index.compact()
    paths = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", PROGRAM, str(folder / "my.index"), str(other)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=paths) as process:

        def do(line):
            print(line, file=process.stdin, flush=True)
            assert process.stdout.readline() == "done\n"

        yield folder / "my.index", do


def answers(served):
    """The answers to every GET of an application, for some ids, classes and pages."""
    known = {}
    schema = served.get(f"{API}/openapi.json").json()
    for template in [f"{API}/openapi.json", *(path for path, methods in schema["paths"].items() if "get" in methods)]:
        paths = {template.replace("{id}", str(id)) for id in (0, 3, 4, 23, 24, 25)} - {"/metrics"}
        if template == f"{API}/items":
            paths |= {f"{API}/items?limit=1000", f"{API}/items?label=other", f"{API}/items?shuffle=3"}
        for path in paths:
            answer = served.get(path)
            known[path] = answer.status_code, answer.content
    return known


@pytest.mark.parametrize("fails_once", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_a_server_answers_like_a_fresh_one(change, fails_once, client, small_index, elsewhere, monkeypatch):
    place, do = elsewhere
    real, failed = Database.settings, []

    def settings(database):
        if not failed:
            failed.append(database)
            raise OSError("the disk is away")
        return real(database)

    shutil.rmtree(place, ignore_errors=True)
    shutil.rmtree(f"{place}.old", ignore_errors=True)
    shutil.copytree(small_index, place)
    served = client(Index.open(place, read_only=True, device="cpu"), read_only=True)
    before = answers(served)
    do("index = opened()")
    with monkeypatch.context() as patch:
        if fails_once:
            patch.setattr(Database, "settings", settings)
        do(CHANGES[change])
        wait_for(lambda: failed or not fails_once, 20)
        wait_for(lambda: answers(served) != before and served.get(f"{API}/health").status_code == 200, 20)
    fresh = answers(client(Index.open(place, read_only=True, device="cpu"), read_only=True))
    wait_for(lambda: answers(served) == fresh, 10)
    id = Index.open(place, read_only=True, device="cpu").items[-1].id
    hit = served.post(f"{API}/search/id/{id}", params={"k": 3}).json()
    assert {item["name"] for item in [hit["query"], *hit["hits"]]} <= {
        item["name"] for item in served.get(f"{API}/items").json()["items"]
    }
    do("index.close()")


@pytest.mark.parametrize("change", ["compact", "add many"])
def test_nobody_waits_while_changes_are_read(change, client, small_index, tmp_path, monkeypatch):
    place = shutil.copytree(small_index, tmp_path / "my.index")
    with Index.open(place, device="cpu") as writer:
        served = client(Index.open(place, read_only=True, device="cpu"), read_only=True)
        reading, real = threading.Event(), Database.items

        def slow(database):
            reading.set()
            time.sleep(2)
            return real(database)

        ways = [("GET", way, {}) for way in ("health", "info", "items", "labels", "map", "items/3/thumbnail")]
        ways += [("POST", f"search/id/3?{way}", {}) for way in ("", "label=class 3", "where=label=class 1")]
        ways += [("POST", "search", {"files": {"image": encoded(picture(3))}})]

        def ask():
            seconds = {}
            for method, way, settings in ways:
                began = time.perf_counter()
                assert served.request(method, f"{API}/{way}", **settings).status_code == 200
                seconds[way] = round(time.perf_counter() - began, 2)
            return seconds

        ask()  # starts the decoder, and imports what a map needs
        monkeypatch.setattr(Database, "items", slow)
        if change == "compact":
            writer.remove([23])
            writer.compact()
        else:
            writer.add_vectors(np.repeat(writer.vectors()[:1], 2000, axis=0))
        assert reading.wait(10)
        before, seconds = served.get(f"{API}/info").json()["count"], ask()
        assert max(seconds.values()) < 1, seconds
        assert served.get(f"{API}/info").json()["count"] == before
        wait_for(lambda: served.get(f"{API}/info").json()["count"] == len(writer), 10)


def test_health_tells_that_the_folder_is_gone(client, small_index, tmp_path):
    place = shutil.copytree(small_index, tmp_path / "my.index")
    for read_only in (True, False):
        served = client(Index.open(place, read_only=read_only, device="cpu"), read_only=read_only)
        assert served.get(f"{API}/health").json()["status"] == "ok"
        place.rename(tmp_path / f"away {read_only}")
        wait_for(lambda served=served: served.get(f"{API}/health").status_code == 503, 10)
        assert served.get(f"{API}/health").json()["error"]["code"] == "index_gone"
        assert served.get(f"{API}/info").json()["count"] == 24
        shutil.copytree(small_index, place)
        if read_only:
            wait_for(lambda served=served: served.get(f"{API}/health").status_code == 200, 10)
