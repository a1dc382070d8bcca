"""A server process: under concurrent requests, stopped, and killed while it writes."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_index import FakeIndex, encoded, picture

from nearfar.search import Index

API = "/api/v1"
KILLS = int(os.environ.get("NEARFAR_KILLS", "3"))


@contextmanager
def process(index: Path, *words: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Start `nearfar serve` and return the process and its address."""
    command = [sys.executable, "-m", "nearfar", "serve", str(index), "--port", "0", "--device", "cpu", *words]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    ) as child:
        try:
            assert child.stdout is not None
            assert child.stderr is not None
            for line in child.stdout:
                if " is served at " in line:
                    break
            else:
                raise AssertionError(child.stderr.read())
            yield child, line.split(" is served at ")[1].split()[0]
        finally:
            child.kill()


def test_nothing_acknowledged_is_lost_when_the_server_is_killed(small_index: Path, tmp_path: Path) -> None:
    place = shutil.copytree(small_index, tmp_path / "my.index")
    known: dict[int, str] = {}
    gone: set[int] = set()
    for kill in range(KILLS):
        enough, stop = threading.Event(), threading.Event()

        def write(worker: int, address: str, kill: int = kill, stop: Any = stop, enough: Any = enough) -> None:
            with httpx.Client(base_url=address, timeout=20) as client:
                for number in range(10_000):
                    name = f"{kill}-{worker}-{number}.png"
                    try:
                        answer = client.post(f"{API}/items", files={"image": (name, encoded(picture(number)))})
                        assert answer.status_code == 201, answer.text
                        known[answer.json()["id"]] = name
                        if number % 5 == 4:
                            answer = client.delete(f"{API}/items/{answer.json()['id']}")
                            assert answer.status_code == 200, answer.text
                            gone.add(answer.json()["removed"])
                    except httpx.HTTPError:
                        assert stop.is_set(), "the server went away by itself"
                        return
                    if number == 5 + 3 * kill:
                        enough.set()

        with process(place) as (child, address), ThreadPoolExecutor(4) as pool:
            writers = [pool.submit(write, worker, address) for worker in range(4)]
            assert enough.wait(60)
            stop.set()
            child.send_signal(signal.SIGKILL)
            child.wait()
            for writer in writers:
                writer.result(30)
    with Index.open(place, device="cpu") as index:
        kept = {item.id: item.name for item in index.items}
        assert len(known) > 20 * KILLS
        for id, name in known.items():
            if id in gone:
                assert id not in kept
            elif id in kept:
                assert kept[id] == name
                assert index.thumbnail(id)
            else:  # its removal may have been done without anybody hearing of it
                assert int(name.split("-")[2].removesuffix(".png")) % 5 == 4
        hits = index.search_vectors(index.vector(max(kept))[None], 1)
        assert hits[0][0].score == pytest.approx(1, abs=1e-3)


def test_a_server_that_is_asked_to_stop_stops_well(small_index: Path, tmp_path: Path) -> None:
    place = shutil.copytree(small_index, tmp_path / "my.index")
    with process(place, "--read-only") as (child, address):
        assert httpx.get(f"{address}{API}/health").json()["status"] == "ok"
        assert httpx.get(f"{address}{API}/info").json()["name"] == "my.index"
        child.send_signal(signal.SIGTERM)
        assert child.wait(20) == 0
        assert child.stderr is not None
        assert child.stderr.read() == ""


def test_sixty_four_clients_at_once(site: Callable[..., str]) -> None:
    index = FakeIndex(40)
    address = site(index)
    index.batches.clear()
    images = [encoded(picture(number)) for number in range(40)]

    def visit(worker: int) -> list[bool]:
        with httpx.Client(base_url=address, timeout=60) as client:
            right = []
            for turn in range(5):
                number = (7 * worker + turn) % 40
                answer = client.post(f"{API}/search", files={"image": images[number]}, params={"k": 1})
                right.append(answer.status_code == 200 and answer.json()["hits"][0]["id"] == number)
            return right

    with ThreadPoolExecutor(64) as pool:
        answers = [each for found in pool.map(visit, range(64)) for each in found]
    assert len(answers) == 320
    assert all(answers)  # nobody got the answer of another
    assert sum(index.batches) == 320
    assert max(index.batches) > 1


def test_reading_goes_on_while_others_write(site: Callable[..., str], small_index: Path, tmp_path: Path) -> None:
    place = shutil.copytree(small_index, tmp_path / "my.index")
    address = site(Index.open(place, device="cpu"))

    def work(worker: int) -> list[int]:
        with httpx.Client(base_url=address, timeout=60) as client:
            statuses = []
            for turn in range(6):
                if worker % 4 == 0:
                    made = client.post(f"{API}/items", files={"image": encoded(picture(turn))})
                    statuses += [made.status_code, client.delete(f"{API}/items/{made.json()['id']}").status_code]
                else:
                    statuses.append(client.post(f"{API}/search/id/{turn}", params={"k": 5}).status_code)
                    statuses.append(client.get([f"{API}/items", f"{API}/map", f"{API}/labels"][worker % 3]).status_code)
            return statuses

    with ThreadPoolExecutor(16) as pool:
        statuses = {status for found in pool.map(work, range(16)) for status in found}
    assert statuses == {200, 201}
