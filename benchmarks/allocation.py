"""CPU time with and without the reuse of freed memory (``nearfar.utils.system.reuse_memory``).

    python benchmarks/allocation.py --rounds 3

Processes with and without it take turns. Compare the CPU time, which is user and system time of the process, if the
machine is shared; the system time is what reuse saves.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
from collections.abc import Callable

LOSSES = ("contrastive", "multi_similarity", "triplet")


def cpu_seconds(step: Callable[[], None], repeats: int) -> tuple[float, float]:
    """Return the CPU and the system time of a step in seconds, as a mean after one that does not count."""
    step()
    before = resource.getrusage(resource.RUSAGE_SELF)
    for _ in range(repeats):
        step()
    after = resource.getrusage(resource.RUSAGE_SELF)
    system = (after.ru_stime - before.ru_stime) / repeats
    return (after.ru_utime - before.ru_utime) / repeats + system, system


def measure() -> dict[str, tuple[float, float]]:
    """Measure losses, retrieval metrics, k-means and a training step in this process."""
    import torch

    import nearfar as nf

    torch.manual_seed(0)
    found: dict[str, tuple[float, float]] = {}

    def backward_of(loss: nf.losses.Loss, embeddings: torch.Tensor, labels: torch.Tensor) -> Callable[[], None]:
        def step() -> None:
            embeddings.grad = None
            loss(embeddings, labels).backward()

        return step

    for size, repeats in ((1024, 5), (4096, 2)):
        embeddings, labels = torch.randn(size, 512, requires_grad=True), torch.arange(size) // 4
        for name in LOSSES:
            found[f"{name}, batch {size:,}"] = cpu_seconds(
                backward_of(nf.losses.create(name), embeddings, labels), repeats
            )
    points, classes = torch.randn(5000, 512), torch.arange(5000) // 10
    found["retrieval, 5,000 × 512"] = cpu_seconds(lambda: nf.metrics.retrieval(points, classes) and None, 1)
    found["k-means, 5,000 × 512, k = 100"] = cpu_seconds(lambda: nf.metrics.kmeans(points, 100, restarts=1) and None, 1)
    model = nf.networks.create("efficientnet_lite0", dim=128, pretrained=False).to(memory_format=torch.channels_last)
    images = torch.randn(32, 3, 160, 160).contiguous(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loss, labels = nf.losses.create("multi_similarity"), torch.arange(32) // 4

    def train() -> None:
        optimizer.zero_grad()
        loss(model(images), labels).backward()
        optimizer.step()

    found["training EfficientNet-Lite0, 32 × 160²"] = cpu_seconds(train, 3)
    return found


def main() -> None:
    """Print a table of medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        from nearfar.utils.system import reuse_memory

        reuse_memory()
        print(json.dumps(measure()))
        return
    each: dict[str, list[dict[str, tuple[float, float]]]] = {"0": [], "1": []}
    for _ in range(options.rounds):
        for reuse, results in each.items():
            environment = {**os.environ, "NEARFAR_REUSE_MEMORY": reuse}
            command = [sys.executable, __file__, "--worker"]
            done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
            results.append(json.loads(done.stdout.splitlines()[-1]))
    print("| step | CPU ms | system ms | CPU ms with reuse | system ms | ratio |\n|---|--:|--:|--:|--:|--:|")
    for name in each["0"][0]:
        medians = [
            1000 * statistics.median(result[name][part] for result in each[reuse]) for reuse in "01" for part in (0, 1)
        ]
        numbers = " | ".join(f"{value:,.1f}" for value in medians)
        print(f"| {name} | {numbers} | {medians[0] / medians[2]:.2f} |")


if __name__ == "__main__":
    main()
