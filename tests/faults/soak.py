"""Mixed load on a server that is killed again and again: ``python tests/faults/soak.py --minutes 60``.

Clients search, add, remove, fetch the map, and reload the page. At random moments the server is killed, or asked to
stop. It is started again, and everything that it acknowledged must be there: each added item under its name, no removed
one. At the end the index is opened and compared once more. Counts and memory are printed as one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import httpx

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))

from fake_index import encoded, picture
from serve_process import process

API = "/api/v1"
CLIENTS = 4
ROUND = (10.0, 40.0)  # seconds between kills
BUSY = (429, 503, 507)  # answers that refuse without doing anything


@dataclass
class Record:
    """What was acknowledged, and what was counted."""

    names: dict[int, str] = field(default_factory=dict)  # of items that must be there
    gone: set[int] = field(default_factory=set)  # items that must not be there
    unsure: set[int] = field(default_factory=set)  # whose removal was sent, but not answered
    counts: Counter[str] = field(default_factory=Counter)
    memory: list[int] = field(default_factory=list)  # megabytes of the server, before each kill
    lock: threading.Lock = field(default_factory=threading.Lock)

    def check(self, there):
        """Compare with the items that a server or an index has."""
        for id, name in self.names.items():
            assert id in self.unsure or there.get(id) == name, f"item {id} was acknowledged as {name}, and is lost"
        assert not self.gone & there.keys(), "removed items are back"
        self.counts["checks"] += 1


def load(address, record, stop, seed):
    """One client, until the server is stopped."""
    rng = random.Random(seed)
    with httpx.Client(base_url=address, timeout=60) as client:
        while not stop.is_set():
            kind, id = rng.choices(("search", "add", "remove", "map", "page"), (40, 30, 10, 2, 2))[0], -1
            try:
                if kind == "search":
                    answer = client.post(
                        f"{API}/search", files={"image": ("q.png", encoded(picture(rng.randrange(99))))}
                    )
                elif kind == "add":
                    name = f"{seed}-{rng.randrange(1 << 40)}.png"
                    answer = client.post(
                        f"{API}/items", files={"image": (name, encoded(picture(rng.randrange(10**6))))}
                    )
                elif kind == "remove":
                    with record.lock:
                        left = sorted(record.names.keys() - record.gone - record.unsure)
                        if len(left) < 50:
                            continue
                        id = rng.choice(left)
                        record.unsure.add(id)
                    answer = client.delete(f"{API}/items/{id}")
                else:
                    answer = client.get(f"{API}/map" if kind == "map" else "/")
            except httpx.HTTPError as error:
                if not stop.wait(5):
                    raise RuntimeError("the server went away by itself") from error
                return
            with record.lock:
                if answer.status_code in BUSY:
                    record.counts["refused"] += 1
                    record.unsure.discard(id)
                    continue
                assert answer.is_success, f"{kind} answers {answer.status_code}: {answer.text[:300]}"
                record.counts[kind] += 1
                if kind == "add":
                    record.names[answer.json()["id"]] = name
                elif kind == "remove":
                    record.gone.add(id)
                    record.unsure.discard(id)
                    del record.names[id]


def items(address):
    """Names of all items of a server, by id."""
    with httpx.Client(base_url=address, timeout=60) as client:
        names = {}
        while True:
            page = client.get(f"{API}/items", params={"offset": len(names), "limit": 500}).raise_for_status().json()
            names |= {item["id"]: item["name"] for item in page["items"]}
            if not page["items"] or len(names) >= page["total"]:
                return names


def megabytes(parent):
    """Resident memory of a process and its children."""
    pids, total = [parent], 0
    while pids:
        pid = pids.pop()
        try:
            status = Path(f"/proc/{pid}/status").read_text()
            pids += [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
        except OSError:
            continue
        total += next((int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS")), 0)
    return total // 1024


def soak(seconds, seed, *, pause=ROUND):
    """Load a server for some seconds, and kill it now and then."""
    from search_cases import model, photos

    from nearfar.search import Index

    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "server.log").open("w+") as log:
        place = Path(folder) / "my.index"
        Index.build(model(), photos(Path(folder) / "photos", 20), out=place, device="cpu").close()
        try:
            record = _rounds(place, seconds, random.Random(seed), pause, log)
        except BaseException:
            log.seek(0)
            print("The server said at last:", *log.readlines()[-40:], sep="\n", file=sys.stderr)
            raise
        with Index.open(place, device="cpu") as index:
            record.check({item.id: item.name for item in index.items})
            last = index.items[-1].id
            assert index.thumbnail(last)
            assert index.search_vectors(index.vector(last)[None], 1)[0][0].score > 0.999
    return record


def _rounds(place, seconds, rng, pause, log):
    record, end = Record(), time.monotonic() + seconds
    while time.monotonic() < end or not record.counts["kills"]:
        with process(place, errors=log) as (child, address):
            record.check(items(address))
            stop = threading.Event()
            with ThreadPoolExecutor(CLIENTS) as pool:
                clients = [pool.submit(load, address, record, stop, rng.randrange(1 << 40)) for _ in range(CLIENTS)]
                try:
                    until = min(time.monotonic() + rng.uniform(*pause), max(end, time.monotonic() + 1))
                    while time.monotonic() < until and not any(client.done() for client in clients):
                        time.sleep(0.1)
                    record.memory.append(megabytes(child.pid))
                finally:
                    stop.set()
                    how = signal.SIGKILL if rng.random() < 0.7 or not record.counts["kills"] else signal.SIGTERM
                    child.send_signal(how)
                    child.wait(120)
                    record.counts["kills" if how == signal.SIGKILL else "stops"] += 1
                for client in clients:
                    client.result()
    return record


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    record = soak(60 * given.minutes, given.seed)
    memory = {"first": record.memory[0], "most": max(record.memory), "last": record.memory[-1]}
    print(json.dumps({"minutes": given.minutes, **record.counts, "lost": 0, "megabytes": memory}))


if __name__ == "__main__":
    main()
