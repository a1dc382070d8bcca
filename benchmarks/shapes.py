"""What a GPU takes for the first batch of a shape, with cuDNN trying kernels out and without.

    python benchmarks/shapes.py                  # batches through the network, forward
    python benchmarks/shapes.py --step           # steps of a training
    python benchmarks/shapes.py --step --tried   # and with kernels tried out

EfficientNet-Lite0 with a head of 512 dimensions, bfloat16, channels last. Forward, a size is seen with one setting
only, as what is made ready once stays so: sides of pictures differ, and milliseconds are to be compared by area. Steps
are timed with one setting a process.
"""

from __future__ import annotations

import argparse
import time

import torch

from nearfar import losses, networks
from nearfar.data.loader import Batch
from nearfar.training.cuda_graphs import GraphedEmbedder
from nearfar.training.step import Learner, TrainStep

TRIES = ((False, 224), (False, 288), (True, 304), (True, 320), (False, 336))  # whether kernels are tried out, and side
LARGE, SMALL, REPEATS = 256, 36, 5
BATCH, SIDE = 120, 224  # of a step


def seconds(model: torch.nn.Module, count: int, side: int) -> float:
    """Of one batch of pictures."""
    images = torch.randn(count, 3, side, side, device="cuda").contiguous(memory_format=torch.channels_last)
    torch.cuda.synchronize()
    start = time.perf_counter()
    with torch.no_grad(), torch.autocast("cuda", dtype=torch.bfloat16):
        model(images)
    torch.cuda.synchronize()
    return time.perf_counter() - start


def forward(model: torch.nn.Module) -> None:
    """Print a line for each size."""
    model.eval()
    for tried, side in TRIES:
        torch.backends.cudnn.benchmark = tried
        first, small = seconds(model, LARGE, side), seconds(model, SMALL, side)
        again = min(seconds(model, LARGE, side) for _ in range(REPEATS))
        print(
            f"{side} pixels, {'tried out' if tried else 'not tried'}: first {LARGE} in {first:.2f} s, "
            f"first {SMALL} in {small:.2f} s, {LARGE} again in {1000 * again:.1f} ms",
            flush=True,
        )


def steps(model: networks.Embedder, *, tried: bool) -> None:
    """Print how long the first step of a process takes, the few until the network is recorded, and those after."""
    torch.backends.cudnn.benchmark = tried
    loss = losses.create("proxy_anchor", num_classes=100, dim=512).cuda()
    optimizer = torch.optim.AdamW([*model.parameters(), *loss.parameters()], lr=1e-5, fused=True)
    step = TrainStep(
        [Learner(model.train(), {"high": loss}, embed=GraphedEmbedder(model))], optimizer, precision="bfloat16"
    )
    labels = torch.randint(0, 100, (BATCH,), device="cuda")
    batch = Batch(torch.randn(BATCH, 3, SIDE, SIDE, device="cuda"), labels, labels)
    found = []
    for count in (1, 5, 200):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(count):
            step(batch)
        torch.cuda.synchronize()
        found.append(time.perf_counter() - start)
    how = "tried out" if tried else "not tried"
    print(
        f"steps of {BATCH} pictures of {SIDE} pixels, {how}: the first {found[0]:.1f} s, "
        f"five more {found[1]:.1f} s, then {1000 * found[2] / 200:.1f} ms each",
        flush=True,
    )


def main() -> None:
    """Print what was asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--step", action="store_true", help="steps of a training instead of forward passes")
    parser.add_argument("--tried", action="store_true", help="with --step: let cuDNN try kernels out")
    asked = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this is about GPUs, and there is none")
    model = networks.create("efficientnet_lite0", dim=512, pooling="avg+max", freeze_batchnorm=True)
    model.to("cuda", memory_format=torch.channels_last)
    print(torch.cuda.get_device_name(), "PyTorch", torch.__version__)
    if asked.step:
        steps(model, tried=asked.tried)
    else:
        forward(model)


if __name__ == "__main__":
    main()
