"""What the dearest requests of some clients cost the others: ``python tests/faults/busy.py --items 20000``.

For each route, `nearfar serve` is started. Eight clients send its dearest requests, each the next one a tenth of a
second after an answer. Another client asks for health and searches by an item meanwhile; its times are compared with
those without the eight. Then SIGTERM is sent while requests are in progress, and the process must end within 15 s.
"""

import argparse
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import suppress
from http.client import HTTPConnection
from pathlib import Path

import httpx
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))

from dearest_requests import API, PLAIN, ROUTES
from fake_index import DIM, picture
from runs import write_run
from serve_process import process

CLIENTS = 8
PAUSE = 0.1  # seconds between an answer and the next request of a client
END_SECONDS = 15
PROBES = {"health": ("GET", f"{API}/health"), "search": PLAIN}


def build(folder, items):
    """Build an index of a few images and many vectors with metadata, and a folder of runs; return both."""
    import torch

    from nearfar import networks
    from nearfar.search import Index

    for number in range(200):
        place = folder / "images" / f"class {number % 20}"
        place.mkdir(parents=True, exist_ok=True)
        picture(number, 20).save(place / f"{number}.png")
    torch.manual_seed(0)
    model = networks.create("small_cnn", dim=DIM, channels=3, size=16)
    with Index.build(model, folder / "images", out=folder / "busy.index", device="cpu") as index:
        count = max(0, items - len(index))
        points = np.random.default_rng(0).normal(size=(count, DIM)).astype(np.float32)
        names = [f"{number}.jpg" for number in range(count)]
        index.add_vectors(points, names=names, labels=[f"class {number % 500}" for number in range(count)])
        index.compact()
    for number in range(60):
        write_run(folder / "runs" / str(number), ("nra", "triplet", "margin")[number % 3], 0.5 + 0.001 * number)
    return folder / "busy.index", folder / "runs"


def attack(address, route, counts):
    """Send the requests of several clients until the process is killed; the statuses are put into a queue."""
    os.nice(5)
    dearest = ROUTES[route]

    def visit(worker):
        with httpx.Client(base_url=address, timeout=60, headers={"x-forwarded-for": f"203.0.113.{worker}"}) as client:
            for turn in range(10**6):
                number = worker + turn * CLIENTS
                path = (dearest.path or (lambda _: route[1].replace("{id}", "1")))(number)
                try:
                    counts.put(client.request(route[0], path, **dearest.settings(number)).status_code)
                except httpx.HTTPError:  # the server has been stopped
                    return
                time.sleep(PAUSE)

    threads = [threading.Thread(target=visit, args=(worker,)) for worker in range(CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def probe(address, seconds):
    """Milliseconds of each request for health and of each plain search."""
    times = {name: [] for name in PROBES}
    connection = HTTPConnection(address.removeprefix("http://"), timeout=60)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for name, (method, path) in PROBES.items():
            began = time.perf_counter()
            connection.request(method, path, headers={"x-forwarded-for": "198.51.100.1"})
            answer = connection.getresponse()
            answer.read()
            times[name].append(1000 * (time.perf_counter() - began))
            assert answer.status == 200, f"{name} answers {answer.status}"
            time.sleep(0.005)
    return times


def measure(index, runs, route, seconds):
    """Start a server on a copy of an index, and measure one route."""
    with tempfile.TemporaryDirectory() as folder:
        copy = shutil.copytree(index, Path(folder) / "busy.index")
        # It believes the addresses of clients as a proxy tells them.
        words = ("--runs", str(runs), "--max-rate", "1000000", "--proxy", "127.0.0.1")
        with process(copy, *words, errors=None) as (child, address):
            probe(address, 1)
            quiet = probe(address, seconds)
            context = multiprocessing.get_context("spawn")
            statuses = context.Queue()
            attackers = context.Process(target=attack, args=(address, route, statuses))
            attackers.start()
            try:
                first = statuses.get(timeout=60)  # by now all are at work
                busy = probe(address, seconds)
                child.terminate()
                began = time.perf_counter()
                with suppress(subprocess.TimeoutExpired):
                    child.wait(2 * END_SECONDS)
                ended = time.perf_counter() - began
            finally:
                attackers.kill()
            answered = Counter([first])
            while not statuses.empty():
                answered[statuses.get()] += 1
    row = {"route": " ".join(route), "answers": dict(answered), "end seconds": round(ended, 1)}
    for name in PROBES:
        for words, times in (("quiet", quiet), ("busy", busy)):
            p50, p99 = np.percentile(times[name], [50, 99]).round(1).tolist()
            row |= {f"{name} {words} p50": p50, f"{name} {words} p99": p99}
        row[f"{name} ratio"] = round(row[f"{name} busy p99"] / row[f"{name} quiet p99"], 2)
    return row


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", type=int, default=20_000)
    parser.add_argument("--seconds", type=float, default=5.0, help="time of each measurement")
    parser.add_argument("--route", action="append", help="a path of the table; repeatable, by default all")
    given = parser.parse_args()
    late = []
    with tempfile.TemporaryDirectory() as folder:
        index, runs = build(Path(folder), given.items)
        for route in ROUTES:
            if given.route and route[1] not in given.route:
                continue
            row = measure(index, runs, route, given.seconds)
            print(json.dumps(row), flush=True)
            if row["end seconds"] > END_SECONDS:
                late.append(row["route"])
    if late:
        sys.exit(f"the server did not end in time during {', '.join(late)}")


if __name__ == "__main__":
    main()
