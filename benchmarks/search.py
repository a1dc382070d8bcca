"""Speed and recall of the backends of an index, next to plain FAISS in the same run.

    python benchmarks/search.py                     # 100,000 × 512 on a CPU
    python benchmarks/search.py --size 10000        # a quick look
    python benchmarks/search.py --only hnsw         # only rows whose name contains this
    python benchmarks/search.py --milvus http://127.0.0.1:19530
    python benchmarks/search.py --size 1000000 --dim 128 --milvus start --only exact ivf milvus   # the package's server
    python benchmarks/search.py --adds 100000       # instead: add items one by one, and measure the folder
    python benchmarks/search.py --size 1000000 --exact     # instead: exact search, also over int8 codes, and FAISS flat
    OMP_WAIT_POLICY=passive python benchmarks/search.py --size 1000000 --dim 128 --server   # instead: Milvus and FAISS

The data are synthetic: vectors of length one in groups of twenty, each a group's center and noise. Queries are new
members of groups that are there. All sides get the same vectors, queries and number of threads.

"build s" is the time from an array to something that can be searched; that of an index is on disk then, and a sample
was searched exactly to choose how hard to look. Plain FAISS has the same structure and is told to look just as hard
(the knob: efSearch or nprobe), so that its recall is the same and times can be compared. "ms" is one query at a time,
as a page asks; "queries/s" is 256 at a time; both are medians of turns that ours and theirs take one after the other,
and a ratio is our time over theirs. recall@10 is the share of the true ten nearest that are found, in percent.
"GiB" is the resident memory of this process, and of a server that it started, beyond that before the index was built;
pages of mapped files count. A Milvus server builds its structure after it has accepted the vectors: "build s" waits
for it. "plain Milvus" asks the same collection by pymilvus, with a larger search effort (the knob: ef) and without
waiting for the latest writes (consistency "Bounded").

--exact has no index around the search: 1, 4 and 64 queries at a time, medians of calls that alternate. "CPU ms" is the
CPU time of a call, which other work on the machine changes less; measure it with OMP_NUM_THREADS=1. With more threads
leave FAISS out (--only exact), because its threads keep the cores busy after a call. "/ exact" and "/ FAISS" are times
over those of exact search and of FAISS. "compared" is the number of vectors per query that exact:int8 reads after its
codes. "GiB" is the growth of resident memory; the vectors are in a file that our searches map, and pages of it count.
With --noise 100 there are no groups, with --noise 0.05 they are tight. --measure euclidean compares distances.

--server compares the server of the package milvus with FAISS, without an index of nearfar around them: exact (flat),
lists (IVF) and graph (HNSW) with the same settings. The knob is the lowest search effort of a ladder with which half of
the queries reach a recall@10 of 95 %; recall and speed are those of the other half. Both answer the same queries in
turns, one at a time and 64 at a time; a ratio is a time over that of FAISS. Milvus answers without waiting for the
latest writes (consistency "Bounded"), and in rows "Strong" with waiting, as an index of nearfar asks it to. Vectors are
inserted once, and all structures are built over the same segments. Then the server is started again, so that "GiB" is
what searching needs: its resident memory and that of its children beyond an empty server, and of FAISS the growth of
this process. "peak GiB" is the highest such value while the structure is built. "CPU ms" is the mean CPU time of a
query, of this process and, for Milvus, of the server with what it does beside; other work on the machine changes it
less than the rates.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import Clock, parse, report, show_line
from numpy.typing import NDArray

from nearfar.search import Index
from nearfar.search.backends import faiss as faiss_backend
from nearfar.search.backends.base import MEASURES
from nearfar.search.backends.exact import Exact

COLUMNS = [
    "search",
    "vectors",
    "dim",
    "build s",
    "ms",
    "ratio",
    "queries/s",
    "batch ratio",
    "recall@10",
    "knob",
    "GiB",
    "failed",
]
ADD_COLUMNS = ["adds", "dim", "adds/s", "ms", "MB before", "compact s", "MB after"]
SIZE, DIM, GROUP, NOISE = 100_000, 512, 20, 1.0
QUERIES, K = 1024, 10
EXACT_COLUMNS = [
    "search",
    "vectors",
    "dim",
    "batch",
    "ms",
    "/ exact",
    "/ FAISS",
    "CPU ms",
    "CPU / exact",
    "CPU / FAISS",
    "compared",
    "GiB",
]
EXACT_TURNS = {1: 15, 4: 7, 64: 3}  # queries at a time, and calls of each search
BACKENDS = ("exact", "exact:int8", "faiss:flat", "faiss:ivf", "milvus", "faiss:hnsw")
BATCH = 256
SERVER_COLUMNS = [
    "search",
    "vectors",
    "dim",
    "insert s",
    "build s",
    "load s",
    "recall@10",
    "knob",
    "queries/s, 1",
    "ratio",
    "queries/s, 64",
    "batch ratio",
    "CPU ms, 1",
    "CPU ms, 64",
    "GiB",
    "peak GiB",
    "segments",
]
SERVER_BATCH = 64
INSERTED = 10_000  # vectors per request
EFFORTS = [round(2 ** (half / 2)) for half in range(23)]  # 1, 1, 2, 3, 4, 6, 8, … 2,048
WANTED = 95.0  # recall@10 in percent
COLLECTION = "benchmark"
EF = 128  # search effort of plain Milvus

Vectors = NDArray[np.float32]
Search = Callable[[Vectors], Any]


def synthetic(size: int, dim: int, noise: float = NOISE) -> tuple[Vectors, Vectors]:
    """Vectors in groups, in shuffled order, and queries from the same groups."""
    rng = np.random.default_rng(0)
    centers = rng.standard_normal((max(1, size // GROUP), dim), dtype=np.float32)
    both = [centers[rng.integers(0, len(centers), count)] for count in (size, QUERIES)]
    for points in both:
        points += noise * rng.standard_normal(points.shape, dtype=np.float32)
        points /= np.linalg.norm(points, axis=1, keepdims=True)
    return both[0], both[1]


def exact_neighbors(points: Vectors, queries: Vectors) -> NDArray[np.int64]:
    """The true ten nearest of each query."""
    columns = torch.from_numpy(points).T
    found = [(rows @ columns).topk(K).indices for rows in torch.from_numpy(queries).split(128)]
    return torch.cat(found).numpy()


def plain_faiss(index: Index, points: Vectors) -> tuple[float | None, Search]:
    """FAISS alone, with the structure and settings of our backend: seconds to build it, and a function to search it."""
    import faiss

    ours = index.storage.backend._index  # type: ignore[attr-defined]
    start = time.perf_counter()
    kind, dim = index.info()["backend"].partition(":")[2], points.shape[1]
    if kind == "flat":
        theirs = faiss.IndexFlatIP(dim)
    elif kind == "hnsw":  # the same graph: to build it a second time takes minutes
        theirs = faiss.clone_index(ours)
        return None, lambda queries: theirs.search(queries, K)[1]
    else:
        theirs = faiss.IndexIVFFlat(faiss.IndexFlatIP(dim), dim, ours.nlist, faiss.METRIC_INNER_PRODUCT)
        theirs.nprobe = ours.nprobe
        rows = np.linspace(0, len(points) - 1, min(len(points), 64 * ours.nlist)).astype(np.int64)  # as ours
        theirs.train(points[np.unique(rows)])
    theirs.add(points)
    return time.perf_counter() - start, lambda queries: theirs.search(queries, K)[1]


class MilvusProcess:
    """The server of the package milvus, with its data in a folder."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self._server: Any = None

    def start(self) -> None:
        from milvus import MilvusServer

        self._server = MilvusServer(data_dir=self.folder)
        self._server.start()

    def stop(self) -> None:
        self._server.stop()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self._server.listen_port}"

    @property
    def process(self) -> int:
        return int(self._server.server_proc.pid)


@contextmanager
def milvus_process() -> Iterator[MilvusProcess]:
    """A server that has been started; there can be one on a machine, so tests that want one wait."""
    from filelock import FileLock

    lock = FileLock(Path(tempfile.gettempdir()) / "nearfar-milvus.lock")
    with lock, tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        server = MilvusProcess(folder)
        server.start()
        try:
            yield server
        finally:
            server.stop()


@contextmanager
def milvus_server(wanted: str | None) -> Iterator[tuple[str | None, int | None]]:
    """Start the server of the package milvus if wanted: its address and process id, or what was given."""
    if wanted != "start":
        yield wanted, None
        return
    with milvus_process() as server:
        yield server.address, server.process


def wait_for_milvus(index: Index) -> None:
    """Wait until the server has built its structure over all vectors."""
    backend: Any = index.storage.backend
    while True:
        facts = backend._client.describe_index(backend.collection, "vector")
        if facts["state"] == "Finished" and not facts["pending_index_rows"]:
            return
        time.sleep(1)


def plain_milvus(index: Index) -> Search:
    """Search the collection of an index by pymilvus alone."""
    backend: Any = index.storage.backend
    settings = {"params": {"ef": EF}}

    def search(queries: Vectors) -> NDArray[np.int64]:
        found = backend._client.search(
            backend.collection, data=queries, limit=K, search_params=settings, consistency_level="Bounded"
        )
        return np.array([[hit["id"] for hit in hits] for hits in found])

    return search


def gibibytes(process: int | None = None) -> float:
    """Resident memory of this process, and of another with its children."""
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    return resident("self") + (family(process) if process else 0.0)


def resident(process: int | str, field: str = "VmRSS") -> float:
    """Resident memory of a process in GiB; "VmHWM" is its peak."""
    words = Path(f"/proc/{process}/status").read_text().split()
    return int(words[words.index(f"{field}:") + 1]) / 2**20


def family(process: int, field: str = "VmRSS") -> float:
    """Resident memory of a process and its children, in GiB."""
    children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    return resident(process, field) + sum(family(int(child), field) for child in children)


def forget_peak(process: int | str) -> None:
    """Let "VmHWM" start again from the memory of now."""
    Path(f"/proc/{process}/clear_refs").write_text("5")


def by_index(index: Index) -> Search:
    """The search of an index: ids with scores."""
    return lambda queries: index.search_vectors(queries, K)


def ids_of(found: Any) -> NDArray[np.int64]:
    return found if isinstance(found, np.ndarray) else np.array([[hit.id for hit in row] for row in found])


def recall(search: Search, queries: Vectors, truth: NDArray[np.int64]) -> float:
    found = ids_of(search(queries))
    return 100 * float(np.mean([len(set(a) & set(b)) / K for a, b in zip(found.tolist(), truth.tolist(), strict=True)]))


def take_turns(
    searches: list[Search], queries: Vectors, budget: float, batch: int = BATCH, servers: Sequence[int | None] = ()
) -> list[tuple[float, float, float, float]]:
    """Median ms of a single query and queries/s of a batch, for each search; they alternate query by query.

    Half of the budget is spent on single queries, half on batches. Then the mean CPU ms of a query, single and in a
    batch, of this process and of the server that answers (``servers``, by search).
    """
    found = []
    cpu = []
    for size, least in ((1, 50), (batch, 5)):
        times: list[list[float]] = [[] for _ in searches]
        used = [0.0 for _ in searches]
        deadline, turn = time.perf_counter() + budget / 2, 0
        while turn < least or (time.perf_counter() < deadline and turn < 4000):
            start = size * turn % (len(queries) - size + 1)
            order = range(len(searches)) if turn % 2 else reversed(range(len(searches)))
            for place in order:
                server = servers[place] if servers else None
                before, begin = cpu_seconds(server), time.perf_counter()
                searches[place](queries[start : start + size])
                times[place].append(time.perf_counter() - begin)
                used[place] += cpu_seconds(server) - before
            turn += 1
        found.append([statistics.median(each) for each in times])
        cpu.append([1000 * each / (turn * size) for each in used])
    return [
        (1000 * one, batch / many, alone, together) for one, many, alone, together in zip(*found, *cpu, strict=True)
    ]


def cpu_seconds(process: int | None) -> float:
    """CPU time of this process, and of another in ticks of 10 ms."""
    own = time.process_time()
    if process is None:
        return own
    words = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return own + (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def measure(
    name: str, points: Vectors, queries: Vectors, truth: NDArray[np.int64], budget: float, server: int | None
) -> list[dict[str, Any]]:
    """A row for a backend, and one for plain FAISS if it is a FAISS backend."""
    before = gibibytes(server)
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        with Index.from_vectors(points, out=Path(folder) / "i", backend=name) as index:
            if server:
                wait_for_milvus(index)
            seconds = time.perf_counter() - start
            facts = index.info()
            knob = facts.get("efSearch") or facts.get("nprobe")
            about = {"vectors": len(points), "dim": points.shape[1]}
            label = "milvus server" if server else name
            rows: list[dict[str, Any]] = [{"search": f"nearfar, {label}", **about, "build s": seconds, "knob": knob}]
            searches = [by_index(index)]
            searches[0](queries)
            rows[0]["GiB"] = gibibytes(server) - before
            if name.startswith("faiss"):
                before = gibibytes()
                alone, plain = plain_faiss(index, points)
                plain(queries)
                words = name.partition(":")[2]
                rows.append({"search": f"plain FAISS, {words}", **about, "build s": alone, "knob": knob})
                rows[1]["GiB"] = gibibytes() - before
                searches.append(plain)
            elif server:
                rows.append({"search": "plain Milvus", **about, "knob": EF})
                searches.append(plain_milvus(index))
            for row, search in zip(rows, searches, strict=True):
                row["recall@10"] = recall(search, queries, truth)
            for row, (ms, rate, _, _) in zip(rows, take_turns(searches, queries, budget), strict=True):
                row |= {"ms": ms, "queries/s": rate}
    if len(rows) == 2:
        rows[0]["ratio"] = rows[0]["ms"] / rows[1]["ms"]
        rows[0]["batch ratio"] = rows[1]["queries/s"] / rows[0]["queries/s"]
    for row in rows:
        show_line(row)
    return rows


def mapped(folder: Path) -> Vectors:
    """The vectors of a folder; every call maps the file again, so that each search has its own pages."""
    points: Vectors = np.load(folder / "vectors.npy", mmap_mode="r")
    return points


def write_codes(folder: Path, measure: str) -> Any:
    """Write int8 codes of the vectors of a folder; return a class that opens them and counts compared vectors."""
    try:
        from nearfar.search.backends.int8 import Int8
    except ImportError:  # an older revision
        return None

    class Counting(Int8):
        compared = 0

        def _scored(self, queries: Any, part: Any, rows: Any, places: Any) -> Any:
            self.compared += len(rows)
            return super()._scored(queries, part, rows, places)

    points, begin = mapped(folder), time.perf_counter()
    ids = np.arange(len(points))
    Int8(points, ids, measure=measure).save(folder, ids, points)
    say(f"int8 codes were written in {time.perf_counter() - begin:.1f} s")
    return Counting


def measure_exact(points: Vectors, queries: Vectors, only: list[str], measure: str) -> list[dict[str, Any]]:
    """Rows for exact search without an index around it, and for FAISS's flat index unless it is left out."""
    with tempfile.TemporaryDirectory() as name:
        np.save(Path(name) / "vectors.npy", points)
        return measure_mapped(Path(name), queries, only, measure)


def measure_mapped(folder: Path, queries: Vectors, only: list[str], measure: str) -> list[dict[str, Any]]:
    """The rows of ``measure_exact`` for vectors in a file."""
    searches: dict[str, Search] = {}
    memory: dict[str, float] = {}
    points = mapped(folder)
    about, ids = {"vectors": len(points), "dim": points.shape[1]}, np.arange(len(points))
    coded: Any = None

    def take(name: str, search: Search, before: float) -> None:
        searches[name] = search
        search(queries[:64])
        memory[name] = gibibytes() - before

    if any(part in "exact" for part in only):
        before = gibibytes()
        exact = Exact(mapped(folder), ids, measure=measure)
        take("nearfar, exact", lambda rows: exact.search(rows, K), before)
    counting = write_codes(folder, measure) if any(part in "exact:int8" for part in only) else None
    if counting is not None:
        before, begin = gibibytes(), time.perf_counter()
        coded = counting.open(folder, mapped(folder), ids, measure=measure)
        say(f"int8 codes were opened in {1000 * (time.perf_counter() - begin):.0f} ms")
        take("nearfar, exact:int8", lambda rows: coded.search(rows, K), before)
    if any(part in "faiss:flat" for part in only):
        before = gibibytes()
        flat = faiss_backend._trained(points, "flat", measure)
        for start in range(0, len(points), INSERTED):
            flat.add(np.array(points[start : start + INSERTED]))
        take("plain FAISS, flat", lambda rows: flat.search(rows, K), before)
    rows = []
    for size, turns in EXACT_TURNS.items():
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in searches}
        for turn in range(turns + 1):  # the first turn is not counted
            if coded is not None and turn == 1:
                coded.compared = 0
            for name, search in searches.items():
                begin, used = time.perf_counter(), time.process_time()
                search(queries[size * turn : size * (turn + 1)])
                found[name].append((time.perf_counter() - begin, time.process_time() - used))
        medians = {name: 1000 * np.median(times[1:], axis=0) for name, times in found.items()}
        for name, (wall, cpu) in medians.items():
            row = {"search": name, **about, "batch": size, "ms": float(wall), "CPU ms": float(cpu), "GiB": memory[name]}
            for other, words in (("nearfar, exact", "exact"), ("plain FAISS, flat", "FAISS")):
                if other in medians and other != name:
                    ratios = medians[name] / medians[other]
                    row |= {f"/ {words}": float(ratios[0]), f"CPU / {words}": float(ratios[1])}
            if name == "nearfar, exact:int8":
                row["compared"] = coded.compared / (size * turns)
            show_line(row)
            rows.append(row)
    return rows


class FaissBeside:
    """FAISS with the settings of our backend."""

    def __init__(self, kind: str, points: Vectors) -> None:
        self.kind = kind
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        forget_peak("self")
        before, start = resident("self"), time.perf_counter()
        self._index = faiss_backend._trained(points, kind, "cosine")
        self._index.add(points)
        self.facts = {"build s": time.perf_counter() - start, "peak GiB": resident("self", "VmHWM") - before}
        self.facts["GiB"] = gibibytes() - before

    def searches_with(self, effort: int) -> Search:
        faiss_backend.Faiss._turn(self, effort)  # type: ignore[arg-type]
        return lambda queries: self._index.search(queries, K)[1]


class MilvusBeside:
    """A collection of a server, whose structure is replaced from kind to kind."""

    def __init__(self, server: MilvusProcess, points: Vectors) -> None:
        from pymilvus import DataType

        self._server, self._count = server, len(points)
        self._empty = family(server.process)
        self._connect()
        schema = self._client.create_schema(auto_id=False, enable_dynamic_field=False)
        schema.add_field("id", DataType.INT64, is_primary=True)
        schema.add_field("vector", DataType.FLOAT_VECTOR, dim=points.shape[1])
        self._client.create_collection(COLLECTION, schema=schema)
        start = time.perf_counter()
        for first in range(0, len(points), INSERTED):
            part = points[first : first + INSERTED]
            self._client.insert(COLLECTION, [{"id": first + row, "vector": part[row]} for row in range(len(part))])
            if first // INSERTED % 10 == 9:
                say(f"Milvus has {first + len(part):,} of {len(points):,} vectors, {time.perf_counter() - start:.0f} s")
        self._client.flush(COLLECTION)
        self._insert_s = time.perf_counter() - start
        job = self._client.compact(COLLECTION)  # now, and not while something is measured
        while self._client.get_compaction_state(job) != "Completed":
            time.sleep(1)
        say(f"Milvus: inserted in {self._insert_s:.0f} s, an empty server has {self._empty:.2f} GiB")

    def _connect(self) -> None:
        from pymilvus import MilvusClient

        self._client: Any = MilvusClient(uri=self._server.address)

    def build(self, kind: str) -> None:
        """Replace the structure, start the server again, and load the collection."""
        if self._client.list_indexes(COLLECTION):
            self._client.release_collection(COLLECTION)
            self._client.drop_index(COLLECTION, "vector")
        lists = round(4 * self._count**0.5)
        links = {"M": faiss_backend.LINKS, "efConstruction": faiss_backend.BREADTH}
        name, words = {"flat": ("FLAT", {}), "ivf": ("IVF_FLAT", {"nlist": lists}), "hnsw": ("HNSW", links)}[kind]
        settings = self._client.prepare_index_params()
        settings.add_index("vector", index_type=name, metric_type="IP", params=words)
        forget_peak(self._server.process)
        start = time.perf_counter()
        self._client.create_index(COLLECTION, settings)
        while self._client.describe_index(COLLECTION, "vector")["state"] != "Finished":
            time.sleep(0.5)
        self.facts = {
            "insert s": self._insert_s,
            "build s": time.perf_counter() - start,
            "peak GiB": family(self._server.process, "VmHWM") - self._empty,
        }
        self._client.close()
        self._server.stop()
        self._server.start()
        self._connect()
        start = time.perf_counter()
        self._client.load_collection(COLLECTION)
        self.facts["load s"] = time.perf_counter() - start
        self.facts["segments"] = len(self._client.list_persistent_segments(COLLECTION))

    def measure_memory(self) -> None:
        """After searches, which touch what is mapped."""
        self.facts["GiB"] = family(self._server.process) - self._empty

    def searches_with(self, effort: int, consistency: str = "Bounded") -> Search:
        settings = {"params": {"nprobe": effort, "ef": max(effort, K)}}

        def search(queries: Vectors) -> NDArray[np.int64]:
            found = self._client.search(
                COLLECTION, data=queries, limit=K, search_params=settings, consistency_level=consistency
            )
            return np.array([[hit["id"] for hit in hits] for hits in found])

        return search


def least_effort(side: FaissBeside | MilvusBeside, kind: str, queries: Vectors, truth: NDArray[np.int64]) -> int | None:
    """The lowest effort with the wanted recall; None where everything is compared."""
    if kind == "flat":
        return None
    efforts = [effort for effort in EFFORTS if effort >= (K if kind == "hnsw" else 1)]
    return next((effort for effort in efforts if recall(side.searches_with(effort), queries, truth) >= WANTED), 2048)


def measure_server(points: Vectors, queries: Vectors, budget: float, kinds: list[str]) -> list[dict[str, Any]]:
    """Rows for plain FAISS and for a Milvus server, by kind of structure."""
    truth = exact_neighbors(points, queries)
    half = len(queries) // 2
    rows: list[dict[str, Any]] = []
    with milvus_process() as server:
        milvus = MilvusBeside(server, points)
        for kind in kinds:
            say(f"{kind}: FAISS is built")
            faiss = FaissBeside(kind, points)
            say(f"{kind}: FAISS took {faiss.facts['build s']:.0f} s; Milvus is built")
            milvus.build(kind)
            say(f"{kind}: Milvus took {milvus.facts['build s']:.0f} s; both are searched")
            efforts = [least_effort(side, kind, queries[:half], truth[:half]) for side in (faiss, milvus)]
            searches = {
                f"FAISS, {kind}": (efforts[0], faiss.searches_with(efforts[0] or 1)),
                f"Milvus, {kind}": (efforts[1], milvus.searches_with(efforts[1] or 1)),
                f"Milvus, {kind}, Strong": (efforts[1], milvus.searches_with(efforts[1] or 1, "Strong")),
            }
            some: list[dict[str, Any]] = [
                {
                    "search": name,
                    "vectors": len(points),
                    "dim": points.shape[1],
                    "recall@10": recall(search, queries[half:], truth[half:]),
                    "knob": effort,
                }
                for name, (effort, search) in searches.items()
            ]
            asked = [search for _, search in searches.values()]
            turns = take_turns(asked, queries[half:], budget, SERVER_BATCH, [None, server.process, server.process])
            milvus.measure_memory()
            some[0] |= faiss.facts
            some[1] |= milvus.facts
            del faiss, searches, asked
            for row, (ms, rate, alone, together) in zip(some, turns, strict=True):
                row |= {"queries/s, 1": 1000 / ms, "queries/s, 64": rate, "CPU ms, 1": alone, "CPU ms, 64": together}
                if row is not some[0]:
                    row["ratio"] = some[0]["queries/s, 1"] / row["queries/s, 1"]
                    row["batch ratio"] = some[0]["queries/s, 64"] / row["queries/s, 64"]
                show_line(row)
            rows += some
    return rows


def say(words: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {words}", file=sys.stderr, flush=True)


def folder_megabytes(folder: Path) -> float:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 1e6


def measure_adds(count: int, dim: int) -> dict[str, Any]:
    """A row for items that are added one by one, each on disk before the next."""
    points, _ = synthetic(count, dim)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "i"
        with Index.from_vectors(points[:1], out=folder, backend="exact") as index:
            times = []
            for row in range(count):
                begin = time.perf_counter()
                index.add_vectors(points[row : row + 1], labels=[f"class {row % 1000}"])
                times.append(time.perf_counter() - begin)
            before = folder_megabytes(folder)
            begin = time.perf_counter()
            getattr(index, "compact" if hasattr(index, "compact") else "save")()  # the name in format 1 was save
            seconds = time.perf_counter() - begin
        found = {
            "adds": count,
            "dim": dim,
            "adds/s": count / sum(times),
            "ms": 1000 * statistics.median(times),
            "MB before": before,
            "compact s": seconds,
            "MB after": folder_megabytes(folder),
        }
    show_line(found)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=SIZE, help="how many vectors")
    parser.add_argument("--dim", type=int, default=DIM)
    parser.add_argument("--only", nargs="+", default=[""], help="only backends whose name contains one of these")
    parser.add_argument(
        "--milvus", metavar="ADDRESS", help="a server of Milvus instead of its file; start: the package's"
    )
    parser.add_argument("--budget", type=float, default=10.0, help="seconds of searching, for each backend")
    parser.add_argument("--adds", type=int, default=0, help="measure this many adds, one by one, instead of searches")
    parser.add_argument("--exact", action="store_true", help="measure exact search without an index around it")
    parser.add_argument("--noise", type=float, default=NOISE, help="length of the noise, as a multiple of a center")
    parser.add_argument("--measure", choices=MEASURES, default="cosine", help="of --exact")
    parser.add_argument("--server", action="store_true", help="measure a Milvus server beside FAISS, both alone")
    columns = EXACT_COLUMNS if "--exact" in sys.argv else SERVER_COLUMNS if "--server" in sys.argv else COLUMNS
    options = parse(parser, columns)
    if options.adds:
        report([measure_adds(options.adds, options.dim)], ADD_COLUMNS, Clock("cpu"), options.out)
        return
    points, queries = synthetic(options.size, options.dim, options.noise)
    if options.exact:
        rows = measure_exact(points, queries, options.only, options.measure)
        report(rows, EXACT_COLUMNS, Clock("cpu"), options.out)
        return
    if options.server:
        kinds = [kind for kind in faiss_backend.KINDS if any(part in kind for part in options.only)]
        report(measure_server(points, queries, options.budget, kinds), SERVER_COLUMNS, Clock("cpu"), options.out)
        return
    truth = exact_neighbors(points, queries)
    rows = []
    for name in BACKENDS:
        if not any(part in name for part in options.only):
            continue
        with milvus_server(options.milvus if name == "milvus" else None) as (address, process):
            try:
                rows += measure(
                    f"milvus:{address}" if address else name, points, queries, truth, options.budget, process
                )
            except ImportError as error:
                print(f"{name} is left out: {error}", file=sys.stderr)
    report(rows, COLUMNS, Clock("cpu"), options.out)


if __name__ == "__main__":
    main()
