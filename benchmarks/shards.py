"""Memory and time of a training step when classes are sharded over processes: one rank, the others simulated.

    python benchmarks/shards.py --classes 10000000 --dim 128 --ranks 4 8 16 32 64

Each number of ranks is measured in a process of its own, which holds the classes of rank 0. What the other ranks would
send is replaced by copies of its own tensors of the same size, so memory and arithmetic are those of a real rank, and
the network between ranks costs nothing.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time

import torch

from nearfar import losses
from nearfar.distributed import class_bounds
from nearfar.engine.classes import ClassShard
from nearfar.training.trainer import peak_memory

CPU = torch.device("cpu")


def measure(name: str, classes: int, dim: int, batch: int, sample_rate: float, ranks: int) -> tuple[float, float]:
    """Peak memory in MiB above that of the imports, and seconds of the second step of fused Adam."""
    before = peak_memory(CPU)
    settings = {} if name == "proxy_anchor" else {"sample_rate": sample_rate}
    with torch.device("meta"):
        loss = losses.create(name, num_classes=classes, dim=dim, **settings)
    assert isinstance(loss, losses.ProxyLoss)
    start, stop = class_bounds(classes, ranks)[:2]
    loss.keep_shard(ClassShard(start, stop, classes, stack=lambda part: torch.stack([part] * ranks)))
    optimizer = torch.optim.Adam(loss.param_groups(1e-4), fused=True)
    embeddings, labels = torch.randn(batch, dim, requires_grad=True), torch.randint(start, stop, (batch,))
    for _ in range(2):
        began = time.perf_counter()
        optimizer.zero_grad()
        loss(embeddings, labels).backward()
        optimizer.step()
        seconds = time.perf_counter() - began
    return peak_memory(CPU) - before, seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--loss", default="arcface")
    parser.add_argument("--classes", type=int, default=10_000_000)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--batch", type=int, default=64, help="embeddings of all ranks together")
    parser.add_argument("--sample-rate", type=float, default=1.0)
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8, 16, 32, 64])
    parser.add_argument("--one", action="store_true", help="measure in this process")
    given = parser.parse_args()
    settings = (given.loss, given.classes, given.dim, given.batch, given.sample_rate)
    if given.one:
        memory, seconds = measure(*settings, given.ranks[0])
        print(f"| {given.ranks[0]} | {memory:,.0f} MiB | {seconds:.2f} s |")
        return
    print("| ranks | memory of a rank | step |\n|---|---|---|", flush=True)
    for ranks in given.ranks:
        options = [str(each) for each in ("--ranks", ranks, "--one")]
        subprocess.run([sys.executable, *sys.argv, *options], check=True)


if __name__ == "__main__":
    main()
