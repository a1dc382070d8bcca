"""Speed and recall of the backends of an index, next to plain FAISS in the same run.

    python benchmarks/search.py                     # 100,000 × 512 on a CPU
    python benchmarks/search.py --size 10000        # a quick look
    python benchmarks/search.py --only hnsw         # only rows whose name contains this
    python benchmarks/search.py --milvus http://127.0.0.1:19530
    python benchmarks/search.py --size 1000000 --dim 128 --milvus start --only exact ivf milvus   # the package's server
    python benchmarks/search.py --adds 100000       # instead: add items one by one, and measure the folder
    python benchmarks/search.py --size 1000000 --exact     # instead: exact search alone beside FAISS's flat index

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
leave FAISS out (--only exact), because its threads keep the cores busy after a call.
"""

from __future__ import annotations

import argparse
import ctypes
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import Clock, parse, report, show_line
from numpy.typing import NDArray

from nearfar.search import Index
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
EXACT_COLUMNS = ["search", "vectors", "dim", "batch", "ms", "ratio", "CPU ms", "CPU ratio"]
EXACT_TURNS = {1: 15, 4: 7, 64: 3}  # queries at a time, and calls of each search
BACKENDS = ("exact", "faiss:flat", "faiss:ivf", "milvus", "faiss:hnsw")
BATCH = 256
EF = 128  # search effort of plain Milvus

Vectors = NDArray[np.float32]
Search = Callable[[Vectors], Any]


def synthetic(size: int, dim: int) -> tuple[Vectors, Vectors]:
    """Vectors in groups, in shuffled order, and queries from the same groups."""
    rng = np.random.default_rng(0)
    centers = rng.standard_normal((max(1, size // GROUP), dim), dtype=np.float32)
    both = [centers[rng.integers(0, len(centers), count)] for count in (size, QUERIES)]
    for points in both:
        points += NOISE * rng.standard_normal(points.shape, dtype=np.float32)
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


@contextmanager
def milvus_server(wanted: str | None) -> Iterator[tuple[str | None, int | None]]:
    """Start the server of the package milvus if wanted: its address and process id, or what was given."""
    if wanted != "start":
        yield wanted, None
        return
    from milvus import MilvusServer

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        server = MilvusServer(data_dir=folder)
        server.start()
        try:
            yield f"http://127.0.0.1:{server.listen_port}", server.server_proc.pid
        finally:
            server.stop()


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
    """Resident memory of this process, and of another."""
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    pages = [int(Path(f"/proc/{name}/statm").read_text().split()[1]) for name in ("self", process) if name]
    return sum(pages) * resource.getpagesize() / 2**30


def by_index(index: Index) -> Search:
    """The search of an index: ids with scores."""
    return lambda queries: index.search_vectors(queries, K)


def ids_of(found: Any) -> NDArray[np.int64]:
    return found if isinstance(found, np.ndarray) else np.array([[hit.id for hit in row] for row in found])


def recall(search: Search, queries: Vectors, truth: NDArray[np.int64]) -> float:
    found = ids_of(search(queries))
    return 100 * float(np.mean([len(set(a) & set(b)) / K for a, b in zip(found.tolist(), truth.tolist(), strict=True)]))


def take_turns(searches: list[Search], queries: Vectors, budget: float) -> list[tuple[float, float]]:
    """Median ms of a single query and queries/s of a batch, for each search; they alternate query by query.

    Half of the budget is spent on single queries, half on batches.
    """
    found = []
    for size, least in ((1, 50), (BATCH, 5)):
        times: list[list[float]] = [[] for _ in searches]
        deadline, turn = time.perf_counter() + budget / 2, 0
        while turn < least or (time.perf_counter() < deadline and turn < 4000):
            start = size * turn % (len(queries) - size + 1)
            order = range(len(searches)) if turn % 2 else reversed(range(len(searches)))
            for place in order:
                begin = time.perf_counter()
                searches[place](queries[start : start + size])
                times[place].append(time.perf_counter() - begin)
            turn += 1
        found.append([statistics.median(each) for each in times])
    return [(1000 * one, BATCH / many) for one, many in zip(*found, strict=True)]


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
            for row, (ms, rate) in zip(rows, take_turns(searches, queries, budget), strict=True):
                row |= {"ms": ms, "queries/s": rate}
    if len(rows) == 2:
        rows[0]["ratio"] = rows[0]["ms"] / rows[1]["ms"]
        rows[0]["batch ratio"] = rows[1]["queries/s"] / rows[0]["queries/s"]
    for row in rows:
        show_line(row)
    return rows


def measure_exact(points: Vectors, queries: Vectors, only: list[str]) -> list[dict[str, Any]]:
    """Rows for exact search without an index around it, and for FAISS's flat index unless it is left out."""
    searches: dict[str, Search] = {}
    if any(part in "exact" for part in only):
        exact = Exact(points, np.arange(len(points)))
        searches["nearfar, exact"] = lambda rows: exact.search(rows, K)
    if any(part in "faiss:flat" for part in only):
        import faiss

        flat = faiss.IndexFlatIP(points.shape[1])
        flat.add(points)
        searches["plain FAISS, flat"] = lambda rows: flat.search(rows, K)
    rows = []
    for size, turns in EXACT_TURNS.items():
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in searches}
        for turn in range(turns + 1):  # the first turn is not counted
            for name, search in searches.items():
                begin, used = time.perf_counter(), time.process_time()
                search(queries[size * turn : size * (turn + 1)])
                found[name].append((time.perf_counter() - begin, time.process_time() - used))
        medians = [1000 * np.median(times[1:], axis=0) for times in found.values()]
        for name, (wall, cpu) in zip(searches, medians, strict=True):
            row = {"search": name, "vectors": len(points), "dim": points.shape[1], "batch": size}
            row |= {"ms": float(wall), "CPU ms": float(cpu)}
            if len(searches) == 2 and name == "nearfar, exact":
                row |= {"ratio": float(wall / medians[1][0]), "CPU ratio": float(cpu / medians[1][1])}
            show_line(row)
            rows.append(row)
    return rows


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
    options = parse(parser, EXACT_COLUMNS if "--exact" in sys.argv else COLUMNS)
    if options.adds:
        report([measure_adds(options.adds, options.dim)], ADD_COLUMNS, Clock("cpu"), options.out)
        return
    points, queries = synthetic(options.size, options.dim)
    if options.exact:
        report(measure_exact(points, queries, options.only), EXACT_COLUMNS, Clock("cpu"), options.out)
        return
    truth = exact_neighbors(points, queries)
    rows: list[dict[str, Any]] = []
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
