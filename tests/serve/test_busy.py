"""Costly requests of others keep nobody from searching, and the server from nothing, the end included."""

import asyncio
import json
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import httpx
import numpy as np
import pytest
from dearest_requests import API, PLAIN, ROUTES
from fake_index import FakeIndex
from runs import write_run
from starlette.routing import Mount, Route
from waiting import result_of

from nearfar.search import Index
from nearfar.search.filters import select
from nearfar.search.items import Item
from nearfar.serve import Limits, create, server, state
from nearfar.serve.batching import Batcher, ServerBusy
from nearfar.serve.routes import runs
from nearfar.utils.deadline import Deadline, Overdue

CLIENTS = 4
COSTLY = [route for route, dearest in ROUTES.items() if dearest.costly]


class Watched(FakeIndex):
    """Remembers in which threads it was used."""

    def __init__(self, *arguments, **settings):
        self.used = set()
        super().__init__(*arguments, **settings)

    def __getattribute__(self, name):
        if name in ("items", "info", "select", "search_batch", "embed", "add_images", "remove", "map_with_ids"):
            self.used.add((name, threading.current_thread().name.partition("_")[0]))
        return super().__getattribute__(name)


class Gate:
    """Holds costly work until it is opened, and counts it."""

    def __init__(self, monkeypatch):
        self.opened, self.lock = threading.Event(), threading.Lock()
        self.running = self.most = self.begun = 0
        original = Deadline.run

        def run(deadline, work):
            if work.__module__ == "nearfar.serve.uploads":  # decoding has threads of its own
                return original(deadline, work)
            with self.lock:
                self.begun, self.running = self.begun + 1, self.running + 1
                self.most = max(self.most, self.running)
            try:
                assert self.opened.wait(60)
                return original(deadline, work)
            finally:
                with self.lock:
                    self.running -= 1

        monkeypatch.setattr(Deadline, "run", run)


@pytest.fixture
def gate(monkeypatch):
    gate = Gate(monkeypatch)
    yield gate
    gate.opened.set()


@pytest.fixture
def app(tmp_path):
    for name, loss in (("one", "nra"), ("two", "triplet")):
        write_run(tmp_path / "runs" / name, loss, 0.5)
    return create(Watched(40), runs=[tmp_path / "runs"], addresses=True)


@asynccontextmanager
async def served(app):
    """Run the application; yields a function that sends a request of a client."""
    async with app.router.lifespan_context(app):
        clients = {}

        async def send(client, method, path, **settings):
            if client not in clients:
                transport = httpx.ASGITransport(app, raise_app_exceptions=False, client=(client, 1))
                clients[client] = httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1")
            return await asyncio.wait_for(clients[client].request(method, path, **settings), 60)

        yield send


async def until(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        await asyncio.sleep(0.005)


def test_every_route_is_in_the_table(app):
    def routes(router):
        for route in router.routes:
            if isinstance(route, Route):
                yield from ((method, route.path) for method in route.methods or () if method != "HEAD")
            elif isinstance(route, Mount):
                yield "GET", route.path
            else:
                yield from routes(route.original_router)

    assert set(routes(app)) == set(ROUTES)


@pytest.mark.parametrize("route", ROUTES, ids=" ".join)
def test_plain_searches_wait_for_no_costly_work(route, app, gate):
    (method, template), dearest = route, ROUTES[route]
    index = app.state.server.index

    async def visit():
        async with served(app) as send:
            index.used.clear()
            path = dearest.path or (lambda number: template.replace("{id}", str(number)))
            sent = [
                asyncio.create_task(send("203.0.113.1", method, path(number), **dearest.settings(number)))
                for number in range(CLIENTS)
            ]
            await (until(lambda: gate.running == 1) if dearest.costly else asyncio.wait(sent))
            for client in ("203.0.113.1", "203.0.113.2"):
                assert (await send(client, *PLAIN)).status_code == 200
                assert (await send(client, "GET", f"{API}/health")).status_code == 200
            assert [task.done() for task in sent] == [not dearest.costly] * CLIENTS
            if dearest.costly:
                other = asyncio.create_task(send("203.0.113.2", *PLAIN, params={"expand": 1}))
                await until(lambda: gate.running == 2)
                assert (await send("203.0.113.3", *PLAIN)).status_code == 200
                assert gate.most == 2
                gate.opened.set()
                assert (await other).status_code == 200
            return list(await asyncio.gather(*sent))

    assert [answer.status_code for answer in result_of(visit())] == [dearest.status] * CLIENTS
    assert gate.most == (2 if dearest.costly else 0)
    heavy = {name for name, thread in index.used if thread == "MainThread"}
    assert not heavy, "these run on the event loop"
    assert {thread for name, thread in index.used if name in ("select", "map_with_ids")} <= {"costly"}


@pytest.mark.parametrize("route", COSTLY, ids=" ".join)
def test_identical_work_is_done_once(route, app, gate):
    method, template = route
    settings = {**ROUTES[route].settings(1)}

    async def visit():
        async with served(app) as send:
            path = template.replace("{id}", "1")
            sent = [asyncio.create_task(send(f"203.0.113.{n}", method, path, **settings)) for n in range(6)]
            await until(lambda: gate.running == 1)
            await asyncio.sleep(0.2)  # for the others to arrive
            assert gate.begun == 1
            gate.opened.set()
            return [answer.status_code for answer in await asyncio.gather(*sent)]

    assert set(result_of(visit())) == {200}


@pytest.mark.parametrize("route", COSTLY, ids=" ".join)
def test_nobody_waits_in_the_turns_of_another(route, app, gate):
    """Who asks first for what all ask for, after much other work, does not keep the others from it."""
    method, path = route[0], route[1].replace("{id}", "1")

    async def visit():
        async with served(app) as send:
            tasks = [asyncio.create_task(send("203.0.113.1", *PLAIN, params={"expand": n})) for n in range(1, 9)]
            await until(lambda: gate.running == 1)
            for client in ("203.0.113.1", "203.0.113.2"):
                tasks.append(asyncio.create_task(send(client, method, path, **ROUTES[route].settings(1))))
                await asyncio.sleep(0.1)
            assert gate.running == gate.begun == 2
            gate.opened.set()
            assert {answer.status_code for answer in await asyncio.gather(*tasks)} == {200}

    result_of(visit())


@pytest.mark.parametrize("change", ["", "log", "damage", "new"])
def test_runs_are_read_again_when_a_file_changed(change, app, tmp_path, gate, monkeypatch):
    gate.opened.set()
    read = []
    original = runs.list_runs
    monkeypatch.setattr(runs, "list_runs", lambda folders: read.append(folders) or original(folders))

    async def visit():
        async with served(app) as send:
            before = (await send("a", "GET", f"{API}/runs")).json()
            if change == "log":
                (tmp_path / "runs" / "one" / "log.jsonl").write_text("")
            elif change == "damage":
                (tmp_path / "runs" / "one" / "metrics.json").write_text("{")
            elif change == "new":
                write_run(tmp_path / "runs" / "grid" / "three", "margin", 0.4)
            after = (await send("b", "GET", f"{API}/runs")).json()
            return before, after, json.loads(original(runs.run_folders([tmp_path / "runs"])))

    before, after, expected = result_of(visit())
    assert after == expected
    assert (before != after) == (change in ("damage", "new"))
    assert len(read) == (2 if change else 1)


@pytest.mark.parametrize("route", COSTLY, ids=" ".join)
def test_who_waits_too_long_is_told(route, tmp_path, gate):
    write_run(tmp_path / "run", "nra", 0.5)
    app = create(FakeIndex(40), runs=[tmp_path], limits=Limits(costly_seconds=0.2))

    async def visit():
        async with served(app) as send:
            path = route[1].replace("{id}", "1")
            answer = await send("a", route[0], path, **ROUTES[route].settings(1))
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
            assert "more than 0.2 seconds" in answer.json()["error"]["message"]
            gate.opened.set()

    result_of(visit())


def test_costly_work_ends_when_its_time_is_over(tmp_path):
    """Filters, expanded and re-ranked searches and the reading of runs look at the clock while they work."""
    write_run(tmp_path / "runs" / "one", "nra", 0.5)
    vectors = np.random.default_rng(0).normal(size=(50, 4)).astype(np.float32)
    with Index.from_vectors(vectors, out=tmp_path / "my.index") as index:
        for work in (
            lambda: select([Item(number, "a") for number in range(5000)], {"name": "a"}),
            lambda: index.search(1, expand=3),
            lambda: index.search(1, rerank="k_reciprocal"),
            lambda: runs.list_runs(runs.run_folders([tmp_path / "runs"])),
        ):
            deadline = Deadline(60)
            assert deadline.run(work) is not None
            with pytest.raises(Overdue):
                deadline.run(lambda: (setattr(deadline, "end", 0.0), work()))  # noqa: B023


def test_a_batch_takes_from_all_clients_in_turn():
    batches = []
    batcher = Batcher(lambda items: batches.append(items) or items, max_size=4, max_waiting=6)
    with batcher._changed:  # nothing is taken before all are there
        batcher._open = True
        for number in range(6):
            batcher.submit(f"a{number}", "a")
        with pytest.raises(ServerBusy):
            batcher.submit("a6", "a")
        batcher.submit("b0", "b")
        batcher.submit("c0", "c")
    batcher.start()
    batcher.stop()
    assert batches == [["a0", "b0", "c0", "a1"], ["a2", "a3", "a4", "a5"]]


STUCK = """
import sys, threading
sys.path[:0] = sys.argv[3:]
from fake_index import FakeIndex
from nearfar.serve import create, server

server.COSTLY_SECONDS, server.SHUTDOWN_SECONDS, server.END_SECONDS = 0.2, 0.5, float(sys.argv[1])
index = FakeIndex(40)
app = create(index)
for name in sys.argv[2].split(","):
    setattr(index, name, lambda *_, **__: threading.Event().wait())
with server.listen("127.0.0.1", 0) as listening:
    server.run(app, server.configure(app), listening, started=lambda: print(server.url_of(listening), flush=True))
"""


@pytest.mark.parametrize("stuck", ["select,map_with_ids,info", "embed,search_batch", "add_images,remove"])
def test_the_process_ends_whatever_is_stuck(stuck):
    """Work that checks no deadline at all, in each kind of thread."""
    assert max(server.COSTLY_SECONDS, server.SHUTDOWN_SECONDS) + state.STOP_SECONDS < server.END_SECONDS < 15
    command = [sys.executable, "-c", STUCK, "3", stuck, str(Path(__file__).parent.parent / "helpers")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child, ThreadPoolExecutor(20) as pool:
        try:
            address = child.stdout.readline().strip()

            def send(route, number):
                with suppress(httpx.HTTPError):
                    path = (ROUTES[route].path or (lambda _: route[1].replace("{id}", "1")))(number)
                    httpx.request(route[0], address + path, timeout=60, **ROUTES[route].settings(number))

            for number in range(2):
                for route in ROUTES:
                    pool.submit(send, route, number)
            time.sleep(1)
            child.send_signal(signal.SIGTERM)
            began = time.monotonic()
            assert child.wait(60) == 0
            assert time.monotonic() - began < 12
        finally:
            child.kill()
