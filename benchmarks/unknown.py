"""How many strangers a search says to know: images whose class the index does not have, by threshold.

    python benchmarks/blend.py features cub:CUB_200_2011/ -o cub.npz      # of the training classes of a dataset
    python benchmarks/unknown.py cub.npz cars.npz                         # the table of docs/examples/verification.md
    python benchmarks/unknown.py cub.npz --head                           # thresholds of classes that were learned

The classes of a file are split at random into two halves. Thresholds are chosen on one of them. The index has some
images of half of the other classes; their other images are the known queries, and the other classes the strangers. A
stranger that matches anything is an error; a known query is found if its nearest item is of its class and matches.
With --head, a head is trained on two thirds of the first half, and measured with thresholds of these classes, and of
the others, which it has not seen.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from blend import RECIPE
from numpy.typing import NDArray
from torch import Tensor

import nearfar as nf
from nearfar.training.recipe.files import load

SHARES = (0.05, 0.1)


class Searches(NamedTuple):
    """The nearest item of each query."""

    items: int
    strangers: Tensor  # scores
    known: Tensor  # scores
    right: Tensor  # whether it is of the class of the known query


def search(points: Tensor, labels: NDArray[np.int64], items: int, rng: np.random.Generator) -> Searches:
    """Search an index of half of the classes for the other images of these classes, and for all of the others."""
    classes = rng.permutation(np.unique(labels))
    inside = np.flatnonzero(np.isin(labels, classes[: len(classes) // 2]))
    order = rng.permutation(inside)
    chosen = order[: min(items, len(order) // 2)]
    queries = np.setdiff1d(inside, chosen)
    queries = queries[np.isin(labels[queries], labels[chosen])]
    unit = torch.nn.functional.normalize(points.double(), dim=1)
    scores, nearest = (unit @ unit[chosen].T).max(dim=1)
    right = torch.from_numpy(labels[chosen])[nearest] == torch.from_numpy(labels)
    strangers = np.setdiff1d(np.arange(len(labels)), inside)
    return Searches(len(chosen), scores[strangers], scores[queries], right[queries])


def thresholds(points: Tensor, labels: NDArray[np.int64], items: int) -> dict[str, float]:
    """Choose the thresholds that are compared."""
    rows = {"`f1`": nf.metrics.calibrate(points, labels).similarity}
    rows["`0.001`"] = nf.metrics.calibrate(points, labels, criterion=0.001).similarity
    for share in SHARES:
        name = f"{1 - share:.0%} of strangers are none".replace("%", " %")
        rows[name] = nf.metrics.calibrate_search(points, labels, items=items, unknown=share).similarity
    return {**rows, "(no threshold)": -2.0}


def train_head(points: NDArray[np.float32], labels: NDArray[np.int64], split: NDArray[np.str_], seed: int) -> Tensor:
    """Train the head of ``nearfar init`` on some classes and return all embeddings."""
    with tempfile.TemporaryDirectory() as folder:
        recipe = load(RECIPE, overrides={"training.seed": seed, "selection.blend": 1.0, "evaluation.before": False})
        model = nf.load(nf.train(recipe, f"{folder}/run", data=(points, labels, split)).folder)
        with torch.no_grad():
            embeddings: Tensor = model(torch.from_numpy(points))
        return embeddings


def measure(
    points: NDArray[np.float32], labels: NDArray[np.int64], seed: int, options: argparse.Namespace
) -> dict[str, tuple[float, float]]:
    """Return the share of strangers that match and of known queries that are found, by threshold."""
    rng = np.random.default_rng(seed)
    classes = rng.permutation(np.unique(labels))
    first, learned = classes[: len(classes) // 2], classes[: len(classes) // 3]
    embeddings = torch.from_numpy(points)
    parts = {"": np.isin(labels, first)}
    if options.head:
        parts = {
            ", learned classes": np.isin(labels, learned),
            ", others": np.isin(labels, np.setdiff1d(first, learned)),
        }
        embeddings = train_head(points, labels, np.where(np.isin(labels, learned), "train", "test"), seed)
    tested = ~np.isin(labels, first)
    results = search(embeddings[tested], labels[tested], options.items, rng)
    rows = {}
    for part, chosen in parts.items():
        for name, lowest in thresholds(embeddings[chosen], labels[chosen], results.items).items():
            accepted = float((results.strangers >= lowest).double().mean())
            found = float(((results.known >= lowest) & results.right).double().mean())
            rows[name + part] = (100 * accepted, 100 * found)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, help="files of features: X and y, as blend.py writes them")
    parser.add_argument("--items", type=int, default=232, help="items of the index, at most")
    parser.add_argument("--splits", type=int, default=5, help="random halves")
    parser.add_argument("--head", action="store_true", help="train a head, and compare what thresholds are chosen on")
    options = parser.parse_args()
    torch.set_num_threads(1)
    columns: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for file in options.files:
        with np.load(file) as stored:
            points, labels = stored["X"].astype(np.float32), stored["y"].astype(np.int64)
        for seed in range(options.splits):
            for name, row in measure(points, labels, seed, options).items():
                columns.setdefault(file.stem, {}).setdefault(name, []).append(row)
    print(f"strangers that match, % (least – most of {options.splits} splits) / known queries that are found, %\n")
    print(f"| threshold | {' | '.join(columns)} |")
    print(f"|---|{'--:|' * len(columns)}")
    for name in next(iter(columns.values())):
        cells = []
        for column in columns.values():
            accepted, found = np.array(column[name]).T
            cells.append(f"{accepted.mean():.1f} ({accepted.min():.1f} – {accepted.max():.1f}) / {found.mean():.1f}")
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
