"""Trains a recipe into a run folder, however often the training is interrupted and resumed."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch

from nearfar.data.store.store import Store
from nearfar.distributed import World
from nearfar.training.evaluation.embeddings import EmbeddingSet, Evaluator, PerQuery
from nearfar.training.loop.builder import build, untrained
from nearfar.training.loop.features import on_features
from nearfar.training.loop.state import Session
from nearfar.training.loop.step import StepLog, StepSummary, StepTimer, kernels
from nearfar.training.recipe.files import to_dict, to_toml
from nearfar.training.recipe.schema import Recipe
from nearfar.training.run import console, provenance
from nearfar.training.run import loggers as logging
from nearfar.training.run.console import Display, Silent, Status
from nearfar.training.run.folder import Log, RunFolder, finite
from nearfar.training.run.loggers import Logger, StopTraining, flat
from nearfar.training.run.reader import Run, read_json
from nearfar.utils.atomic import write_json, write_text
from nearfar.utils.formatting import command
from nearfar.utils.validation import few

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stopped(SystemExit):
    """Raised after a run was stopped by a signal and saved; the process exits with 128 + the signal."""

    def __init__(self, number: int, message: str) -> None:
        super().__init__(128 + number)
        self.signal, self.message = number, message

    def __str__(self) -> str:
        return self.message


class StopRequest:
    """A signal handler that records the first signal; it is true once a signal has arrived."""

    def __init__(self) -> None:
        self.number: int | None = None

    def __bool__(self) -> bool:
        return self.number is not None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Record a signal; a second one raises ``KeyboardInterrupt`` at once."""
        if self.number is not None:
            raise KeyboardInterrupt
        self.number = number


@contextmanager
def catch_signals() -> Iterator[StopRequest]:
    """Record SIGINT and SIGTERM instead of stopping at once; in threads other than the main one, record nothing."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    before = {number: signal.signal(number, request) for number in SIGNALS}
    try:
        yield request
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


MAX_SAVING = 0.05  # share of the time for checkpoints; with short epochs, not every epoch is saved
SHOWN = 3  # names of files in a line
STEPS_BETWEEN_VOTES = 10  # of several processes on whether to stop


class NonFiniteError(RuntimeError):
    """A loss, a gradient or an embedding was NaN or infinite, and the recipe says to stop then."""


class Trainer:
    """Trains a recipe into a run folder."""

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
    ) -> None:
        self.recipe, self.run_folder, self.resume = recipe, RunFolder(folder), resume
        self.world = world or World()
        self.loggers = tuple(loggers) if self.world.is_main else ()
        for each in self.loggers:
            if isinstance(each, str):
                logging.check(each)
        self.display: Display = (display or Silent()) if self.world.is_main else Silent()
        self.cache = cache
        self._open_loggers: list[Logger] = []
        self._last_save = time.monotonic()
        self._save_seconds = 0.0  # duration of the last checkpoint
        self._timer = StepTimer()
        self._embedded: dict[str, EmbeddingSet] = {}  # by the network as it is now
        self._per_query: PerQuery | None = None  # metrics of these embeddings

    def run(self) -> Run:
        """Train to the end, or until a signal arrives: then ``Stopped`` is raised, and the run can be resumed."""
        with ExitStack() as stack:
            self._set_up(stack)
            self._start()
            request = stack.enter_context(catch_signals())
            while not self.session.finished:
                self._train_epoch(request)
                self._end_epoch()
                self._checkpoint(always=self.session.finished)
                self._stop_if_requested(request)
            return self._finish()

    # --- set-up ------------------------------------------------------------------------------------------------

    def _set_up(self, stack: ExitStack) -> None:
        """Lock the run folder, build everything from the recipe, and open log and loggers."""
        if self.world.is_main:
            stack.enter_context(self.run_folder.owned())
            self.run_folder.begin(self.recipe, resume=self.resume)
        stack.enter_context(kernels(deterministic=self.recipe.training.deterministic))
        self.parts = build(self.recipe, world=self.world, cache=self.cache, watch=self.display.watch)
        reset_peak_memory(self.parts.device)
        if self.recipe.network.freeze:
            self.parts = on_features(self.parts, self.display.watch)
        self.session, self.evaluator = Session(self.parts, self.world), Evaluator(self.parts, self.world)
        began = self.world.share(self.resume and self.run_folder.manifest.exists())
        before = None if began else self._try_out()
        if self.world.is_main:
            self._write_manifest_and_recipe(began, before)
            self._report_left_out()
        for logger in self.loggers:
            if isinstance(logger, str):
                created = logging.create(logger, self.run_folder.folder, settings=to_dict(self.recipe))
                stack.callback(self._close, created)
                logger = created
            self._open_loggers.append(logger)
        self.log = stack.enter_context(Log(self.run_folder.log if self.world.is_main else Path(os.devnull)))

    def _close(self, logger: Logger) -> None:
        with not_needed("closing a logger"):
            logger.close()

    def _try_out(self) -> dict[str, Any] | None:
        """Embed a batch as evaluations will, which must not fail after the training; measure the network before it."""
        self.evaluator.try_out()
        if not (self.recipe.evaluation.before and "test" in self.evaluator.parts_at_end):
            return None
        if self.world.is_main:
            provenance.record_look(self.run_folder, "before")
        evaluator = Evaluator(untrained(self.parts), self.world)
        embedded = evaluator.embed(["test"])
        return evaluator.measure(embedded)[0]["test"] if self.world.is_main else None

    def _write_manifest_and_recipe(self, began: bool, before: dict[str, Any] | None) -> None:
        """Write the manifest, then the recipe, in this order: a folder with a recipe is a run."""
        run = self.run_folder
        if not began:
            about = provenance.of(self.parts, self.world) | ({} if before is None else {"before": before})
            shared = about["data"]["duplicates"] = provenance.duplicates_of(self.parts, self.display.watch)
            if shared:
                some = few(shared, SHOWN)
                self.display.say(f"test items that are in a training class as well: {some}; the manifest lists all")
            write_json(run.manifest, finite(about))
        if not self.resume:
            write_text(run.recipe, to_toml(self.recipe))

    def _report_left_out(self) -> None:
        bad = self.parts.store.bad if isinstance(self.parts.store, Store) else ()
        if bad:
            some = few([each.name for each in bad], SHOWN)
            files = "1 file" if len(bad) == 1 else f"{len(bad):,} files"
            more = "; the manifest lists all of them" if len(bad) > SHOWN else ""
            self.display.say(f"skipped {files} that could not be decoded ({some}){more}")
        notes = self.parts.dataset.left_out
        if notes:
            some = few(notes, SHOWN)
            more = f"; the manifest lists all {len(notes):,} notes" if len(notes) > SHOWN else ""
            self.display.say(f"{self.parts.dataset.name}: {some}{more}")

    def _start(self) -> None:
        """Seed the random generators, or restore the last checkpoint."""
        seed = self.recipe.training.seed
        random.seed(seed)
        np.random.seed(seed % 2**32)
        size = self.session.restore(self.run_folder) if self.resume else 0
        position, folder = self.session.position, self.run_folder.folder
        if self.world.any(position.iteration != self.world.share(position.iteration)):
            raise RuntimeError(
                f"not all processes find the checkpoint in {folder}; all of them must be able to read it"
            )
        self.world.broadcast(self.parts.model, self.parts.losses)
        if self.world.is_main:
            self.log.cut(size)
            if self.resume:
                about = provenance.record_resume(read_json(self.run_folder.manifest), self.recipe, position.iteration)
                write_json(self.run_folder.manifest, about)
                if self.recipe.evaluation.before and "before" not in about:
                    self.display.say("evaluation.before has no effect: the network was not measured when the run began")
        self._began = time.monotonic() - position.seconds
        if position.iteration:
            self.display.say(f"resumed at step {position.iteration:,} of {self.parts.steps:,} in {folder}")

    # --- an epoch ----------------------------------------------------------------------------------------------

    def _train_epoch(self, request: StopRequest) -> None:
        session, parts, position = self.session, self.parts, self.session.position
        session.begin_epoch()
        if position.iteration >= parts.steps:  # the checkpoint was saved after the last step
            return
        steps = StepLog(parts.device)
        every = self.recipe.training.checkpoint_steps
        batches = parts.loader.epoch(parts.sampler, position.epoch, rows=parts.rows["train"], start=position.step)
        if parts.device.type == "cuda":
            from nearfar.training.loop.prefetch import prefetch

            batches = prefetch(batches, parts.device)
        with closing(batches):
            for batch in batches:
                result = session.train_step(batch)
                self._report(steps.add(position.iteration - 1, result, len(batch)))
                if position.iteration >= parts.steps or position.step >= parts.steps_per_epoch:
                    break
                if every and position.iteration % every == 0:
                    self._report(steps.flush())
                    self._checkpoint(always=True)
                    steps.restart()
                if self._stop_requested(request):
                    self._report(steps.flush())
                    self._stop_if_requested(request)
        self._report(steps.flush())

    def _end_epoch(self) -> None:
        session, position = self.session, self.session.position
        self.world.broadcast(self.parts.model)  # each process has its own statistics of batch norms
        last = position.epoch + 1 >= self.parts.epochs
        if last:
            self._checkpoint(always=True)  # nothing that fails from here on costs a step
        due = self.evaluator.due(position.epoch + 1, last=last)
        self._embedded, self._per_query = {}, None
        metric = self._evaluate(due) if due else None
        self.evaluator.update_learned()
        session.end_epoch(metric)

    def _evaluate(self, due: Sequence[str]) -> float | None:
        """Measure the network, log the metrics, and return the validation metric that selects the epoch, if any."""
        position, failure = self.session.position, None
        try:
            self._embedded = self._embed(due)
            if self.world.is_main:
                self._check_embeddings()
                position.metrics, self._per_query = self.evaluator.measure(self._embedded)
        except BaseException as error:
            failure = error
        if self.world.any(failure is not None):  # all processes leave together, and may save a checkpoint
            raise failure or RuntimeError("the evaluation failed in another process")
        position.metrics = self.world.share(position.metrics)
        self._log({"metrics": position.metrics})
        status = f"epoch {position.epoch + 1}/{self.parts.epochs}"
        self.display.say("  ".join([status, *console.shown(position.metrics)]))
        value = position.metrics.get("validation", {}).get(self.recipe.selection.metric)
        if value is not None and (position.best is None or value > position.best["value"]):
            if self.world.is_main:
                self.session.save_network(self.run_folder)
            position.best = {"epoch": position.epoch, "value": value}
        return None if value is None else float(value)

    def _embed(self, names: Sequence[str]) -> dict[str, EmbeddingSet]:
        """Compute embeddings, and count the looks at the test classes; only the main process keeps them."""
        found = self.evaluator.embed(names)
        if not self.world.is_main:
            return {}
        if "test" in found:
            position = self.session.position
            provenance.record_look(self.run_folder, "train", step=position.iteration, epoch=position.epoch)
        return found

    def _check_embeddings(self) -> None:
        position = self.session.position
        if not all(one.is_finite() for one in self._embedded.values()):
            skipped = f", and {position.skipped:,} steps were skipped before" if position.skipped else ""
            raise NonFiniteError(
                f"after step {position.iteration:,} the embeddings are NaN or infinite{skipped}; "
                "a smaller learning rate, or training.clip, may help"
            )

    def _report(self, summaries: Sequence[StepSummary]) -> None:
        """Log and show the steps whose results have arrived from the device."""
        position, parts = self.session.position, self.parts
        for summary in summaries:
            if summary.nonfinite:
                self._handle_nonfinite(summary)
            done = summary.first + len(summary.losses)
            images_s = summary.images * self.world.ranks / max(summary.seconds, 1e-9)
            line = {"loss": summary.loss, "lr": self.session.schedule.rates(), "images_s": round(images_s, 1)}
            self._log(line | ({"skipped": position.skipped} if position.skipped else {}), step=done)
            self._timer.add(summary)
            seconds = self._timer.seconds()
            left = None if seconds is None else (parts.steps - done) * seconds
            epoch = summary.first // parts.steps_per_epoch + 1
            where = done, parts.steps, epoch, parts.epochs
            with not_needed("showing the progress"):
                self.display.show(Status(*where, summary.loss, images_s, left, position.skipped, position.metrics))

    def _handle_nonfinite(self, summary: StepSummary) -> None:
        """Count skipped steps, or write the batch to a file and stop."""
        if self.recipe.training.on_nonfinite == "skip":
            self.session.position.skipped += len(summary.nonfinite)
            return
        iteration = summary.nonfinite[0]
        contents = {**self.session.batch_contents(iteration), "loss": summary.losses[iteration - summary.first]}
        file, folder = self.run_folder.nonfinite, self.run_folder.folder
        if self.world.ranks > 1:
            file = file.with_stem(f"{file.stem}.{self.world.rank}")
        write_json(file, finite(contents))
        saved = self.run_folder.checkpoint.is_file()
        kept = "The checkpoint before it is kept" if saved else "No checkpoint was saved before it"
        again = command("train", "--resume", folder, "--set", "training.on_nonfinite=skip")
        raise NonFiniteError(
            f"the loss or its gradient was NaN or infinite at step {iteration} (epoch {contents['epoch'] + 1}); the "
            f"batch is in {file}. {kept}. To skip such steps, resume with: {again}"
        )

    def _log(self, line: Mapping[str, Any], step: int | None = None) -> None:
        step = self.session.position.iteration if step is None else step
        if self.world.is_main:
            self.log.write({"step": step, "epoch": max(step - 1, 0) // self.parts.steps_per_epoch, **line})
        for logger in self._open_loggers:
            with not_needed("logging"):
                logger.log(step, flat(finite(line)))

    # --- checkpoints and stopping ------------------------------------------------------------------------------

    def _checkpoint(self, *, always: bool) -> None:
        """Save a checkpoint; unless ``always``, only if saving takes no more than a twentieth of the time."""
        now = time.monotonic()
        due = always or now - self._last_save >= self._save_seconds / MAX_SAVING
        if self.recipe.training.shard_classes:
            due = self.world.share(due)  # every process saves its classes
        elif not self.world.is_main:
            return
        if not due:
            return
        position = self.session.position
        position.seconds = now - self._began
        position.memory = max(position.memory, peak_memory(self.parts.device))
        self.session.save(self.run_folder, self.log.size() if self.world.is_main else 0)
        self._last_save = time.monotonic()
        self._save_seconds = self._last_save - now

    def _stop_requested(self, request: StopRequest) -> bool:
        if self.world.ranks == 1:
            return bool(request)
        return self.session.position.iteration % STEPS_BETWEEN_VOTES == 0 and self.world.any(bool(request))

    def _stop_if_requested(self, request: StopRequest) -> None:
        if not self.world.any(bool(request)) or self.session.finished:
            return
        self._checkpoint(always=True)
        done, folder = self.session.position.iteration, self.run_folder.folder
        again = command("train", "--resume", folder)
        message = f"stopped at step {done:,} of {self.parts.steps:,}. Resume with: {again}"
        self.display.say(message)
        raise Stopped(request.number or signal.SIGTERM, message)

    # --- the end -----------------------------------------------------------------------------------------------

    def _finish(self) -> Run:
        epoch = self.session.position.epoch - 1
        best = self.session.position.best
        if best is not None and best["epoch"] != epoch:
            epoch = self.world.share(self.session.load_best(self.run_folder) if self.world.is_main else epoch)
            self.world.broadcast(self.parts.model)
            self._embedded = {}
        missing = [part for part in self.evaluator.parts_at_end if part not in self._embedded]
        self._embedded |= self._embed(self.world.share(missing))
        metrics = self._final_metrics(epoch) if self.world.is_main else {}
        return Run(self.run_folder.folder, metrics=self.world.share(metrics))

    def _final_metrics(self, epoch: int) -> dict[str, Any]:
        """Measure the selected epoch, and write its metrics and the embeddings they come from."""
        position, evaluator, rule = self.session.position, self.evaluator, "last epoch"
        measured = position.metrics
        if position.best is not None:
            rule = f"best validation {self.recipe.selection.metric}"
            measured, self._per_query = evaluator.measure(self._embedded)
            if "test" in measured:
                step = min((epoch + 1) * self.parts.steps_per_epoch, position.iteration)
                self._log({"metrics": {"test": measured["test"]}}, step=step)
        metrics = {
            "selection": rule,
            "epoch": epoch,
            "steps": position.iteration,
            "seconds": round(position.seconds, 2),
            "memory": round(position.memory, 1) or None,
            "skipped": position.skipped,
            **measured,
        }
        about = read_json(self.run_folder.manifest)
        before = {"before": about["before"]} if self.recipe.evaluation.before and "before" in about else {}
        metrics |= before
        evaluator.write_queries(self.run_folder, self._embedded, self._per_query)
        provenance.finish(self.run_folder, metrics)
        with not_needed(f"writing {self.run_folder.embeddings}"):
            evaluator.write_embeddings(self.run_folder, self._embedded)
        with not_needed("showing the end of the training"):
            self.display.finish(console.Conclusion(position.seconds, rule, epoch + 1, before | measured))
        return metrics


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
