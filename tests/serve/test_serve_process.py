"""A server process: under concurrent requests, stopped, and killed while it writes."""

import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import httpx
import pytest
import uvicorn
from fake_index import FakeIndex, encoded, picture
from odd_files import many_scans
from waiting import wait_for

from nearfar.search import Index
from nearfar.serve import create, server
from nearfar.serve.server import OTHER_FILES
from nearfar.serve.uploads import SLOW_WAITING

API = "/api/v1"
TOKEN = "correct-horse-battery-staple"
KILLS = int(os.environ.get("NEARFAR_KILLS", "3"))


@contextmanager
def process(index, *words, files=None):
    """Start `nearfar serve`, with a limit of open files, and return the process and its address."""
    command = [sys.executable, "-m", "nearfar", "serve", str(index), "--port", "0", "--device", "cpu", *words]
    if files is not None:
        command = ["sh", "-c", f'ulimit -n {files} && exec "$@"', "sh", *command]
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


def test_nothing_acknowledged_is_lost_when_the_server_is_killed(small_index, tmp_path):
    place = shutil.copytree(small_index, tmp_path / "my.index")
    known = {}
    gone = set()
    for kill in range(KILLS):
        enough, stop = threading.Event(), threading.Event()

        def write(worker, address, kill=kill, stop=stop, enough=enough):
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


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_a_server_that_is_asked_to_stop_stops_well(name, small_index, tmp_path):
    place = shutil.copytree(small_index, tmp_path / "my.index")
    with process(place, "--read-only") as (child, address):
        assert httpx.get(f"{address}{API}/health").json()["status"] == "ok"
        assert httpx.get(f"{address}{API}/info").json()["name"] == "my.index"
        child.send_signal(signal.Signals[name])
        assert child.wait(20) == 0
        assert child.stderr is not None
        assert child.stderr.read() == ""


def test_bombs_stop_neither_uploads_nor_the_end(small_index):
    bomb, image = many_scans(7000, 50), encoded(picture(3))
    with process(small_index, "--read-only") as (child, address), ThreadPoolExecutor(SLOW_WAITING) as pool:

        def throw():
            return httpx.post(f"{address}{API}/search", files={"image": bomb}, timeout=60).status_code

        thrown = [pool.submit(throw) for _ in range(SLOW_WAITING)]  # one after the other, each seconds of work
        wait_for(lambda: any(each.done() for each in thrown))
        for _ in range(5):
            assert httpx.post(f"{address}{API}/search", files={"image": image}, timeout=20).status_code == 200
        assert not all(each.done() for each in thrown)
        child.send_signal(signal.SIGTERM)
        assert child.wait(60) == 0
        assert {each.result(10) for each in thrown} == {200, 503}  # those that were decoded, and those given up


def test_slow_headers_keep_nobody_out(small_index):
    """Far more connections than the server may open files, each with half a header."""
    with process(small_index, "--read-only", files=OTHER_FILES + 32) as (child, address), ExitStack() as stack:
        host, port = address.removeprefix("http://").split(":")
        slow = [stack.enter_context(socket.socket()) for _ in range(800)]
        for each in slow:
            each.connect((host, int(port)))
            each.sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: ")
        for number in range(5):
            answer = httpx.post(f"{address}{API}/search", files={"image": encoded(picture(number))}, timeout=20)
            assert answer.status_code == 200
        child.send_signal(signal.SIGTERM)
        assert child.wait(20) == 0
        assert child.stderr is not None
        logged = child.stderr.read().splitlines()
    assert len(logged) == 1
    assert logged[0].startswith("too many connections; some were refused or closed")


def test_a_request_that_outlasts_the_shutdown_is_asked_to_come_again(monkeypatch):
    monkeypatch.setattr(server, "SHUTDOWN_SECONDS", 0.2)
    index, entered, leave = FakeIndex(4), threading.Event(), threading.Event()

    def slow(method="pca"):
        entered.set()
        leave.wait(20)
        raise RuntimeError("too late")

    monkeypatch.setattr(index, "map_with_ids", slow)
    with server.listen("127.0.0.1", 0) as listening, ThreadPoolExecutor(2) as pool:
        running = uvicorn.Server(server.configure(create(index)))
        served = pool.submit(running.run, sockets=[listening])
        answer = pool.submit(httpx.get, f"{server.url_of(listening)}{API}/map", timeout=20)
        assert entered.wait(20)
        running.should_exit = True
        assert answer.result(20).status_code == 503
        assert answer.result().json()["error"]["message"] == "the server is stopping; try again"
        leave.set()
        served.result(20)


def test_connections_can_be_encrypted(small_index, certificate):
    words = ["--certificate", str(certificate[0]), "--key", str(certificate[1]), "--token", TOKEN]
    with process(small_index, "--read-only", *words) as (_, address):
        assert address.startswith("https://")
        with httpx.Client(base_url=address, verify=ssl.create_default_context(cafile=certificate[0])) as client:
            answer = client.post(f"{API}/session", json={"token": TOKEN})
            assert answer.headers["strict-transport-security"].startswith("max-age=")
            assert "Secure" in answer.headers["set-cookie"]
            assert client.get(f"{API}/info").status_code == 200


def test_a_proxy_names_the_client(small_index, tmp_path):
    log = tmp_path / "access.log"
    headers = {"host": "photos.example", "x-forwarded-for": "10.9.8.7, 203.0.113.7", "x-forwarded-proto": "https"}
    headers["authorization"] = f"Bearer {TOKEN}"
    words = ["--allow-host", "photos.example", "--token", TOKEN, "--access-log", str(log)]
    for proxy, client in (([], "127.0.0.1"), (["--proxy", "127.0.0.1"], "203.0.113.7")):
        with process(small_index, "--read-only", *words, *proxy) as (child, address):
            answer = httpx.get(f"{address}{API}/info", headers=headers, params={"token": TOKEN})
            assert answer.status_code == 200
            assert ("strict-transport-security" in answer.headers) == bool(proxy)
            child.terminate()
            assert child.wait(30) == 0
        line = log.read_text().splitlines()[-1]
        assert re.fullmatch(rf'[-\d]+ [:,\d]+ {client}:\d+ - "GET {API}/info HTTP/1.1" 200', line)


def test_sixty_four_clients_at_once(site):
    index = FakeIndex(40)
    address = site(index)
    index.batches.clear()
    images = [encoded(picture(number)) for number in range(40)]

    def visit(worker):
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


def test_reading_goes_on_while_others_write(site, small_index, tmp_path):
    place = shutil.copytree(small_index, tmp_path / "my.index")
    address = site(Index.open(place, device="cpu"))

    def work(worker):
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
