"""A server process: under concurrent requests, behind a proxy, and stopped. tests/faults/soak.py kills it."""

import re
import shutil
import signal
import socket
import ssl
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import httpx
import pytest
import uvicorn
from fake_index import FakeIndex, encoded, picture
from odd_files import many_scans
from serve_process import process
from waiting import wait_for

from nearfar.serve import create, server
from nearfar.serve.server import OTHER_FILES
from nearfar.serve.uploads import SLOW_WAITING

API = "/api/v1"
TOKEN = "correct-horse-battery-staple"


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_a_server_that_is_asked_to_stop_stops_well(name, small_index, tmp_path):
    place = shutil.copytree(small_index, tmp_path / "my.index")
    with process(place, "--read-only") as (child, address):
        assert httpx.get(f"{address}{API}/health").json()["status"] == "ok"
        assert httpx.get(f"{address}{API}/info").json()["name"] == "my.index"
        child.send_signal(signal.Signals[name])
        assert child.wait(20) == 0
        assert child.stderr.read() == ""


def test_bombs_stop_neither_uploads_nor_the_end(small_index):
    bomb, image = many_scans(7000, 50), encoded(picture(3))
    with process(small_index, "--read-only") as (child, address), ThreadPoolExecutor(SLOW_WAITING) as pool:

        def throw():
            return httpx.post(f"{address}{API}/search", files={"image": bomb}, timeout=60).status_code

        thrown = [pool.submit(throw) for _ in range(SLOW_WAITING)]  # one after the other, each seconds of work
        wait_for(lambda: any(answer.done() for answer in thrown))
        for _ in range(5):
            assert httpx.post(f"{address}{API}/search", files={"image": image}, timeout=20).status_code == 200
        assert not all(answer.done() for answer in thrown)
        child.send_signal(signal.SIGTERM)
        assert child.wait(60) == 0
        assert {answer.result(10) for answer in thrown} == {200, 503}  # those that were decoded, and those given up


def test_slow_headers_keep_nobody_out(small_index):
    """Far more connections than the server may open files, each with half a header."""
    with process(small_index, "--read-only", files=OTHER_FILES + 32) as (child, address), ExitStack() as stack:
        host, port = address.removeprefix("http://").split(":")
        slow = [stack.enter_context(socket.socket()) for _ in range(800)]
        for connection in slow:
            connection.connect((host, int(port)))
            connection.sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: ")
        for number in range(5):
            answer = httpx.post(f"{address}{API}/search", files={"image": encoded(picture(number))}, timeout=20)
            assert answer.status_code == 200
        child.send_signal(signal.SIGTERM)
        assert child.wait(20) == 0
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
        answers = [right for rights in pool.map(visit, range(64)) for right in rights]
    assert len(answers) == 320
    assert all(answers)  # nobody got the answer of another
    assert sum(index.batches) == 320
    assert max(index.batches) > 1
