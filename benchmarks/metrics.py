"""Speed and memory of retrieval against pytorch-metric-learning's AccuracyCalculator, side by side in one run.

    python benchmarks/metrics.py                    # CPU, as many embeddings as the test half of SOP has
    python benchmarks/metrics.py --device cuda      # a GPU
    python benchmarks/metrics.py --size 5000        # a quick look
    python benchmarks/metrics.py --million          # 1,000,000 × 128, ours alone; takes an hour on a small CPU

The data are synthetic: 60,502 embeddings of 512 dimensions in 11,316 classes of 2 to 12 members, each a class center
and noise, so that about seven of ten nearest neighbors are of the right class. All sides get the same
vectors of length one and take turns. Seconds are medians of the repeats, the ratio is theirs over ours, memory is the
peak beyond what was there before; metrics are in percent.

Ours looks at all answers. The peer, and the few lines of PyTorch that one would write instead, look at the first
1,000, so their mrr counts 0 for what they find later. The peer searches with faiss where it can be imported (on a
GPU: with GPUs), or else with its own CustomKNN.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from common import Clock, limit_memory, parse, report, show_line
from torch import Tensor
from torch.nn.functional import normalize

import nearfar as nf

COLUMNS = ["search", "embeddings", "dim", "seconds", "ratio", "MiB", "recall@1", "recall@10", "recall@100"]
COLUMNS += ["recall@1000", "r_precision", "map@r", "mrr", "failed"]
KS = (1, 10, 100, 1000)
NEIGHBORS = 1000
SIZE, DIM = 60_502, 512  # 11,316 classes, as in the test half of SOP
MILLION, MILLION_DIM = 1_000_000, 128
PER_CLASS = SIZE / 11_316
NOISE = {DIM: 2.27, MILLION_DIM: 1.3}  # in lengths of a centre's coordinate

Search = Callable[[Tensor, Tensor], dict[str, float]]


def synthetic(size: int, dim: int, device: str) -> tuple[Tensor, Tensor]:
    """Embeddings of length one in shuffled order and their labels."""
    torch.manual_seed(0)
    sizes = class_sizes(size)
    labels = torch.repeat_interleave(torch.arange(len(sizes)), sizes)[torch.randperm(size)]
    points = torch.randn(len(sizes), dim)[labels].add_(torch.randn(size, dim), alpha=NOISE[dim])
    return normalize(points).to(device), labels.to(device)


def class_sizes(size: int) -> Tensor:
    """From 2 to 12, small ones more often, together ``size``."""
    sizes = 2 + (11 * torch.rand(round(size / PER_CLASS)) ** 1.86).long()
    while missing := size - int(sizes.sum()):
        room = (sizes < 12 if missing > 0 else sizes > 2).nonzero().squeeze(1)
        chosen = room[torch.randperm(len(room))[: abs(missing)]]
        sizes[chosen] += 1 if missing > 0 else -1
    return sizes


def by_us(embeddings: Tensor, labels: Tensor) -> dict[str, float]:
    return nf.metrics.retrieval(embeddings, labels, ks=KS)


def by_hand(embeddings: Tensor, labels: Tensor) -> dict[str, float]:
    """A tile of queries at a time: multiply, take the first 1,000, look at their labels."""
    count, neighbors = len(labels), min(NEIGHBORS, len(labels) - 1)
    members = torch.bincount(labels)[labels] - 1
    places = torch.arange(1, neighbors + 1, device=labels.device)
    totals = torch.zeros(len(KS) + 3, dtype=torch.float64, device=labels.device)
    for rows in torch.arange(count, device=labels.device).split(1024):
        similarity = embeddings[rows] @ embeddings.T
        similarity.scatter_(1, rows.unsqueeze(1), -torch.inf)
        right = labels[similarity.topk(neighbors).indices] == labels[rows].unsqueeze(1)
        found = right.cumsum(dim=1)
        number = members[rows].unsqueeze(1)
        within = right & (places <= number)
        first = torch.where(right.any(dim=1), right.int().argmax(dim=1), count)
        values = [first < k for k in KS]
        values += [within.sum(dim=1) / number.squeeze(1), (within * found / places / number).sum(dim=1)]
        values += [torch.where(first < count, 1 / (first + 1), 0)]
        totals += torch.stack([value.double().sum() for value in values])
    names = [*(f"recall@{k}" for k in KS), "r_precision", "map@r", "mrr"]
    return dict(zip(names, (totals / count).tolist(), strict=True))


def by_the_peer(device: str) -> tuple[str, Search] | None:
    """Its name and how it searches; None where it is not installed."""
    try:
        from pytorch_metric_learning.distances import CosineSimilarity
        from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator
        from pytorch_metric_learning.utils.inference import CustomKNN, FaissKNN
    except ImportError:
        print("pytorch-metric-learning is not installed: no comparison with it", file=sys.stderr)
        return None
    names = {
        "recall@1": "precision_at_1",
        "r_precision": "r_precision",
        "map@r": "mean_average_precision_at_r",
        "mrr": "mean_reciprocal_rank",
    }
    name = faiss_name(device)
    knn = CustomKNN(CosineSimilarity(), batch_size=1024) if name is None else FaissKNN()

    def search(embeddings: Tensor, labels: Tensor) -> dict[str, float]:
        calculator = AccuracyCalculator(
            include=tuple(names.values()),
            k=min(NEIGHBORS, len(labels) - 1),
            device=embeddings.device,
            knn_func=knn,
            kmeans_func=lambda *_: None,
        )
        found = calculator.get_accuracy(embeddings, labels)
        return {ours: found[theirs] for ours, theirs in names.items()}

    return f"pytorch-metric-learning, {name or 'CustomKNN'}", search


def faiss_name(device: str) -> str | None:
    """faiss and its version, if it can be used on this device."""
    try:
        import faiss
    except ImportError:
        print("faiss is not installed: pytorch-metric-learning searches with its CustomKNN", file=sys.stderr)
        return None
    if device.startswith("cuda") and not faiss.get_num_gpus():
        print("faiss has no GPU: pytorch-metric-learning searches with its CustomKNN", file=sys.stderr)
        return None
    return f"faiss {faiss.__version__}"


def searches(options: argparse.Namespace) -> list[tuple[str, Search]]:
    """Ours first."""
    ours: tuple[str, Search] = ("nearfar", by_us)
    if options.million:
        return [ours]
    others = [by_the_peer(options.device), ("PyTorch, first 1,000 in tiles", by_hand)]
    return [ours, *(other for other in others if other is not None and options.only in other[0])]


def measure(
    searches: list[tuple[str, Search]], embeddings: Tensor, labels: Tensor, clock: Clock, repeats: int
) -> list[dict[str, Any]]:
    """A row for each search; they take turns."""
    rows = [{"search": name, "embeddings": len(labels), "dim": embeddings.shape[1]} for name, _ in searches]
    seen: list[list[tuple[float, float]]] = [[] for _ in searches]
    for _, search in searches:
        search(*small(embeddings, labels))  # set up the libraries
    for _ in range(repeats):
        for row, (_, search), times in zip(rows, searches, seen, strict=True):
            if "failed" in row:
                continue
            try:
                times.append(once(search, row, embeddings, labels, clock))
            except (RuntimeError, MemoryError) as error:
                row["failed"] = "out of memory" if "memory" in str(error).lower() else str(error)[:80]
    for row, times in zip(rows, seen, strict=True):
        if times:
            row["seconds"] = statistics.median(seconds for seconds, _ in times)
            row["MiB"] = max(memory for _, memory in times)
            row["ratio"] = row["seconds"] / rows[0]["seconds"]
        show_line(row)
    return rows


def once(search: Search, row: dict[str, Any], embeddings: Tensor, labels: Tensor, clock: Clock) -> tuple[float, float]:
    """Seconds and MiB; what was found goes into the row."""

    def step() -> None:
        found.update(search(embeddings, labels))

    found: dict[str, float] = {}
    start = time.perf_counter()
    memory = clock.extra_memory(step)  # waits for the GPU
    seconds = time.perf_counter() - start
    row.update({name: 100 * found[name] for name in COLUMNS if name in found})
    return seconds, memory


def small(embeddings: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Some classes of them."""
    chosen = labels < 200
    return embeddings[chosen], labels[chosen]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--size", type=int, help=f"how many embeddings, {SIZE:,} or a million unless told")
    parser.add_argument("--million", action="store_true", help=f"{MILLION:,} × {MILLION_DIM} instead, ours alone")
    parser.add_argument("--only", default="", help="besides ours, only searches whose name contains this")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--memory", type=float, default=20.0, help="GiB a search on a CPU may take before it fails")
    options = parse(parser, COLUMNS)
    warnings.filterwarnings("ignore")
    clock = Clock(options.device)
    if not clock.cuda:
        limit_memory(options.memory)
    size, dim = (MILLION, MILLION_DIM) if options.million else (SIZE, DIM)
    embeddings, labels = synthetic(options.size or size, dim, options.device)
    rows = measure(searches(options), embeddings, labels, clock, options.repeats)
    report(rows, COLUMNS, clock, options.out)


if __name__ == "__main__":
    main()
