"""A training from its recipe to its numbers, however often it is interrupted."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nearfar.data.store.store import Store
from nearfar.training.evaluation.judge import Judge, Queries
from nearfar.training.evaluation.measure import Embedded
from nearfar.training.loop import device
from nearfar.training.loop.builder import build
from nearfar.training.loop.distributed import World
from nearfar.training.loop.prefetch import ahead
from nearfar.training.loop.signals import Asked, Stopped, listening
from nearfar.training.loop.state import Session, batch_at, wants_means
from nearfar.training.loop.step_records import Ledger, Pace, Page
from nearfar.training.recipe.files import to_dict, to_toml
from nearfar.training.recipe.schema import Recipe
from nearfar.training.run import checkpoints, console, manifest
from nearfar.training.run import loggers as logging
from nearfar.training.run.console import Display, Silent, Status
from nearfar.training.run.folder import Log, RunFolder, finite
from nearfar.training.run.loggers import Logger, flat
from nearfar.utils.atomic import write_json, write_text
from nearfar.utils.formatting import duration
from nearfar.utils.validation import few

MOST_SAVING = 0.05  # of the time: with short epochs, not each one is saved
SHOWN = 3  # names of files in a line
STEPS_BETWEEN_VOTES = 10  # of many processes on whether to stop


class NonFinite(RuntimeError):
    """A loss or a gradient was no number, and the recipe says to stop then."""


@dataclass(frozen=True)
class Result:
    """What came out of a run.

    Args:
        folder: The run folder.
        metrics: As in metrics.json: by part, and which epoch they are of.
    """

    folder: Path
    metrics: dict[str, Any]


class Trainer:
    """Trains what a recipe says, into a run folder.

    Args:
        recipe: What to train.
        folder: Where everything is written; a new one, unless ``resume``.
        resume: Go on with the run in ``folder``, from its last checkpoint.
        loggers: Who else is told: "tensorboard", "mlflow", which are opened when the folder is the run's own and closed
            at the end, or anything that is told as they are.
        display: What a person sees, see ``nearfar.training.run.console``.
        world: The processes that share the work, see ``nearfar.training.loop.distributed``.
        cache: Where decoded pictures are kept.
    """

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
        self._told: list[Logger] = []
        for each in self.loggers:
            if isinstance(each, str):
                logging.check(each)
        self.display: Display = (display or Silent()) if self.world.is_main else Silent()
        self.cache = cache
        self._saved = time.monotonic()
        self._saving = 0.0  # seconds that the last checkpoint took
        self._pace = Pace()
        self._found: dict[str, Embedded] = {}
        self._queries: Queries | None = None  # of what was found

    def run(self) -> Result:
        """Train to the end, or until asked to stop (``Stopped``): then the run can be resumed."""
        with ExitStack() as stack:
            if self.world.is_main:
                stack.enter_context(self.run_folder.owned())
                self.run_folder.begin(self.recipe, resume=self.resume)
            stack.enter_context(device.chosen(deterministic=self.recipe.training.deterministic))
            rank, ranks = self.world.rank, self.world.ranks
            self.parts = build(self.recipe, rank=rank, ranks=ranks, cache=self.cache, watch=self.display.watch)
            device.forget_peak_memory(self.parts.device)
            self.session, self.judge = Session(self.parts, self.world), Judge(self.parts)
            if self.world.is_main:
                self._write_what_it_is()
                self._say_what_is_left_out()
            self._told = [self._opened(each, stack) for each in self.loggers]
            self.log = stack.enter_context(Log(self.run_folder.log if self.world.is_main else Path(os.devnull)))
            self._start()
            asked = stack.enter_context(listening())
            while not self.session.finished:
                self._train_epoch(asked)
                self._end_epoch()
                self._checkpoint(always=self.session.finished)
                self._stop_if_asked(asked)
            return self._finish()

    # --- the beginning -----------------------------------------------------------------------------------------

    def _write_what_it_is(self) -> None:
        """Manifest and recipe, in this order: a folder with a recipe is a run."""
        run = self.run_folder
        if not (self.resume and run.manifest.exists()):
            write_json(run.manifest, finite(manifest.of(self.parts, self.world)))
        if not self.resume:
            write_text(run.recipe, to_toml(self.recipe))

    def _opened(self, logger: str | Logger, stack: ExitStack) -> Logger:
        if not isinstance(logger, str):
            return logger
        made = logging.create(logger, self.run_folder.folder, settings=to_dict(self.recipe))
        return stack.enter_context(closing(made))

    def _say_what_is_left_out(self) -> None:
        bad = self.parts.store.bad if isinstance(self.parts.store, Store) else ()
        if bad:
            some = few([each.name for each in bad], SHOWN)
            files = "1 file" if len(bad) == 1 else f"{len(bad):,} files"
            self.display.say(f"without {files} that gave no picture ({some}); the manifest has all of them")
        notes = self.parts.dataset.left_out
        if notes:
            some = few(notes, SHOWN)
            self.display.say(f"{self.parts.dataset.name}: {some}; the manifest has all {len(notes):,} of such notes")

    def _start(self) -> None:
        seed = self.recipe.training.seed
        random.seed(seed)
        np.random.seed(seed % 2**32)
        size = self.session.restore(self.run_folder) if self.resume else 0
        if self.world.any(self.session.place.iteration != self.world.share(self.session.place.iteration)):
            raise RuntimeError(f"not all processes find the checkpoint in {self.run_folder.folder}; all must see it")
        self.world.broadcast(self.parts.model, self.parts.losses)
        if self.world.is_main:
            self.log.cut(size)
        place = self.session.place
        self._began = time.monotonic() - place.seconds
        if place.iteration:
            self.display.say(f"resumed at step {place.iteration:,} of {self.parts.steps:,} in {self.run_folder.folder}")

    # --- an epoch ----------------------------------------------------------------------------------------------

    def _train_epoch(self, asked: Asked) -> None:
        session, parts, place = self.session, self.parts, self.session.place
        session.enter_epoch()
        ledger = Ledger(parts.device)
        every = self.recipe.training.checkpoint_steps
        drawn = parts.loader.epoch(parts.sampler, place.epoch, rows=parts.rows["train"], start=place.step)
        with closing(ahead(drawn, parts.device)) as batches:
            if place.iteration >= parts.steps:  # saved after the last step of a run that counts iterations
                return
            for batch in batches:
                outcome = session.learn(batch)
                self._read(ledger.add(place.iteration - 1, outcome, len(batch)))
                if place.iteration >= parts.steps or place.step >= parts.steps_per_epoch:
                    break
                if every and place.iteration % every == 0:
                    self._read(ledger.flush())
                    self._checkpoint(always=True)
                    ledger.restart()
                if self._is_asked(asked):
                    self._read(ledger.flush())
                    self._stop_if_asked(asked)
        self._read(ledger.flush())

    def _end_epoch(self) -> None:
        session, place = self.session, self.session.place
        self.world.broadcast(self.parts.model)  # the statistics of batch norms are each process's own
        last = place.epoch + 1 >= self.parts.epochs
        every = self.recipe.evaluation.every
        metric = None
        self._found, self._queries = {}, None
        if last:
            self._checkpoint(always=True)  # whatever happens to the evaluation, what was learned is kept
        if last or (every and (place.epoch + 1) % every == 0):
            metric = self._evaluate()
        if wants_means(self.parts):
            self.judge.give_means()
        session.end_epoch(metric)

    def _evaluate(self) -> float | None:
        """Metrics into the log; gives the validation's metric that selects, if there is one.

        Where validation classes judge, the test classes are looked at only once, when an epoch has been selected.
        """
        place = self.session.place
        if self.world.is_main:
            self._found = self.judge.embedded(self.judge.watched)
            self._check_numbers()
            place.metrics, self._queries = self.judge.measured(self._found)
        place.metrics = self.world.share(place.metrics)
        self._tell({"metrics": place.metrics})
        status = f"epoch {place.epoch + 1}/{self.parts.epochs}"
        self.display.say("  ".join([status, *console.shown(place.metrics)]))
        value = place.metrics.get("validation", {}).get(self.recipe.selection.metric)
        if value is not None and (place.best is None or value > place.best["value"]):
            place.best = {"epoch": place.epoch, "value": value}
            if self.world.is_main:
                self.session.save_best(self.run_folder)
        return None if value is None else float(value)

    def _check_numbers(self) -> None:
        place = self.session.place
        if not all(bool(one.points.isfinite().all()) for one in self._found.values()):
            skipped = f", and {place.skipped:,} steps were skipped before" if place.skipped else ""
            raise NonFinite(
                f"after step {place.iteration:,} the network gives no numbers any more{skipped}; "
                "a smaller learning rate, or training.clip, may help"
            )

    def _read(self, pages: Sequence[Page]) -> None:
        """Look at what the device has sent."""
        place, parts = self.session.place, self.parts
        for page in pages:
            if page.strange:
                self._strange(page)
            done = page.first + len(page.losses)
            images_s = page.pictures * self.world.ranks / max(page.seconds, 1e-9)
            rates = self.session.schedule.rates()
            line = {"loss": page.loss, "lr": rates, "images_s": round(images_s, 1)}
            self._tell(line | ({"skipped": place.skipped} if place.skipped else {}), step=done)
            self._pace.add(page)
            pace = self._pace.seconds()
            left = None if pace is None else (parts.steps - done) * pace
            epoch = page.first // parts.steps_per_epoch + 1
            where = done, parts.steps, epoch, parts.epochs
            self.display.show(Status(*where, page.loss, images_s, left, place.skipped, place.metrics))

    def _strange(self, page: Page) -> None:
        """Count what was skipped, or name the batch and stop."""
        if self.recipe.training.on_nonfinite == "skip":
            self.session.place.skipped += len(page.strange)
            return
        iteration = page.strange[0]
        about = {**batch_at(self.parts, iteration), "loss": page.losses[iteration - page.first]}
        file = self.run_folder.nonfinite
        if self.world.ranks > 1:
            file = file.with_stem(f"{file.stem}.{self.world.rank}")
        write_json(file, finite(about))
        where = f"step {iteration} (epoch {about['epoch'] + 1})"
        saved = checkpoints.exists(self.run_folder.last)
        kept = "The checkpoint before it is kept" if saved else "No checkpoint was saved before it"
        raise NonFinite(
            f"the loss or its gradient was no number at {where}; the batch is in {file}. {kept}; resumed with "
            "training.on_nonfinite=skip, such steps are left out"
        )

    def _tell(self, line: Mapping[str, Any], step: int | None = None) -> None:
        place = self.session.place
        step = place.iteration if step is None else step
        if self.world.is_main:
            self.log.write({"step": step, "epoch": max(step - 1, 0) // self.parts.steps_per_epoch, **line})
        for logger in self._told:
            logger.log(step, flat(finite(line)))

    # --- stopping ----------------------------------------------------------------------------------------------

    def _is_asked(self, asked: Asked) -> bool:
        if self.world.ranks == 1:
            return bool(asked)
        return self.session.place.iteration % STEPS_BETWEEN_VOTES == 0 and self.world.any(bool(asked))

    def _stop_if_asked(self, asked: Asked) -> None:
        if not self.world.any(bool(asked)) or self.session.finished:
            return
        self._checkpoint(always=True)
        place, folder = self.session.place, self.run_folder.folder
        message = f"stopped at step {place.iteration:,} of {self.parts.steps:,}; saved, and can be resumed: {folder}"
        self.display.say(message)
        raise Stopped(asked.number or signal.SIGTERM, message)

    def _checkpoint(self, *, always: bool) -> None:
        """Save, unless it would take more than a twentieth of the time."""
        now = time.monotonic()
        if not self.world.is_main or (not always and now - self._saved < self._saving / MOST_SAVING):
            return
        place = self.session.place
        place.seconds = now - self._began
        place.memory = max(place.memory, device.peak_memory(self.parts.device))
        self.session.save(self.run_folder, self.log.size())
        self._saved = time.monotonic()
        self._saving = self._saved - now

    # --- the end -----------------------------------------------------------------------------------------------

    def _finish(self) -> Result:
        """The numbers of the selected epoch, and the embeddings they come from."""
        metrics = self._concluded() if self.world.is_main else {}
        return Result(self.run_folder.folder, self.world.share(metrics))

    def _concluded(self) -> dict[str, Any]:
        place = self.session.place
        epoch, rule = place.epoch - 1, "last epoch"
        if place.best is not None:
            rule = f"best validation {self.recipe.selection.metric}"
            if place.best["epoch"] != epoch:
                epoch, self._found = self.session.load_best(self.run_folder), {}
        self._found |= self.judge.embedded([part for part in self.judge.wanted if part not in self._found])
        measured = place.metrics
        if place.best is not None:
            measured, self._queries = self.judge.measured(self._found)
            if "test" in measured:
                step = min((epoch + 1) * self.parts.steps_per_epoch, place.iteration)
                self._tell({"metrics": {"test": measured["test"]}}, step=step)
        metrics = {
            "selection": rule,
            "epoch": epoch,
            "steps": place.iteration,
            "seconds": round(place.seconds, 2),
            "memory": round(place.memory, 1) or None,
            "skipped": place.skipped,
            **measured,
        }
        self.judge.write(self.run_folder.embeddings, self._found)
        self.judge.write_queries(self.run_folder.queries, self._found, self._queries)
        write_json(self.run_folder.metrics, metrics)
        words = f"finished after {duration(place.seconds)}: {rule}, epoch {epoch + 1}"
        self.display.say("  ".join([words, *console.shown(measured)]))
        return metrics
