"""Demo: train on generated characters and retrieve others that no network has seen.

The characters are those of the dataset "glyphs": 400 lines through six points, in groups of four that differ in one
corner, drawn light on dark or dark on light, turned, resized, shifted and noisy. Half of them are for training. As in
any training there is a recipe and a run folder for each loss, and the test classes are evaluated once, at the end. All
losses share one recipe. It was chosen on characters of another seed.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from nearfar import data, losses, metrics
from nearfar.metrics.intervals import Interval
from nearfar.utils.formatting import percent
from nearfar.utils.progress import Display, Watch, bars

if TYPE_CHECKING:
    from nearfar.data import Dataset
    from nearfar.training.recipe.schema import Recipe

KS = (1, 2, 4, 8)
CHARACTERS = {"classes": 400, "per_class": 20, "side": 64, "difference": 0.2}
DIMENSIONS = 64
SIDE = 28  # of what the network sees of them
EPOCHS, STEPS = 2, 150
INDEX = "characters.index"


@dataclass(frozen=True)
class DemoResult:
    """Retrieval of the unseen characters with one embedding."""

    name: str  # name of the loss or of the baseline
    dimensions: int  # dimension of the embedding
    scores: Mapping[str, float]  # metrics on the unseen characters
    interval: Interval  # confidence interval (95 %) of recall@1 over classes
    seconds: float | None = None  # training time; None for a baseline
    folder: Path | None = None  # run folder; None for a baseline


def recipe(loss: str, *, epochs: int = EPOCHS, seed: int = 0) -> Recipe:
    """Return the recipe of the demo; only the loss differs between recipes."""
    from nearfar.training import load_recipe

    losses.get(loss)  # raises an error that lists the available losses
    return load_recipe(
        {
            "data": {"name": "glyphs", "settings": dict(CHARACTERS)},
            "sampler": {"name": "groups", "classes": 16, "per_class": 4, "steps": STEPS},
            # A mirrored character would be another one.
            "augmentation": {"crop": "random_resized", "scale": [0.6, 1.0], "size": SIDE, "flip": False},
            "network": {"name": "small_cnn", "dim": DIMENSIONS},
            "loss": {"name": loss},
            "optimizer": {"name": "adamw", "lr": 3e-3, "weight_decay": 1e-4},
            "schedule": {"name": "cosine", "per": "iteration"},
            "training": {"epochs": epochs, "seed": seed, "device": "cpu"},
            "evaluation": {"every": 0, "ks": list(KS), "crop": "none"},
        }
    )


def baselines(characters: Dataset, *, seed: int = 0) -> Iterator[DemoResult]:
    """Yield results without training: raw pixels, PCA of the training characters, and the untrained network.

    Raw pixels and PCA see what the network sees: images of 28 × 28 pixels.
    """
    from sklearn.decomposition import PCA

    from nearfar import networks
    from nearfar.data import Loader, View
    from nearfar.data.store.prepare import prepare

    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        network = networks.create("small_cnn", size=SIDE, dim=DIMENSIONS).eval()
    view = View(size=SIDE, crop="none", flip=False)
    loader = Loader(prepare(characters), characters.labels, view=view, normalization=network.normalization)
    batches = list(loader.all())
    pixels = torch.cat([batch.images.flatten(1) for batch in batches]).numpy()
    seen, unseen = (characters.parts[part] for part in ("train", "test"))
    labels = characters.labels[unseen]
    yield _result("raw pixels", pixels[unseen], labels)
    pca = PCA(DIMENSIONS, svd_solver="randomized", random_state=0).fit(pixels[seen])
    yield _result("PCA", pca.transform(pixels[unseen]), labels)
    with torch.no_grad():
        embedded = torch.cat([network(batch.images) for batch in batches])
    yield _result("untrained network", embedded[unseen.tolist()], labels)


def train(
    loss: str, folder: Path, *, epochs: int = EPOCHS, seed: int = 0, watch: Watch = lambda work: None
) -> DemoResult:
    """Train with a loss and evaluate the unseen characters."""
    from nearfar.training.evaluation.evaluate import model_embeddings
    from nearfar.training.trainer import train as train_recipe

    progress = watch(loss)

    class Steps(Display):
        def show(self, work: str, done: int, total: int | None, text: str) -> None:
            if progress is not None and total is not None:
                progress(done, total)

    ran = train_recipe(recipe(loss, epochs=epochs, seed=seed), out=folder, display=Steps())
    tested = model_embeddings(folder)
    result = _result(loss, tested.embeddings, tested.labels)
    return replace(result, seconds=float(ran.metrics["seconds"]), folder=folder)


def ranked(results: Sequence[DemoResult]) -> list[DemoResult]:
    """Return results sorted by recall@1 and then MAP@R, best first."""
    return sorted(results, key=lambda result: (-result.scores["recall@1"], -result.scores["map@r"]))


def index(characters: Dataset, folder: Path, out: Path, *, watch: Watch = lambda work: None) -> int:
    """Build an index of the unseen characters and return their number."""
    from nearfar.search import Index
    from nearfar.search.images import dataset_images
    from nearfar.training.trainer import open_model

    unseen = dataset_images(characters, "test")
    with Index.build(open_model(folder), unseen, out=out, device="cpu", watch=watch) as made:
        return len(made)


@contextmanager
def one_thread() -> Iterator[None]:
    """Use one thread: the matrices of small networks are too small for more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _result(name: str, embeddings: Any, labels: Any) -> DemoResult:
    scores = metrics.retrieval(embeddings, labels, ks=KS, per_query=True)
    interval = metrics.class_intervals({"recall@1": scores.pop("per_query")["recall@1"]}, labels)["recall@1"]
    return DemoResult(name, embeddings.shape[1], scores, interval)


# --- on the terminal -----------------------------------------------------------------------------------------


def show(keys: Sequence[str], out: Path | None = None, *, epochs: int = EPOCHS, seed: int = 0) -> None:
    """Run the demo and print a ranking, the path of a page and how to search an index."""
    from rich.console import Console

    from nearfar.reports.run_report import report
    from nearfar.training.trainer import free_folder

    if out is not None and out.exists() and any(out.iterdir()):
        raise FileExistsError(f"out is {str(out)!r}, which is not empty; choose a new folder")
    if not keys:
        raise ValueError(f"losses is empty; allowed are {', '.join(losses.names())}")
    recipes = [recipe(key, epochs=epochs, seed=seed) for key in keys]  # raises errors before anything is trained
    out = free_folder("demo", recipes[0]) if out is None else out
    console = Console(highlight=False, soft_wrap=True)
    results: list[DemoResult] = []

    def add(result: DemoResult) -> None:
        results.append(result)
        after = "" if result.seconds is None else f" after {result.seconds:.1f} s"
        console.print(f"  {result.name}: recall@1 {percent(result.scores['recall@1'])}{after}")

    characters = data.open("glyphs", **CHARACTERS)
    half = characters.num_classes // 2
    console.print(f"Training on {half} characters and retrieving {half} others, which no network has seen.")
    with one_thread():
        for result in baselines(characters, seed=seed):
            add(result)
        for key in dict.fromkeys(keys):
            with bars() as watch:
                result = train(key, out / key, epochs=epochs, seed=seed, watch=watch)
            add(result)
        best = next(result for result in ranked(results) if result.folder is not None)
        assert best.folder is not None
        with bars() as watch:
            page = report(best.folder, watch=watch)
            count = index(characters, best.folder, out / INDEX, watch=watch)
    console.print(_table(ranked(results)))
    console.print(
        f"{count} queries; nearest neighbor by cosine similarity.",
        f"Intervals of 95 % are over {best.interval.classes} classes, and do not cover other trainings.",
        "PCA and networks were fitted to the training characters only, and all losses share one recipe.",
        "",
        f"Report of the best trained model, {best.name}: {page}",
        f"Settings, metrics and model of every run are in {out}/",
        "",
        "Search the unseen characters in a browser:",
        f"  {program()} serve {out / INDEX} --open",
        "Build an index of your own images with any run:",
        f"  {program()} index build {best.folder} photos/ -o my.index",
        sep="\n",
        markup=False,
    )


def program() -> str:
    """Return how to call this program again: by its name, or by its path if it is not on the shell's PATH."""
    here = Path(sys.argv[0])
    return str(here) if here.name == "nearfar" and shutil.which("nearfar") is None else "nearfar"


def _table(results: Sequence[DemoResult]) -> Any:
    from rich.table import Table

    table = Table(title="\nRetrieval of unseen characters, %", title_justify="left", box=None, padding=(0, 2, 0, 0))
    for head in ("", "embedding", "dims", "R@1", "95 %", *(f"R@{k}" for k in KS[1:]), "MAP@R", "seconds"):
        table.add_column(head, justify="left" if head == "embedding" else "right", no_wrap=True)
    share = partial(percent, unit=False)
    for place, result in enumerate(results, start=1):
        recalls = [share(result.scores[f"recall@{k}"]) for k in KS]
        recalls.insert(1, f"{share(result.interval.low)}–{share(result.interval.high)}")
        seconds = "" if result.seconds is None else f"{result.seconds:.1f}"
        table.add_row(str(place), result.name, str(result.dimensions), *recalls, share(result.scores["map@r"]), seconds)
    return table
