"""A small honest experiment: learn from the handwritten digits 0 to 4, retrieve the digits 5 to 9.

Five classes say little about digits in general, so every digit is also turned by quarters and mirrored,
and each of the eight views is a class of its own: 40 classes. Network, noise and batches were chosen with the
training digits alone, by learning three of them and looking for the other two; the remaining settings are first
guesses. No learned embedding was judged on the unseen digits before its settings were fixed. The size of the
embedding was decided knowing what pixels and PCA reach there.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from nearfar import losses, metrics

KS = (1, 2, 4, 8)
TRAINED = (0, 1, 2, 3, 4)
DIMENSIONS = 16
HIDDEN = 512
CLASSES_PER_BATCH, IMAGES_PER_CLASS = 10, 6
LEARNING_RATE = 1e-3
NOISE = 0.3
TURN, ZOOM, SHIFT = 0.2, 0.1, 0.25  # radians, share of the size, half widths of the image

Watch = Callable[[str, int], None]


class Digits(NamedTuple):
    """Images [n, 1, 8, 8] between 0 and 1, and their labels [n]."""

    images: Tensor
    labels: Tensor


class Result(NamedTuple):
    """What one way of embedding the unseen digits is worth."""

    name: str
    dimensions: int
    recall: dict[str, float]
    seconds: float | None  # of training


def load() -> tuple[Digits, Digits]:
    """scikit-learn's digits: those to learn from, and those to look for."""
    from sklearn.datasets import load_digits

    pixels, targets = load_digits(return_X_y=True)
    images = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    labels = torch.tensor(targets, dtype=torch.long)
    seen = torch.isin(labels, torch.tensor(TRAINED))
    return Digits(images[seen], labels[seen]), Digits(images[~seen], labels[~seen])


def run(
    keys: Sequence[str], *, steps: int = 400, seed: int = 0, watch: Watch = lambda key, step: None
) -> Iterator[Result]:
    """Recall on the unseen digits: raw pixels, PCA, and an embedding learned with each loss.

    ``watch(key, step)`` is called after each training step.
    """
    if not keys:
        raise ValueError(f"losses is empty; allowed are {', '.join(losses.names())}")
    if steps < 1:
        raise ValueError(f"steps is {steps}; it must be ≥ 1")
    if not 0 <= seed < 2**63:
        raise ValueError(f"seed is {seed}; it must be ≥ 0 and below 2^63")
    # A bad key should show before anything is trained.
    return _results({key: _settings(key) for key in keys}, steps, seed, watch)


def _results(prepared: dict[str, dict[str, Any]], steps: int, seed: int, watch: Watch) -> Iterator[Result]:
    seen, unseen = load()
    pixels = unseen.images.flatten(1)
    yield Result("raw pixels", pixels.shape[1], _recall(pixels, unseen.labels), None)
    projected = _pca(seen.images.flatten(1), pixels)
    yield Result("PCA", DIMENSIONS, _recall(projected, unseen.labels), None)
    for key, settings in prepared.items():
        start = time.perf_counter()
        with _reproducible(seed):
            network = train(losses.create(key, **settings), seen, steps=steps, watch=watch)
            seconds = time.perf_counter() - start
            with torch.no_grad():
                embeddings = network(unseen.images)
        yield Result(key, DIMENSIONS, _recall(embeddings, unseen.labels), seconds)


def train(loss: losses.Loss, digits: Digits, *, steps: int, watch: Watch = lambda key, step: None) -> nn.Module:
    """A small network that has learned the digits with this loss."""
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, DIMENSIONS))
    groups = [{"params": network.parameters(), "lr": LEARNING_RATE}, *loss.param_groups(LEARNING_RATE)]
    optimizer = torch.optim.Adam(groups)
    # Full speed for the first half, then down to zero.
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, 2 - 2 * step / steps))
    classes = views(digits)
    for step in range(1, steps + 1):
        images, labels = _batch(classes)
        value = loss(network(images), labels)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        schedule.step()
        watch(loss.key, step)
    return network


def _recall(embeddings: Tensor, labels: Tensor) -> dict[str, float]:
    found = metrics.retrieval(embeddings, labels, ks=KS)
    return {f"recall@{k}": found[f"recall@{k}"] for k in KS}


def views(digits: Digits) -> list[Tensor]:
    """The images of each digit, upright, turned and mirrored: eight classes for each, [n, 1, 8, 8]."""
    upright = [digits.images[digits.labels == digit] for digit in sorted(set(digits.labels.tolist()))]
    turned = [images.rot90(quarters, (-2, -1)) for images in upright for quarters in range(4)]
    return turned + [images.flip(-1) for images in turned]


def _batch(classes: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """A few images of each of a few classes, wiggled."""
    chosen = torch.randperm(len(classes))[:CLASSES_PER_BATCH]
    images = [classes[number][torch.randperm(len(classes[number]))[:IMAGES_PER_CLASS]] for number in chosen]
    return _wiggle(torch.cat(images)), chosen.repeat_interleave(IMAGES_PER_CLASS)


def _wiggle(images: Tensor) -> Tensor:
    """Turned, zoomed and shifted a little, with noise on top."""
    count = len(images)
    angle, zoom = TURN * _spread(count), 1 + ZOOM * _spread(count)
    cosine, sine = zoom * angle.cos(), zoom * angle.sin()
    shift = SHIFT * _spread(count, 2)
    first = torch.stack([cosine, -sine, shift[:, 0]], dim=1)
    second = torch.stack([sine, cosine, shift[:, 1]], dim=1)
    grid = functional.affine_grid(torch.stack([first, second], dim=1), list(images.shape), align_corners=False)
    return functional.grid_sample(images, grid, align_corners=False) + NOISE * torch.randn_like(images)


def _spread(*shape: int) -> Tensor:
    """Random numbers from −1 to 1."""
    return 2 * torch.rand(shape) - 1


def _pca(seen: Tensor, unseen: Tensor) -> Tensor:
    """The unseen pixels along the main directions of the seen ones."""
    from sklearn.decomposition import PCA

    fitted = PCA(DIMENSIONS, svd_solver="full").fit(seen.numpy())
    return torch.from_numpy(fitted.transform(unseen.numpy()))


def _settings(key: str) -> dict[str, Any]:
    """What a loss must be told besides its defaults."""
    known = {"num_classes": 8 * len(TRAINED), "dim": DIMENSIONS}
    required = [name for name, value in losses.defaults(key).items() if value is inspect.Parameter.empty]
    return {name: known[name] for name in required if name in known}


@contextmanager
def _reproducible(seed: int) -> Iterator[None]:
    """The same numbers every time, and one thread: the matrices are too small to share."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            yield
    finally:
        torch.set_num_threads(threads)


def show(keys: Sequence[str], *, steps: int, seed: int) -> None:
    """Run and print: a progress bar on a terminal, plain lines elsewhere, then the table."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.table import Table

    console = Console(highlight=False)
    columns = (TextColumn("{task.description:<28}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    progress = Progress(*columns, console=console, disable=not console.is_terminal, transient=True)
    bar = progress.add_task("pixels, PCA", total=steps)

    def watch(key: str, step: int) -> None:
        progress.update(bar, description=key, completed=step)

    results = run(keys, steps=steps, seed=seed, watch=watch)
    console.print("Learning from the digits 0–4, looking for the unseen digits 5–9.")
    table = Table(title="Recall on digits never seen in training, %", title_justify="left")
    table.add_column("embedding", no_wrap=True)
    table.add_column("numbers", justify="right")
    for k in KS:
        table.add_column(f"R@{k}", justify="right")
    table.add_column("seconds", justify="right")
    with progress:
        for result in results:
            recalls = [f"{100 * value:.1f}" for value in result.recall.values()]
            seconds = "" if result.seconds is None else f"{result.seconds:.1f}"
            table.add_row(result.name, str(result.dimensions), *recalls, seconds)
            if not console.is_terminal:
                print(
                    f"{result.name}: recall@1 {recalls[0]} %" + (f" after {seconds} s" if seconds else ""), flush=True
                )
    console.print(table)
    console.print(
        "PCA and the networks saw the digits 0–4 only; nearest by cosine similarity, the query itself left out."
    )
