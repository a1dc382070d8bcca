"""A training step compared with forward, backward and optimizer step of the bare network, in one run.

    python benchmarks/training.py                     # CPU: small_cnn on images of 28 × 28, float32
    python benchmarks/training.py --device cuda       # a GPU: efficientnet_lite0, 224 × 224, bfloat16, channels last
    python benchmarks/training.py --loss multi_similarity

Weights and images are random. "bare network" is the embedder with a fixed gradient at its output and the same
optimizer, on a batch that is already on the device. "step" adds the loss, the gradient norm and the check for NaN, on
the same batch. "training" is what a run does: new batches from the loader, the step, the schedule and logging. Images
are stored at 8/7 of the network's input size, then cropped at random (--crop random) or by random resized crops
(random_resized), and flipped. The three variants take turns; the ratio is the time relative to the bare network, and
the aim is at most 1.10. On a GPU, training replays the network as a CUDA graph
(``nearfar.training.cuda_graphs``); the bare network is called directly.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from common import Clock, Step, parse, report, show_line

from nearfar import losses, networks
from nearfar.data.loader import Batch, Loader
from nearfar.data.sampling.base import create as create_sampler
from nearfar.data.store.store import Store
from nearfar.data.transforms.view import View
from nearfar.losses import PairLoss
from nearfar.training import step as training
from nearfar.training.checkpoint import State
from nearfar.training.cuda_graphs import GraphedEmbedder
from nearfar.training.recipe.schema import OptimizerSection, ScheduleSection
from nearfar.training.setup import create_optimizer, schedule_factor
from nearfar.training.step import prefetch

COLUMNS = ["network", "loss", "what", "crop", "batch", "size", "precision", "ms", "images/s", "ratio"]
TARGET = 1.10
CLASSES, EACH, DIM = 100, 20, 512


def made_up(size: int, channels: int) -> Store:
    """Pictures a little larger than what is cut out of them."""
    rng = np.random.default_rng(0)
    shape = (CLASSES * EACH, round(size * 8 / 7), round(size * 9 / 7), channels)
    return Store.of_arrays(rng.integers(0, 256, shape, dtype=np.uint8))


def bare(options: argparse.Namespace, batch: Batch) -> Step:
    """Forward, backward, update."""
    network = embedder(options)
    optimizer = create_optimizer(OptimizerSection(lr=1e-4), network, torch.nn.ModuleList(), options.device)
    images = batch.images.contiguous(memory_format=torch.channels_last)
    gradient = torch.randn(len(batch), DIM, device=options.device) / DIM

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with training.autocast(images.device, options.precision):
            embeddings = network(images)
        embeddings.backward(gradient)
        optimizer.step()

    return step


def embedder(options: argparse.Namespace) -> networks.Embedder:
    torch.manual_seed(0)
    settings: dict[str, Any] = {"channels": 1} if options.network == "small_cnn" else {}
    settings |= {"freeze_batchnorm": options.freeze_batchnorm}
    network = networks.create(options.network, dim=DIM, **settings).train()
    return network.to(options.device, memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]


def ours(options: argparse.Namespace) -> tuple[training.TrainStep, torch.optim.Optimizer]:
    network = embedder(options)
    kind = losses.get(options.loss)
    needed = {} if issubclass(kind, PairLoss) else {"num_classes": CLASSES, "dim": DIM}
    loss = losses.create(options.loss, **needed).to(options.device)
    optimizer = create_optimizer(OptimizerSection(lr=1e-4), network, loss, options.device)
    learner = training.Learner(network, {"high": loss}, embed=GraphedEmbedder(network))
    return training.TrainStep([learner], optimizer, precision=options.precision), optimizer


def measure(options: argparse.Namespace, clock: Clock) -> list[dict[str, Any]]:
    probe = embedder(options)
    size, normalization = probe.input_size, probe.normalization
    assert size is not None
    labels = np.repeat(np.arange(CLASSES), EACH)
    view = View(size=size, crop=options.crop, resize=round(size * 8 / 7) if options.crop == "random" else None)
    store = made_up(size, probe.backbone.in_channels)
    loader = Loader(store, labels, view=view, normalization=normalization, device=options.device)
    sampler = create_sampler("groups", labels, classes=options.batch // 4, per_class=4)

    def forever() -> Iterator[Batch]:
        epoch = 0
        while True:
            drawn = loader.epoch(sampler, epoch)
            yield from prefetch(drawn, torch.device(options.device)) if clock.cuda else drawn
            epoch += 1

    batches = forever()
    batch = next(batches)
    step, _ = ours(options)
    whole, optimizer = ours(options)
    schedule, state = ScheduleSection(name="cosine", per="iteration"), State()
    steps = training.StepLog(torch.device(options.device))

    def train() -> None:
        new = next(batches)
        outcome = whole(new)
        state.iteration += 1
        factor = schedule_factor(schedule, state, 16, 10**6)
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * factor
        steps.add(state.iteration - 1, outcome, len(new))

    def alone() -> None:
        step(batch)

    ways: dict[str, Step] = {
        "bare network": bare(options, batch),
        "step": alone,
        "training": train,
    }
    for each in [*ways.values()] * 6:  # libraries choose their ways, and losses are recorded
        each()
    times = clock.take_turns(list(ways.values()), options.seconds)
    rows = []
    for what, seconds in zip(ways, times, strict=True):
        row: dict[str, Any] = {"network": options.network, "loss": "–" if what == "bare network" else options.loss}
        row |= {
            "what": what,
            "crop": options.crop if what == "training" else "–",
            "batch": options.batch,
            "size": size,
            "precision": options.precision,
        }
        row |= {"ms": 1000 * seconds, "images/s": options.batch / seconds, "ratio": seconds / times[0]}
        show_line(row)
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--network", help="efficientnet_lite0 on a GPU and small_cnn elsewhere unless told")
    parser.add_argument("--loss", default="proxy_anchor")
    parser.add_argument("--batch", type=int, default=120)
    parser.add_argument("--freeze-batchnorm", action="store_true", help="as recipes with pretrained weights do")
    parser.add_argument("--crop", choices=("random", "random_resized"), default="random_resized")
    parser.add_argument("--precision", choices=training.PRECISIONS, help="bfloat16 on a GPU unless told")
    parser.add_argument("--seconds", type=float, default=20.0)
    options = parse(parser, COLUMNS)
    clock = Clock(options.device)
    options.network = options.network or ("efficientnet_lite0" if clock.cuda else "small_cnn")
    options.precision = options.precision or ("bfloat16" if clock.cuda else "float32")
    torch.backends.cudnn.benchmark = True
    rows = measure(options, clock)
    report(rows, COLUMNS, clock, options.out)
    if rows[-1]["ratio"] > TARGET:
        print(f"above {TARGET:.2f} times the bare network: {rows[-1]['ratio']:.3f}", file=sys.stderr)


if __name__ == "__main__":
    main()
