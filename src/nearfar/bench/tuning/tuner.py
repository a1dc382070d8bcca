"""Tuning: trains a recipe with different settings and compares them on validation classes.

Trials never see the test classes (``evaluation.test = false``), so nothing can be selected on them. The best settings
are written to best.toml, a complete recipe; training it evaluates the test classes, once.
"""

from __future__ import annotations

import gc
import json
import os
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from nearfar.bench.tuning import results
from nearfar.bench.tuning.results import StudyResults
from nearfar.bench.tuning.samplers import Wait, next_combination, next_in_turn
from nearfar.bench.tuning.space import Space, check, finite, from_dict, load, size
from nearfar.bench.tuning.study import Study, optuna_module, quiet
from nearfar.training.recipe.files import Overrides
from nearfar.training.recipe.files import load as load_recipe
from nearfar.training.recipe.schema import Recipe
from nearfar.training.run.folder import RunFolder, read_log
from nearfar.training.run.loggers import StopTraining
from nearfar.training.run.provenance import is_finished
from nearfar.training.trainer import Stopped
from nearfar.utils.folders import remove
from nearfar.utils.progress import Display
from nearfar.utils.validation import one_of, whole

ENUMERATING = ("grid", "in_turn")  # samplers that enumerate values; the others draw them
SAMPLERS = ("tpe", "random", *ENUMERATING)
TRIALS = 50  # default of samplers that draw
MOST_COMBINATIONS = 1000  # of a grid without a number of trials
FAILURES = 3  # if so many trials fail and none succeeds, tuning ends
STARTUP = 5  # trials before pruning begins


@dataclass(frozen=True)
class TuningPlan:
    """What to tune, and how."""

    recipe: Recipe  # recipe that all trials share; it needs validation classes
    space: Space  # search space
    out: Path  # folder for trials, best.toml, trials.json and the page
    sampler: str = "tpe"  # "tpe", "random", "grid" (every combination) or "in_turn" (one key after the other)
    trials: int | None = None  # number of trials in all, including those of earlier calls; None for all of a grid
    storage: str | None = None  # URL of a database that workers share; by default SQLite in out
    study: str = "study"  # name of the study in the database
    # Whether to end trials early that are worse than the median at the same evaluation; with k-fold, after a fold.
    prune: bool = True
    keep: bool = False  # whether to keep checkpoints of trials; by default only their metrics are kept
    seed: int = 0  # seed of the sampler
    cache: Path | None = None  # folder of decoded images

    @property
    def metric(self) -> str:
        """Metric on the validation classes that is maximized."""
        return self.recipe.selection.metric


OnUpdate = Callable[[TuningPlan, StudyResults], None]


def plan(
    recipe: str | Path | Mapping[str, Any] | Recipe,
    space: str | Path | Mapping[str, Any],
    out: str | Path,
    *,
    sampler: str = "tpe",
    trials: int | None = None,
    storage: str | None = None,
    study: str | None = None,
    prune: bool | None = None,
    keep: bool = False,
    seed: int = 0,
    cache: str | Path | None = None,
    overrides: Overrides = (),
) -> TuningPlan:
    """Create a plan, and check all of it before anything is trained."""
    one_of("sampler", sampler, SAMPLERS)
    whole("seed", seed, low=0)
    if trials is not None:
        whole("trials", trials)
    found = load_recipe(recipe, overrides=overrides)
    if found.split.name == "standard":
        raise ValueError(
            "split.name is 'standard', which has no validation classes, and tuning must not use the test classes; set "
            "aside some of the training classes: --set split.name=fixed_validation"
        )
    searched = from_dict(space) if isinstance(space, Mapping) else load(space)
    check(searched, found)
    if sampler in ENUMERATING:
        lengths = [len(values) for values in finite(searched, sampler).values()]
        count = size(searched) or 0
        if sampler == "grid" and trials is None and count > MOST_COMBINATIONS:
            raise ValueError(
                f"trials is missing; the grid has {count:,} combinations. Set the number of trials to draw from it, or "
                f"use sampler 'in_turn', which needs {sum(lengths):,}"
            )
    elif trials is None:
        trials = TRIALS
    folder = Path(out)
    return TuningPlan(
        recipe=found,
        space=searched,
        out=folder,
        sampler=sampler,
        trials=trials,
        storage=storage,
        study=study or folder.absolute().name,
        prune=sampler != "in_turn" if prune is None else prune,
        keep=keep,
        seed=seed,
        cache=None if cache is None else Path(cache),
    )


def open_study(plan: TuningPlan) -> Study:
    """Open the study of a plan, or create it."""
    every = plan.recipe.evaluation.every
    pruners = optuna_module().pruners
    pruner = pruners.NopPruner()
    if plan.prune:
        warmup = plan.recipe.training.warmup_epochs // every if every else 0
        pruner = pruners.MedianPruner(n_startup_trials=STARTUP, n_warmup_steps=warmup)
    return Study(plan.out, plan.study, plan.storage, plan.recipe, plan.space, pruner=pruner)


class TrialFailed(Exception):
    """Raised inside Optuna's loop for a trial without a result."""


def write_results(study: Study, plan: TuningPlan, on_update: OnUpdate | None) -> StudyResults:
    """Write the current results of a study."""
    found = results.write(study, plan)
    if on_update is not None:
        on_update(plan, found)
    return found


def tune(
    plan: TuningPlan,
    *,
    display: Display | None = None,
    on_update: OnUpdate | None = None,
    worker: int = 0,
    parent: BaseProcess | None = None,
    device: str | None = None,
) -> StudyResults:
    """Run the missing trials one after the other, until ``parent`` has ended, and write the results after each."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("tuning trains each trial in one process and cannot run under torchrun; use --jobs instead")
    return _Worker(plan, display or Display(), on_update, worker, parent, device).run()


class _Worker:
    """Runs trials one after the other until there are enough."""

    def __init__(
        self,
        plan: TuningPlan,
        display: Display,
        on_update: OnUpdate | None,
        number: int,
        parent: BaseProcess | None,
        device: str | None,
    ) -> None:
        self.plan, self.display, self.on_update = plan, display, on_update
        self.number, self.parent, self.device = number, parent, device
        self.optuna, self.study = optuna_module(), open_study(plan)
        self.study.study.sampler = self._sampler()
        before = self.study.study.user_attrs.get("sampler", plan.sampler)
        if before != plan.sampler and number == 0:
            self.display.say(f"earlier trials used sampler {before!r}; new ones use {plan.sampler!r}")
        self.study.study.set_user_attr("sampler", plan.sampler)
        self.stopped: Stopped | None = None

    def run(self) -> StudyResults:
        while self._run_one():
            write_results(self.study, self.plan, self.on_update)
            if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
                # Free the memory of this trial before the next one needs it.
                gc.collect()
                torch.cuda.empty_cache()
            if self.stopped is not None:
                self.display.say(f"stopped; resume {self.plan.out} with the same command")
                raise self.stopped
            self._check_failures()
        return write_results(self.study, self.plan, self.on_update)

    def _run_one(self) -> bool:
        """Run the next trial; return False if there is none."""
        # One lock for choosing and starting a trial: in between another worker could start it too. The lock of the
        # trial is held until the study has its result: without it the trial would look abandoned.
        with ExitStack() as trial_lock, ExitStack() as study_lock, quiet():
            if not self._has_next(study_lock):
                return False
            self.study.study.optimize(partial(self._trial, trial_lock, study_lock), n_trials=1, catch=(TrialFailed,))
        return True

    def _has_next(self, study_lock: ExitStack) -> bool:
        """Lock the study and return whether there is a trial to run, queued or drawn by the sampler."""
        while self.parent is None or self.parent.is_alive():
            study_lock.enter_context(self.study.exclusive())
            self.study.recover()
            counted = self.study.counted()
            if any(trial.state == self.study.states.WAITING for trial in counted):
                return True
            if self.plan.trials is not None and len(counted) >= self.plan.trials:
                return False
            if self.plan.sampler not in ENUMERATING:
                return True
            values, taken = finite(self.plan.space, self.plan.sampler), self.study.taken_points()
            try:
                if self.plan.sampler == "grid":
                    point = next_combination(values, taken, self.plan.seed)
                else:
                    point = next_in_turn(values, taken)
            except Wait:
                study_lock.close()
                time.sleep(0.5)
                continue
            if point is not None:
                self.study.enqueue(point)
            return point is not None
        return False

    def _trial(self, trial_lock: ExitStack, study_lock: ExitStack, trial: Any) -> float:
        """Train with the settings of a trial and return the metric to maximize."""
        if self.study.is_redundant(trial, self.plan.trials, drawn=self.plan.sampler not in ENUMERATING):
            trial.set_user_attr("dropped", True)
            raise TrialFailed
        wanted = trial.user_attrs.get("point")
        values = {one.key: one.suggest(trial) for one in self.plan.space if wanted is None or one.key in wanted}
        folder = trial_lock.enter_context(self.study.claim(trial))
        study_lock.close()
        reporter = _Reporter(trial, self.plan)
        try:
            value, seconds, epoch = self._train_all(folder, values, trial, reporter)
        except StopTraining:
            self._say(trial, f"pruned at {reporter.best:.4f}, evaluation {reporter.count}", values)
            _clear(folder, self.plan)
            raise self.optuna.TrialPruned from None
        except Stopped as stopped:
            self.stopped = stopped
            raise TrialFailed from None
        except (OSError, ImportError):
            raise  # not an error of this trial
        except Exception as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            trial.set_user_attr("error", reason)
            self._say(trial, f"failed: {reason}", values)
            _clear(folder, self.plan)
            raise TrialFailed from None
        trial.set_user_attr("seconds", seconds)
        trial.set_user_attr("epoch", epoch)
        self._say(trial, f"validation {self.plan.metric} {value:.4f}", values)
        return value

    def _train_all(
        self, folder: Path, values: Mapping[str, Any], trial: Any, reporter: _Reporter
    ) -> tuple[float, float, int]:
        """Train a trial, on every fold of a k-fold split, and return its metric, seconds and selected epoch.

        The metric of a k-fold split is the mean over its folds, and the epoch that of the last fold.
        """
        folds = _folds(folder, self.plan)
        found: list[float] = []
        seconds, epoch = 0.0, 0
        for fold, place in enumerate(folds):
            metrics = self._finished(place)
            if metrics is None:
                own = {"split.fold": fold} if len(folds) > 1 else {}
                metrics = self._train(place, {**values, **own}, None if own else reporter)
            if not self.plan.keep:
                RunFolder(place).drop_checkpoints()
            found.append(float(metrics["validation"][self.plan.metric]))
            seconds, epoch = seconds + metrics["seconds"], metrics["epoch"]
            if len(folds) > 1:
                reporter.report_fold(sum(found) / len(found), last=fold + 1 == len(folds))
        return sum(found) / len(found), seconds, epoch

    def _finished(self, folder: Path) -> dict[str, Any] | None:
        """Return the metrics of a fold that was finished before an interruption; None if it was not."""
        run = RunFolder(folder)
        return json.loads(run.metrics.read_bytes()) if run.metrics.is_file() and is_finished(run) else None

    def _train(self, folder: Path, values: Mapping[str, Any], reporter: _Reporter | None) -> dict[str, Any]:
        from nearfar.training.trainer import train

        device = {} if self.device is None else {"training.device": self.device}
        unseen = {"evaluation.test": False, "evaluation.test_every": 0}
        recipe = load_recipe(self.plan.recipe, overrides={**device, **values, **unseen})
        begun = RunFolder(folder).recipe.is_file()
        if begun and reporter is not None:
            reporter.catch_up(folder)
        result = train(
            recipe,
            out=None if begun else folder,
            resume=folder if begun else None,
            display=_WithoutMessages(self.display),
            loggers=[] if reporter is None else [reporter],
            cache=self.plan.cache,
        )
        return result.metrics

    def _say(self, trial: Any, what: str, values: Mapping[str, Any]) -> None:
        of = f"/{self.plan.trials}" if self.plan.trials else ""
        self.display.say(f"trial {trial.number + 1}{of}: {what}  {results.settings_text(values)}")

    def _check_failures(self) -> None:
        ended = [trial for trial in self.study.counted() if trial.state.is_finished()]
        if len(ended) >= FAILURES and all("error" in trial.user_attrs for trial in ended):
            raise RuntimeError(f"all {len(ended)} trials failed; the last one: {ended[-1].user_attrs['error']}")

    def _sampler(self) -> Any:
        """Return the sampler of Optuna, with another seed for each call and worker: one seed would repeat points."""
        import numpy as np

        numbers = [self.plan.seed, len(self.study.study.get_trials(deepcopy=False)), self.number]
        seed = int(np.random.SeedSequence(numbers).generate_state(1)[0])
        samplers = self.optuna.samplers
        with quiet():
            if self.plan.sampler == "tpe":
                return samplers.TPESampler(seed=seed, constant_liar=True)
            return samplers.RandomSampler(seed=seed)


class _Reporter:
    """Logger that reports the evaluations of a trial to the study, and prunes the trial."""

    def __init__(self, trial: Any, plan: TuningPlan) -> None:
        self.trial, self.plan = trial, plan
        self.count, self.best = 0, float("-inf")
        epochs, every = plan.recipe.training.epochs, plan.recipe.evaluation.every
        self.last = -(-epochs // every) if epochs and every else None

    def log(self, step: int, values: Mapping[str, float]) -> None:
        value = values.get(f"metrics/validation/{self.plan.metric}")
        if value is None:
            return
        self._report(value)
        # The best epoch is selected in the end, so best values are compared; after the last one nothing is saved.
        if self.count != self.last and self.trial.should_prune():
            raise StopTraining

    def report_fold(self, mean: float, *, last: bool) -> None:
        """Report the mean over the folds so far, and prune the trial unless this was the last one."""
        self.count, self.best = self.count + 1, mean
        self.trial.report(mean, self.count)
        if not last and self.trial.should_prune():
            raise StopTraining

    def catch_up(self, folder: Path) -> None:
        """Report the evaluations before an interruption again, up to the checkpoint that the run resumes from."""
        from nearfar.training import checkpoint

        run = RunFolder(folder)
        if run.checkpoint.is_file():
            iteration = checkpoint.values_of(run.checkpoint)["state"]["iteration"]
            for line in read_log(run.log):
                value = (line.get("metrics") or {}).get("validation", {}).get(self.plan.metric)
                if value is not None and line["step"] <= iteration:
                    self._report(value)

    def _report(self, value: float) -> None:
        self.count, self.best = self.count + 1, max(self.best, value)
        self.trial.report(self.best, self.count)

    def close(self) -> None:
        pass


class _WithoutMessages(Display):
    """Shows the progress of a trial without its messages for each epoch."""

    def __init__(self, display: Display) -> None:
        self.display = display

    def watch(self, work: str) -> Any:
        return self.display.watch(work)

    def show(self, work: str, done: int, total: int | None, text: str) -> None:
        self.display.show(work, done, total, text)


def _folds(folder: Path, plan: TuningPlan) -> list[Path]:
    """Return the run folders of a trial: one, or one for each fold."""
    split = plan.recipe.split
    return [folder / f"fold{fold}" for fold in range(split.folds)] if split.name == "k_fold" else [folder]


def _clear(folder: Path, plan: TuningPlan) -> None:
    """Delete the runs of a trial without a result, or mark its folder if it is kept."""
    if plan.keep and folder.is_dir():
        (folder / "given_up").touch()
        return
    for place in _folds(folder, plan):
        RunFolder(place).discard()
    remove(folder, ())
