"""Training: from a recipe to a run folder with metrics, however often it is interrupted and resumed."""

from __future__ import annotations

import os
import random
import re
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import asdict
from itertools import count
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from nearfar.data.datasets.arrays import FILES, as_dataset, is_huggingface, save_dataset
from nearfar.data.store.store import Store
from nearfar.distributed import World, init_world
from nearfar.networks import Embedder, Ensemble, registry
from nearfar.networks.weights import save as saving
from nearfar.training import checkpoint, verdict
from nearfar.training.blend import Blend, blend, trained_weights
from nearfar.training.checkpoint import State
from nearfar.training.evaluation import embeddings
from nearfar.training.evaluation.embeddings import EmbeddingSet, PerQuery
from nearfar.training.final import find_run, of_all_classes
from nearfar.training.recipe.files import NAME, load, to_dict, to_toml
from nearfar.training.recipe.schema import Recipe
from nearfar.training.run import loggers as logging
from nearfar.training.run import provenance
from nearfar.training.run.folder import Log, RunError, RunFolder, finite
from nearfar.training.run.loggers import Logger, StopTraining, numbers
from nearfar.training.run.reader import Run, read_json
from nearfar.training.setup import Setup, build, on_features, untrained
from nearfar.training.step import StepLog, StepSummary, kernels
from nearfar.utils.atomic import read_tensors, write_json, write_tensors, write_text
from nearfar.utils.folders import claim, keep_apart, remove
from nearfar.utils.formatting import command, duration
from nearfar.utils.progress import Display
from nearfar.utils.validation import few, nearest

if TYPE_CHECKING:
    from nearfar.data import Dataset

RUNS = Path("runs")
SIGNALS = (signal.SIGINT, signal.SIGTERM)
MAX_SAVING = 0.05  # share of the time for checkpoints; with short epochs, not every epoch is saved
SHOWN = 3  # names of files in a line
STEPS_BETWEEN_VOTES = 10  # of several processes on whether to stop


class NonFiniteError(RuntimeError):
    """A loss, a gradient or an embedding was NaN or infinite, and the recipe says to stop then."""


class Stopped(SystemExit):
    """Raised after a run was stopped by a signal and saved; the process exits with 128 + the signal."""

    def __init__(self, number: int, message: str) -> None:
        super().__init__(128 + number)
        self.signal, self.message = number, message

    def __str__(self) -> str:
        return self.message


def train(
    recipe: str | Path | Mapping[str, Any] | Recipe | None = None,
    out: str | Path | None = None,
    resume: str | Path | None = None,
    *,
    data: Any = None,
    loggers: Sequence[str | Logger] = (),
    display: Display | None = None,
    cache: str | Path | None = None,
    final: bool = False,
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
        display: Shows the progress; nothing is shown by default.
        cache: Where decoded images are stored.
        final: Train on all classes, those of the test included, with what the last finished run of the recipe has
            chosen: the network to deploy. It cannot be tested itself; its manifest names that run. In place of the
            recipe, the folder of the run may be given.
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
    if resume is not None and out is not None:
        raise ValueError(f"out is {str(out)!r} and resume {str(resume)!r}; a run is resumed in its own folder")
    if resume is not None and data is not None:
        raise ValueError(f"data and resume {str(resume)!r} are given; a run is resumed with the data in its folder")
    if recipe is None and resume is None:
        raise ValueError("recipe is missing; a recipe, or a run to resume, is needed")
    if recipe is None and not (Path(str(resume)) / NAME).is_file():
        raise FileNotFoundError(f"{resume} holds no run to resume: there is no {NAME}")
    source = recipe if recipe is not None else Path(str(resume))
    recipe, dataset = load(source, overrides=overrides), None
    about: dict[str, Any] = {}
    if data is not None:
        dataset = as_dataset(data)
        recipe = load(recipe, overrides={"data.name": dataset.name})
    runs = RUNS
    if final and resume is None:
        tested = find_run(recipe, source, RUNS)
        recipe, about = of_all_classes(recipe, tested)
        source, runs = f"{tested.name}-final", tested.folder.parent
    world = init_world(recipe.training.device)
    with ExitStack() as stack:
        stack.callback(world.close)
        for logger in loggers if world.is_main else ():
            if not isinstance(logger, str):  # names are opened and closed by the trainer
                stack.callback(logger.close)
        place = resume or out
        if not place and world.is_main:
            place = free_folder(source, recipe, runs)
            stack.callback(remove, place, ())  # if nothing is in it
        folder = Path(world.share(str(place)))
        if resume is None:
            keep_apart(folder, [source, recipe.data.root if dataset is None else None])
        if dataset is not None:
            section = _save_data(dataset, folder, stack) if world.is_main else None
            recipe = load(recipe, overrides={"data": world.share(section)})
        settings: dict[str, Any] = {"loggers": loggers, "display": display, "world": world, "cache": cache}
        return Trainer(recipe, folder, resume=resume is not None, about=about, **settings).run()


def open_model(where: str | Path, *, download: bool = False) -> Embedder | Ensemble:
    """Load the network of a run: that of the selected epoch, or the last one if there are no validation classes.

    Args:
        where: A run folder, or a folder or file that ``nearfar.networks.weights.save`` wrote; or the name
            of a network with published weights, such as "efficientnet_lite0" or "timm:resnet50".
        download: Allow to download the weights of a network that is given by name.
    """
    run = RunFolder(where)
    if run.recipe.is_file() and not run.model.is_file():
        why = "was deleted" if run.metrics.is_file() else "has not been saved yet"
        raise FileNotFoundError(f"{run.folder} has no network: {run.model.name} {why}")
    if len(Path(where).parts) == 1 and not Path(where).exists() and not saving.is_network(where):
        raise FileNotFoundError(
            f"{where} does not exist{nearest(str(where), registry.names())}; needed is a folder with {saving.NAME} and "
            "model.json, or the name of a network (nearfar weights list)"
        )
    return saving.load(where, download=download)


class Trainer:
    """Trains a recipe into a run folder."""

    setup: Setup  # what was built from the recipe
    state: State  # how far the training is
    _blend: Blend  # how much of the training is kept

    def __init__(
        self,
        recipe: Recipe,
        folder: str | Path,
        *,
        resume: bool = False,
        loggers: Sequence[str | Logger] = (),
        display: Display | None = None,
        world: World | None = None,
        cache: str | Path | None = None,
        about: dict[str, Any] | None = None,
    ) -> None:
        self.recipe, self.folder, self.resume = recipe, RunFolder(folder), resume
        self.about = about or {}  # what else the manifest says
        self.world = world or World()
        self.loggers = tuple(loggers) if self.world.is_main else ()
        for logger in self.loggers:
            if isinstance(logger, str):
                logging.package(logger)
        self.display = display if display is not None and self.world.is_main else Display()
        self.cache = cache

    def run(self) -> Run:
        """Train to the end, or until a signal arrives: then ``Stopped`` is raised, and the run can be resumed."""
        with ExitStack() as stack:
            self.start(stack)
            signals = stack.enter_context(catch_signals())
            while not self.finished:
                self.train_epoch(signals)
                self.end_epoch()
                self.save(always=self.finished)
                self.stop_if_asked(signals)
            return self.conclude()

    # --- start -------------------------------------------------------------------------------------------------------

    def start(self, stack: ExitStack) -> None:
        """Build everything, begin the run folder, and restore the checkpoint of a run that is resumed."""
        recipe, world = self.recipe, self.world
        if world.is_main:
            self.folder.begin(recipe, resume=self.resume)
            if self.resume:
                stack.enter_context(self.folder.owned())
        stack.enter_context(kernels(deterministic=recipe.training.deterministic))
        self.setup, self.state = build(recipe, world=world, cache=self.cache, watch=self.display.watch), State()
        reset_peak_memory(self.setup.device)
        if recipe.network.freeze:
            self.setup = on_features(self.setup, self.display.watch)
        self.stage = self.setup.stages[0]
        self.step = self.setup.train_step(self.stage)
        began = world.share(self.resume and self.folder.manifest.exists())
        if not began:
            embeddings.try_out(self.setup)
        if world.is_main and not self.resume:
            stack.enter_context(self.folder.owned())
            self.folder.begin(recipe, resume=False)  # another process may have begun a run there
        if not began:
            self._write_manifest()
        if world.is_main and not self.resume:
            write_text(self.folder.recipe, to_toml(recipe))  # after the manifest: a folder with a recipe is a run
        self._before = trained_weights(self.setup.model) if recipe.selection.blend is not False else {}
        self._report_left_out()
        self._loggers: list[Logger] = []
        for logger in self.loggers:
            if isinstance(logger, str):
                logger = logging.create(logger, self.folder.folder, settings=to_dict(recipe))
                stack.callback(not_needed("closing a logger")(logger.close))
            self._loggers.append(logger)
        self.log = stack.enter_context(Log(self.folder.log if world.is_main else Path(os.devnull)))
        self.steps = StepLog(self.setup.device)
        self._embedded: dict[str, EmbeddingSet] = {}  # by the network as it is now
        self._per_query: PerQuery | None = None  # metrics of these embeddings
        self._last_save, self._save_seconds = time.monotonic(), 0.0  # the time and duration of the last checkpoint
        self._restore()

    def _write_manifest(self) -> None:
        """Write what the run is made from, and how the network does before the training if the recipe asks for it."""
        setup, before, is_main = self.setup, {}, self.world.is_main
        if self.recipe.evaluation.before and "test" in setup.measured:
            if is_main:
                provenance.record_look(self.folder, "before")
            network = untrained(setup)
            embedded = embeddings.embed_parts(network, ["test"])
            if is_main:
                measured, per_query = embeddings.measure_parts(network, embedded)
                before = {"before": measured["test"]}
                if per_query is not None:
                    write_tensors(self.folder.before, embeddings.query_metrics(network, embedded, per_query))
        if not is_main:
            return
        about = provenance.of(setup) | before | self.about
        shared = about["data"]["duplicates"] = provenance.duplicates_of(setup, self.display.watch)
        if shared:
            names = few(shared, SHOWN)
            self.display.say(f"test items that are in a training class as well: {names}; the manifest lists all")
        write_json(self.folder.manifest, finite(about))

    def _report_left_out(self) -> None:
        bad = self.setup.store.bad if isinstance(self.setup.store, Store) else ()
        if bad:
            names = few([file.name for file in bad], SHOWN)
            files = "1 file" if len(bad) == 1 else f"{len(bad):,} files"
            more = "; the manifest lists all of them" if len(bad) > SHOWN else ""
            self.display.say(f"skipped {files} that could not be decoded ({names}){more}")
        if guess := self.setup.dataset.guess:
            self.display.say(guess)
        notes = self.setup.dataset.left_out
        if notes:
            more = f"; the manifest lists all {len(notes):,} notes" if len(notes) > SHOWN else ""
            self.display.say(f"{self.setup.dataset.name}: {few(notes, SHOWN)}{more}")

    def _restore(self) -> None:
        """Seed the random generators, or restore the checkpoint."""
        seed, run, world = self.recipe.training.seed, self.folder, self.world
        random.seed(seed)
        np.random.seed(seed % 2**32)
        size = 0
        if self.resume:
            self.state, size = checkpoint.restore(self.setup, run)
        state = self.state
        if world.any(state.iteration != world.share(state.iteration)):
            raise RuntimeError(
                f"not all processes find the checkpoint in {run.folder}; all of them must be able to read it"
            )
        world.broadcast(self.setup.model, self.setup.losses)
        if world.is_main:
            self.log.cut(size)
            if self.resume:
                about = provenance.record_resume(read_json(run.manifest), self.recipe, state.iteration)
                write_json(run.manifest, about)
                if self.recipe.evaluation.before and "before" not in about:
                    self.display.say("evaluation.before has no effect: the network was not measured when the run began")
        self._began = time.monotonic() - state.seconds
        if state.iteration:
            self.display.say(f"resumed at step {state.iteration:,} of {self.setup.steps:,} in {run.folder}")

    # --- an epoch ----------------------------------------------------------------------------------------------------

    @property
    def finished(self) -> bool:
        """Whether the last epoch has ended, or too many evaluations have passed without improvement."""
        state, recipe = self.state, self.recipe
        if state.epoch >= self.setup.epochs:
            return True
        if recipe.selection.patience is None or state.best is None:
            return False
        waited = state.epoch - 1 - int(state.best["epoch"])
        return waited >= recipe.selection.patience * max(recipe.evaluation.every, 1)

    def train_epoch(self, signals: Sequence[int]) -> None:
        """Train to the end of the epoch; a resumed run continues within it."""
        setup, state = self.setup, self.state
        stage = setup.stage_at(state.epoch)
        if stage is not self.stage:
            self.stage, self.step = stage, setup.train_step(stage)
        setup.set_learning_rates(state)
        if state.iteration >= setup.steps:  # the checkpoint was saved after the last step
            return
        self.steps.restart()
        checkpoint_steps = self.recipe.training.checkpoint_steps
        with closing(setup.train_epoch(state, self.step)) as results:
            for result, images in results:
                self.report(self.steps.add(state.iteration - 1, result, images))
                if state.iteration >= setup.steps or state.step >= setup.steps_per_epoch:
                    break
                if checkpoint_steps and state.iteration % checkpoint_steps == 0:
                    self.report(self.steps.flush())
                    self.save(always=True)
                    self.steps.restart()
                if self.world.ranks == 1 or state.iteration % STEPS_BETWEEN_VOTES == 0:
                    self.stop_if_asked(signals)
        self.report(self.steps.flush())

    def end_epoch(self) -> None:
        """Evaluate what is due, keep the best network, and count the epoch."""
        setup, state = self.setup, self.state
        self.world.broadcast(setup.model)  # each process has its own statistics of batch norms
        last = state.epoch + 1 >= setup.epochs
        if last:
            self.save(always=True)  # nothing that fails from here on costs a step
        due = embeddings.due_parts(setup, state.epoch + 1, last=last)
        self._embedded, self._per_query = {}, None
        value = self._evaluate(due) if due else None
        embeddings.update_learned(setup)
        state.end_epoch(self.recipe.schedule, value)

    def _evaluate(self, due: Sequence[str]) -> float | None:
        """Measure the network, log the metrics, and return the validation metric that selects the epoch, if any."""
        state, failure = self.state, None
        try:
            self._embedded = self._embed(due)
            if self.world.is_main:
                if not all(embedded.is_finite() for embedded in self._embedded.values()):
                    skipped = f", and {state.skipped:,} steps were skipped before" if state.skipped else ""
                    raise NonFiniteError(
                        f"after step {state.iteration:,} the embeddings are NaN or infinite{skipped}; "
                        "a smaller learning rate, or training.clip, may help"
                    )
                state.metrics, self._per_query = embeddings.measure_parts(self.setup, self._embedded)
        except BaseException as error:
            failure = error
        if self.world.any(failure is not None):  # all processes leave together, and may save a checkpoint
            raise failure or RuntimeError("the evaluation failed in another process")
        state.metrics = self.world.share(state.metrics)
        self._log({"metrics": state.metrics})
        self.display.say(f"epoch {state.epoch + 1}/{self.setup.epochs}  {main_metrics(state.metrics)}")
        value = state.metrics.get("validation", {}).get(self.recipe.selection.metric)
        if value is None or self._before:
            return None if value is None else float(value)
        if state.best is None or value > state.best["value"]:
            if self.world.is_main:
                self._save_network()
            state.best = {"epoch": state.epoch, "value": value}
        return float(value)

    def _embed(self, names: Sequence[str]) -> dict[str, EmbeddingSet]:
        """Compute embeddings, and count the looks at the test classes; only the main process keeps them."""
        embedded = embeddings.embed_parts(self.setup, names)
        if not self.world.is_main:
            return {}
        if "test" in embedded:
            provenance.record_look(self.folder, "train", step=self.state.iteration, epoch=self.state.epoch)
        return embedded

    # --- report ------------------------------------------------------------------------------------------------------

    def report(self, summaries: Sequence[StepSummary]) -> None:
        """Log and show the steps whose results have arrived from the device."""
        state, setup = self.state, self.setup
        for summary in summaries:
            if summary.nonfinite:
                self._handle_nonfinite(summary)
            done = summary.first + len(summary.losses)
            images_s = summary.images * self.world.ranks / max(summary.seconds, 1e-9)
            line = {"loss": summary.loss, "lr": setup.learning_rates(), "images_s": round(images_s, 1)}
            self._log(line | ({"skipped": state.skipped} if state.skipped else {}), step=done)
            words = [f"epoch {summary.first // setup.steps_per_epoch + 1}/{setup.epochs}"]
            words.append(f"step {done:,}/{setup.steps:,}")
            words.append(f"loss {'–' if summary.loss is None else format(summary.loss, '.4f')}")
            words.append(f"{images_s:,.0f} images/s")
            if (seconds := self.steps.seconds_per_step()) is not None:
                words.append(f"{duration((setup.steps - done) * seconds)} left")
            if state.skipped:
                words.append(f"{state.skipped} skipped")
            with not_needed("showing the progress"):
                self.display.show("training", done, setup.steps, "  ".join([*words, main_metrics(state.metrics)]))

    def _handle_nonfinite(self, summary: StepSummary) -> None:
        """Count skipped steps, or write the batch to a file and stop."""
        if self.recipe.training.on_nonfinite == "skip":
            self.state.skipped += len(summary.nonfinite)
            return
        iteration = summary.nonfinite[0]
        contents = {**self.setup.batch_contents(iteration), "loss": summary.losses[iteration - summary.first]}
        file, folder = self.folder.nonfinite, self.folder.folder
        if self.world.ranks > 1:
            file = file.with_stem(f"{file.stem}.{self.world.rank}")
        write_json(file, finite(contents))
        saved = self.folder.checkpoint.is_file()
        kept = "The checkpoint before it is kept" if saved else "No checkpoint was saved before it"
        again = command("train", "--resume", folder, "--set", "training.on_nonfinite=skip")
        raise NonFiniteError(
            f"the loss or its gradient was NaN or infinite at step {iteration} (epoch {contents['epoch'] + 1}); the "
            f"batch is in {file}. {kept}. To skip such steps, resume with: {again}"
        )

    def _log(self, line: Mapping[str, Any], step: int | None = None) -> None:
        step = self.state.iteration if step is None else step
        if self.world.is_main:
            self.log.write({"step": step, "epoch": max(step - 1, 0) // self.setup.steps_per_epoch, **line})
        for logger in self._loggers:
            with not_needed("logging"):
                logger.log(step, numbers(finite(line)))

    # --- save and stop -----------------------------------------------------------------------------------------------

    def save(self, *, always: bool) -> None:
        """Save a checkpoint; unless ``always``, only if saving takes no more than a twentieth of the time."""
        now = time.monotonic()
        due = always or now - self._last_save >= self._save_seconds / MAX_SAVING
        if self.recipe.training.shard_classes:
            due = self.world.share(due)  # every process saves its classes
        elif not self.world.is_main:
            return
        if not due:
            return
        state = self.state
        state.seconds = now - self._began
        state.memory = max(state.memory, peak_memory(self.setup.device))
        checkpoint.save(self.setup, state, self.folder, self.log.size() if self.world.is_main else 0)
        if self.world.is_main and state.best is None:
            self._save_network()
        self._last_save = time.monotonic()
        self._save_seconds = self._last_save - now

    def _save_network(self) -> None:
        """Write the network to the run folder, where ``nearfar.networks.weights.load`` finds it."""
        saving.save(self.setup.model, self.folder.folder, preprocessing=self.setup.preprocessing)

    def stop_if_asked(self, signals: Sequence[int]) -> None:
        """Save a checkpoint and raise ``Stopped`` if a signal has arrived, unless the training is over."""
        if not self.world.any(bool(signals)) or self.finished:
            return
        self.report(self.steps.flush())
        self.save(always=True)
        again = command("train", "--resume", self.folder.folder)
        message = f"stopped at step {self.state.iteration:,} of {self.setup.steps:,}. Resume with: {again}"
        self.display.say(message)
        raise Stopped(signals[0] if signals else signal.SIGTERM, message)

    # --- conclude ----------------------------------------------------------------------------------------------------

    def conclude(self) -> Run:
        """Load the selected network, and measure it on all parts."""
        best, epoch = self.state.best, self.state.epoch - 1
        if best is not None and best["epoch"] != epoch:
            epoch = int(best["epoch"])
            if self.world.is_main:
                self.setup.model.load_state_dict(read_tensors(self.folder.model)[0])
            self.world.broadcast(self.setup.model)
            self._embedded = {}
        if self._before:
            self._blend = blend(self.setup, self._before, watch=self.display.watch)
            if self.world.is_main:
                self._save_network()
            self._embedded = {}
        missing = [part for part in self.setup.measured if part not in self._embedded]
        self._embedded |= self._embed(self.world.share(missing))
        metrics = self._final_metrics(epoch) if self.world.is_main else {}
        return Run(self.folder.folder, metrics=self.world.share(metrics))

    def _final_metrics(self, epoch: int) -> dict[str, Any]:
        """Measure the selected epoch, and write its metrics and the embeddings they come from."""
        setup, state, run, rule = self.setup, self.state, self.folder, "last epoch"
        measured = state.metrics
        if state.best is not None or self._before:
            if state.best is not None:
                rule = f"best validation {self.recipe.selection.metric}"
            measured, self._per_query = embeddings.measure_parts(setup, self._embedded)
            if "test" in measured:
                step = min((epoch + 1) * setup.steps_per_epoch, state.iteration)
                self._log({"metrics": {"test": measured["test"]}}, step=step)
        about = read_json(run.manifest)
        before = {"before": about["before"]} if self.recipe.evaluation.before and "before" in about else {}
        queries = embeddings.query_metrics(setup, self._embedded, self._per_query)
        if before:
            queries |= self._queries_before(queries)
        said = verdict.compare({name: values.numpy() for name, values in queries.items()})
        metrics = {
            "selection": rule,
            "epoch": epoch,
            "steps": state.iteration,
            "seconds": round(state.seconds, 2),
            "memory": round(state.memory, 1) or None,
            "skipped": state.skipped,
            **measured,
            **before,
            **({"blend": asdict(self._blend)} if self._before else {}),
            **({} if said is None else {"verdict": said}),
            **({"final": about["final"]} if "final" in about else {}),
        }
        if queries:
            write_tensors(run.queries, queries)
        provenance.finish(run, metrics)
        with not_needed(f"writing {run.embeddings}"):
            embeddings.write_embeddings(setup, run, self._embedded)
        with not_needed("showing the end of the training"):
            words = f"finished after {duration(state.seconds)}: {rule}, epoch {epoch + 1}"
            self.display.say(f"{words}  {main_metrics(before | measured)}")
        return metrics

    def _queries_before(self, queries: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the metrics of the same queries by the network before the training, if they are there."""
        if not queries or not self.folder.before.is_file():
            return {}
        before, _ = read_tensors(self.folder.before)
        if not torch.equal(before["rows"], queries["rows"]):
            return {}
        return {f"{verdict.BEFORE}{name}": before[name] for name in verdict.METRICS}


# --- folders, signals and memory -------------------------------------------------------------------------------------


def free_folder(recipe: str | Path | Mapping[str, Any] | Recipe, found: Recipe, runs: Path = RUNS) -> Path:
    """Create a new run folder, named after the file of a recipe, or else after dataset and loss."""
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


def main_metrics(metrics: Mapping[str, Mapping[str, Any]]) -> str:
    """The main metrics of each part, in a line."""
    texts = []
    for part, values in metrics.items():
        recalls = [name for name in values if name.startswith("recall@")]
        names = [name for name in (*recalls[:1], "map@r", "nmi", "auc", "accuracy") if name in values]
        texts.append(" ".join([part, *(f"{name} {values[name]:.4f}" for name in names)]))
    return "  ".join(texts)


@contextmanager
def catch_signals() -> Iterator[list[int]]:
    """Yield a list, to which the first SIGINT or SIGTERM is added; a second one raises ``KeyboardInterrupt`` at once.

    In threads other than the main one, signals are left as they are.
    """
    arrived: list[int] = []

    def record(number: int, frame: FrameType | None) -> None:
        if arrived:
            raise KeyboardInterrupt
        arrived.append(number)

    if threading.current_thread() is not threading.main_thread():
        yield arrived
        return
    before = {number: signal.signal(number, record) for number in SIGNALS}
    try:
        yield arrived
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def not_needed(work: str) -> Iterator[None]:
    """Turn the failure of work that no metric depends on into a warning."""
    try:
        yield
    except StopTraining:
        raise
    except Exception as error:
        warnings.warn(f"{work} failed: {error}", stacklevel=3)


def reset_peak_memory(device: torch.device) -> None:
    """Reset the peak memory of a GPU; that of a process without one cannot be reset."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory(device: torch.device) -> float:
    """Return the peak memory in MiB: of tensors on a GPU, otherwise of the whole process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    try:
        import resource
    except ImportError:  # Windows
        return 0.0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)
