"""Entry points: train a recipe, resume a run, load the model of a run."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nearfar.data.datasets.arrays import FILES, as_dataset, is_huggingface, save_dataset
from nearfar.networks import Embedder, Ensemble
from nearfar.training.recipe.files import NAME, Overrides, load
from nearfar.training.recipe.schema import Recipe
from nearfar.utils.folders import claim, keep_apart, remove
from nearfar.utils.validation import nearest

if TYPE_CHECKING:
    from nearfar.data import Dataset
    from nearfar.training.run.console import Display
    from nearfar.training.run.loggers import Logger
    from nearfar.training.run.reader import Run

RUNS = Path("runs")


def train(
    recipe: str | Path | Mapping[str, Any] | Recipe | None = None,
    out: str | Path | None = None,
    resume: str | Path | None = None,
    *,
    data: Any = None,
    loggers: Sequence[str | Logger] = (),
    **overrides: Any,
) -> Run:
    """Train a recipe and write a run folder.

    Args:
        recipe: A TOML file, its content as a mapping, or a ``Recipe``; optional when a run is resumed.
        out: The run folder to create; by default runs/ and the name of the recipe.
        resume: A run folder to resume.
        data: (X, y) or (X, y, split) in place of the recipe's dataset: arrays, tensors, DataFrames, lists of Pillow
            images or of paths, see ``nearfar.data.from_arrays``; or a dataset of Hugging Face. It is written to the run
            folder, so that the run can be resumed and evaluated. A table is an override like those of other sections.
        loggers: "tensorboard", "mlflow", "wandb", or objects with ``log(step, values)`` and ``close()``, which receive
            what log.jsonl does.
        overrides: Settings by section: ``train("recipe.toml", loss={"alpha": 32}, training={"epochs": 3})``.

    Returns:
        The run: its folder and metrics, and what comparisons and reports read.

    Example:
        >>> import tempfile
        >>> settings = {
        ...     "data": {"name": "digits", "settings": {"vectors": True}},
        ...     "sampler": {"classes": 5, "per_class": 8, "steps": 2},
        ...     "network": {"name": "linear", "dim": 8},
        ...     "loss": {"name": "multi_similarity"},
        ...     "optimizer": {"lr": 0.01},
        ...     "training": {"epochs": 1, "device": "cpu"},
        ... }
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     run = train(settings, f"{folder}/run", loss={"alpha": 3.0})
        >>> sorted(run.metrics)[:1], run.folder.name
        (['epoch'], 'run')
    """
    if isinstance(data, Mapping) and not is_huggingface(data):
        overrides, data = {**overrides, "data": data}, None
    return start(recipe, out=out, resume=resume, data=data, loggers=loggers, overrides=overrides)


def start(
    recipe: str | Path | Mapping[str, Any] | Recipe | None = None,
    *,
    out: str | Path | None = None,
    resume: str | Path | None = None,
    data: Any = None,
    overrides: Overrides = (),
    display: Display | None = None,
    loggers: Sequence[str | Logger] = (),
    cache: str | Path | None = None,
) -> Run:
    """Train a recipe, as ``train`` does, with all options."""
    from nearfar import distributed
    from nearfar.training.loop.trainer import Trainer

    if resume is not None and out is not None:
        raise ValueError(f"out is {str(out)!r} and resume {str(resume)!r}; a run is resumed in its own folder")
    if resume is not None and data is not None:
        raise ValueError(f"data and resume {str(resume)!r} are given; a run is resumed with the data in its folder")
    if recipe is None:
        if resume is None:
            raise ValueError("recipe is missing; a recipe, or a run to resume, is needed")
        recipe = resume
        if not (Path(resume) / NAME).is_file():
            raise FileNotFoundError(f"{resume} holds no run to resume: there is no {NAME}")
    found = load(recipe, overrides=overrides)
    dataset = None
    if data is not None:
        dataset = as_dataset(data)
        found = load(found, overrides={"data.name": dataset.name})
    world = distributed.init_world(found.training.device)
    with ExitStack() as stack:
        stack.callback(world.close)
        for logger in loggers if world.is_main else ():
            if not isinstance(logger, str):  # names are opened and closed by the trainer
                stack.callback(logger.close)
        folder = resume if resume is not None else out
        if not folder and world.is_main:
            folder = free_folder(recipe, found)
            stack.callback(_remove_empty, folder)
        folder = Path(world.share(str(folder)))
        if resume is None:
            keep_apart(folder, [recipe, found.data.root if dataset is None else None])
        if dataset is not None:
            section = _save_data(dataset, folder, stack) if world.is_main else None
            found = load(found, overrides={"data": world.share(section)})
        trainer = Trainer(
            found,
            folder,
            resume=resume is not None,
            loggers=loggers,
            display=display,
            world=world,
            cache=cache,
        )
        return trainer.run()


def open_model(where: str | Path, *, download: bool = False) -> Embedder | Ensemble:
    """Load the network of a run: that of the selected epoch, or the last one if there are no validation classes.

    Args:
        where: A run folder, or a folder or file that ``nearfar.networks.weights.save`` wrote; or the name
            of a network with published weights, such as "efficientnet_lite0" or "timm:resnet50".
        download: Allow to download the weights of a network that is given by name.
    """
    from nearfar.networks import registry
    from nearfar.networks.weights import save
    from nearfar.training.run.folder import RunFolder

    run = RunFolder(where)
    if run.recipe.is_file() and not run.model.is_file():
        why = "was deleted" if run.metrics.is_file() else "has not been saved yet"
        raise FileNotFoundError(f"{run.folder} has no network: {run.model.name} {why}")
    if len(Path(where).parts) == 1 and not Path(where).exists() and not save.is_network(where):
        raise FileNotFoundError(
            f"{where} does not exist{nearest(str(where), registry.names())}; needed is a folder with {save.NAME} and "
            "model.json, or the name of a network (nearfar weights list)"
        )
    return save.load(where, download=download)


def free_folder(recipe: str | Path | Mapping[str, Any] | Recipe, found: Recipe, runs: Path = RUNS) -> Path:
    """Create a new run folder, named after the file of a recipe, or else after dataset and loss."""
    from nearfar.training.run.folder import RunError

    name = f"{found.data.name}-{found.loss.name}"
    if isinstance(recipe, (str, Path)) and not Path(recipe).is_dir():
        file = Path(recipe)
        parts = (file.parent.name, file.stem) if file.suffix else file.parts
        name = "-".join(part for part in parts if part not in ("", "..")).removeprefix("recipes-")
    name = re.sub(r"[^\w.-]+", "-", name).strip("-")
    try:
        runs.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise RunError(f"{runs} cannot hold run folders: a file is in its place") from None
    for number in count(1):
        folder = runs / (name if number == 1 else f"{name}-{number}")
        with suppress(FileExistsError):
            folder.mkdir()  # fails if another process has created it
            break
    return folder


def _save_data(dataset: Dataset, folder: Path, stack: ExitStack) -> dict[str, Any]:
    """Write a dataset to a run folder; it is removed again if no run begins there."""
    if (folder / NAME).is_file():
        raise FileExistsError(f"out is {str(folder)!r}, which holds a run already; name a new folder")
    claim(folder, "run")
    new = [name for name in FILES if not (folder / name).exists()]

    def clean() -> None:
        if not (folder / NAME).is_file():
            remove(folder, new)

    stack.callback(clean)
    return save_dataset(dataset, folder)


def _remove_empty(folder: Path) -> None:
    with suppress(OSError):  # the folder is not empty
        folder.rmdir()
