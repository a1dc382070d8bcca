"""Images per second of embedding against the bare backbone's forward, side by side in one run.

    python benchmarks/networks.py                     # CPU, float32, a small batch
    python benchmarks/networks.py --device cuda       # a GPU: bfloat16 by autocast, channels last
    python benchmarks/networks.py --only resnet50     # one network
    python benchmarks/networks.py --precisions        # instead: float32 beside bfloat16

Random weights and random pictures of the size the network reads, already on the device. Two forwards without
gradients take turns: the backbone alone, to its last map, and the embedder, with pooling, a linear head to 512
dimensions and embeddings of length one in float32. The ratio is the embedder's images per second over the backbone's.
"levels" is the embedder with heads at three levels.

--precisions compares embedding and a training step (forward and backward of the embedder, with the autocast of
``training.precision``) in float32 and bfloat16: the smallest CPU seconds of calls that alternate. The ratio is that of
bfloat16 to float32. Measure it with OMP_NUM_THREADS=1.
"""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from common import Clock, Step, parse, report, show_line
from torch import Tensor, nn

from nearfar import networks
from nearfar.training.step import autocast
from nearfar.utils.system import reuse_memory

COLUMNS = ["network", "what", "batch", "size", "images/s", "ratio", "ms"]
PRECISION_COLUMNS = ["network", "what", "batch", "size", "float32 CPU s", "bfloat16 CPU s", "ratio"]
DIM = 512
TARGET = 0.9
TURNS = 4  # counted calls of each precision
VECTORS = {"mlp", "linear"}  # nothing to compare with


def precision(device: str) -> AbstractContextManager[Any]:
    """bfloat16 where it is quick."""
    return torch.autocast("cuda", dtype=torch.bfloat16) if device.startswith("cuda") else nullcontext()


def forward(model: nn.Module, images: Tensor, device: str) -> Step:
    def step() -> None:
        with torch.inference_mode(), precision(device):
            model(images)

    return step


def measure(name: str, options: argparse.Namespace, clock: Clock) -> list[dict[str, Any]]:
    """Rows of the backbone, the embedder, and the embedder with levels, in turns."""
    embedder = networks.create(name, dim=DIM)
    models = {"backbone": embedder.backbone, "embedder": embedder}
    if set(networks.LEVELS) <= set(embedder.backbone.channels) and embedder.backbone.gives_maps:
        models["levels"] = networks.create(name, dim=DIM, levels=networks.LEVELS)
    size = embedder.input_size
    assert size is not None
    images = torch.randn(options.batch, embedder.backbone.in_channels, size, size)
    images = images.to(options.device, memory_format=torch.channels_last)
    for model in models.values():
        model.eval().to(options.device, memory_format=torch.channels_last)
    steps = [forward(model, images, options.device) for model in models.values()]
    for step in steps * 3:  # libraries choose their ways
        step()
    times = clock.take_turns(steps, options.seconds)
    rows = []
    for what, seconds in zip(models, times, strict=True):
        row = {"network": name, "what": what, "batch": options.batch, "size": size}
        row |= {"images/s": options.batch / seconds, "ratio": times[0] / seconds, "ms": 1000 * seconds}
        show_line(row)
        rows.append(row)
    return rows


def measure_precisions(name: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of embedding and of a training step on a CPU, in float32 and bfloat16 in turns."""
    embedder = networks.create(name, dim=128).to(memory_format=torch.channels_last)
    size, cpu = embedder.input_size, torch.device("cpu")
    assert size is not None
    images = torch.randn(options.batch, embedder.backbone.in_channels, size, size)
    images = images.to(memory_format=torch.channels_last)

    def embed(kind: str) -> None:
        with torch.inference_mode(), autocast(cpu, kind):
            embedder.eval()(images)

    def train(kind: str) -> None:
        with autocast(cpu, kind):
            value = embedder.train()(images).square().sum()
        value.backward()

    rows = []
    for what, step in {"embedding": embed, "training step": train}.items():
        times: dict[str, list[float]] = {"float32": [], "bfloat16": []}
        for _ in range(TURNS + 1):
            for kind, seen in times.items():
                start = time.process_time()
                step(kind)
                seen.append(time.process_time() - start)
        best = {f"{kind} CPU s": min(seen[1:]) for kind, seen in times.items()}
        row = {"network": name, "what": what, "batch": options.batch, "size": size, **best}
        rows.append(row | {"ratio": best["bfloat16 CPU s"] / best["float32 CPU s"]})
        show_line(rows[-1])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--only", nargs="+", default=[""], help="only networks whose name contains one of these")
    parser.add_argument("--batch", type=int, help="pictures in a batch, 256 on a GPU and 8 elsewhere unless told")
    parser.add_argument("--seconds", type=float, default=10.0, help="for each network")
    parser.add_argument("--precisions", action="store_true", help="compare float32 with bfloat16 on a CPU")
    options = parse(parser, PRECISION_COLUMNS if "--precisions" in sys.argv else COLUMNS)
    clock = Clock(options.device)
    options.batch = options.batch or (256 if clock.cuda else 8)
    torch.backends.cudnn.benchmark = True
    names = [name for name in networks.names() if name not in VECTORS and any(part in name for part in options.only)]
    if not names:
        raise SystemExit(
            f"no network has {' or '.join(options.only)} in its name; there are {', '.join(networks.names())}"
        )
    if options.precisions:
        if clock.cuda:
            raise SystemExit("--precisions measures CPU seconds; leave out --device")
        reuse_memory()  # as commands do
        rows = [row for name in names for row in measure_precisions(name, options)]
        report(rows, PRECISION_COLUMNS, clock, options.out)
        return
    rows = [row for name in names for row in measure(name, options, clock)]
    report(rows, COLUMNS, clock, options.out)
    slow = [f"{row['network']} ({row['ratio']:.2f})" for row in rows if row["what"] == "embedder" and is_slow(row)]
    if slow:
        print(f"below {TARGET:.0%} of the backbone: {', '.join(slow)}", file=sys.stderr)


def is_slow(row: dict[str, Any]) -> bool:
    # A network for digits is little more than its head.
    return bool(row["ratio"] < TARGET) and row["network"] != "small_cnn"


if __name__ == "__main__":
    main()
