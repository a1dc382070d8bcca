"""Whether a training is worse for unseen classes than the frozen network: the head that `nearfar init` trains on a CPU.

    python benchmarks/blend.py features cub:CUB_200_2011/ -o cub.npz      # of the training classes alone
    python benchmarks/blend.py cub.npz cars.npz                           # the table of docs/training.md

Only the training classes of a dataset are used. They are split into halves at random: one is trained on, the other is
the test. Small sets have few classes and images; shuffled labels have nothing that could be learned. Each row compares
the head as trained, the best share of the training in hindsight, and the share that held-out training classes choose,
in points of map@r over the frozen network.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import nearfar as nf
from nearfar.training.blend import SHARES, interpolate, trained_weights
from nearfar.training.recipe.files import load
from nearfar.training.setup import build, on_features
from nearfar.utils.progress import bars

RECIPE = {
    "sampler": {"name": "groups", "per_class": 4, "batch_size": 64},
    "network": {"name": "linear", "head": "residual", "dim": "none"},
    "loss": {"name": "multi_similarity"},
    "optimizer": {"name": "adamw", "lr": 1e-4, "weight_decay": 1e-4},
    "schedule": {"name": "cosine", "per": "iteration"},
    "training": {"epochs": 40, "device": "cpu"},
    "evaluation": {"every": 0, "before": True},
    "selection": {"blend": True},
}
FROZEN = {
    "network": {
        "name": "efficientnet_lite0", "pretrained": True, "freeze": True, "head": "residual", "dim": "none",
        "pooling": "avg+max", "freeze_batchnorm": True,
    }
}  # fmt: skip
Arrays = tuple[NDArray[np.float32], NDArray[np.int64]]


def write_features(place: str, out: Path, device: str) -> None:
    """Compute the features of the training classes of a dataset."""
    name, _, root = place.partition(":")
    overrides = {**FROZEN, "data": {"name": name, "root": root}, "training.device": device}
    with bars() as watch:
        setup = on_features(build(load({**RECIPE, "selection": {}}, overrides=overrides), watch=watch), watch)
    rows = setup.rows["train"]
    assert isinstance(setup.loader.store, np.ndarray)
    np.savez(out, X=setup.loader.store[rows].astype(np.float16), y=setup.labels[rows])


def few(arrays: Arrays, classes: int, images: int, rng: np.random.Generator) -> Arrays:
    """Draw a few classes, twice as many as are trained on, and a few images of each."""
    points, labels = arrays
    chosen = rng.choice(np.unique(labels), 2 * classes, replace=False)
    rows = np.concatenate([rng.permutation(np.flatnonzero(labels == label))[:images] for label in chosen])
    return points[rows], labels[rows]


def cases(arrays: Arrays, options: argparse.Namespace) -> Iterator[tuple[str, int, int, Arrays]]:
    """Yield name, epochs, seed and data of each training."""
    for seed in range(options.splits):
        for epochs in options.epochs:
            yield f"halves, {epochs} epochs", epochs, seed, arrays
    for seed in range(options.draws):
        for classes, images in ((4, 10), (6, 20)):
            yield f"{classes} classes × {images}", 40, seed, few(arrays, classes, images, np.random.default_rng(seed))
        points, labels = arrays
        yield "shuffled labels", 40, seed, (points, np.random.default_rng(seed).permutation(labels))


def measure(epochs: int, seed: int, arrays: Arrays) -> dict[str, Any]:
    """Train on half of the classes and return map@r of the other half for each share, and the share that is chosen."""
    points, labels = arrays
    order = np.random.default_rng(1000 + seed).permutation(np.unique(labels))
    trained = np.isin(labels, order[: (len(order) + 1) // 2])
    split = np.where(trained, "train", "test")
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        overrides = {"training.epochs": epochs, "training.seed": seed}
        run = nf.train(load(RECIPE, overrides=overrides), f"{folder}/run", data=(points, labels, split))
        seconds = time.perf_counter() - start
        given = load(RECIPE, overrides={**overrides, "selection.blend": 1.0})
        model = nf.load(nf.train(given, f"{folder}/whole", data=(points, labels, split)).folder)
        test = torch.from_numpy(points[~trained].astype(np.float32))
        after = trained_weights(model)
        before = {name: torch.zeros_like(value) for name, value in after.items()}  # a residual head begins with zeros
        maps = []
        for share in SHARES:
            interpolate(model, before, after, share)
            with torch.no_grad():
                maps.append(100 * nf.metrics.retrieval(model(test), labels[~trained], ks=(1,))["map@r"])
        blend, verdict = run.metrics["blend"], run.metrics["verdict"]
        recall = 100 * (verdict["recall@1"]["after"] - verdict["recall@1"]["before"])
        return {
            "maps": maps,
            "share": blend["share"],
            "gain": 100 * blend["gain"],
            "seconds": seconds,
            "recall": recall,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", help="files of features, or 'features' and NAME:ROOT of a dataset")
    parser.add_argument("-o", "--out", type=Path, default=Path("blend.json"), help="where results are written")
    parser.add_argument("--splits", type=int, default=5, help="random halves")
    parser.add_argument("--draws", type=int, default=4, help="draws of few classes and of shuffled labels")
    parser.add_argument("--epochs", type=int, nargs="+", default=[10, 40])
    parser.add_argument("--device", default="cpu", help="where features are computed")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.files[0] == "features":
        write_features(options.files[1], options.out, options.device)
        return
    rows: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for file in map(Path, options.files):
        with np.load(file) as stored:
            arrays = stored["X"].astype(np.float32), stored["y"].astype(np.int64)
        for name, epochs, seed, part in cases(arrays, options):
            measured = measure(epochs, seed, part)
            rows.setdefault((file.stem, name), []).append(measured)
            print(file.stem, name, seed, json.dumps(measured), flush=True)
        options.out.write_text(
            json.dumps([{"data": key[0], "case": key[1], "runs": runs} for key, runs in rows.items()])
        )
    print(
        "\n| data | case | frozen | as trained (worst) | best in hindsight | chosen (worst) | nothing kept | seconds |"
    )
    print("|---|---|--:|--:|--:|--:|--:|--:|")
    for (data, case), runs in rows.items():
        maps = np.array([run["maps"] for run in runs])
        gains = maps - maps[:, :1]
        chosen = np.array([gain[SHARES.index(run["share"])] for gain, run in zip(gains, runs, strict=True)])
        nothing = sum(run["share"] == 0.0 for run in runs)
        print(
            f"| {data} | {case} | {maps[:, 0].mean():.1f} | {gains[:, -1].mean():+.2f} ({gains[:, -1].min():+.2f}) "
            f"| {gains.max(1).mean():+.2f} | {chosen.mean():+.2f} ({chosen.min():+.2f}) | {nothing} of {len(runs)} "
            f"| {np.mean([run['seconds'] for run in runs]):.0f} |"
        )


if __name__ == "__main__":
    main()
