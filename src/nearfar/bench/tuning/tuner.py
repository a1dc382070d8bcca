"""Tuning: trains a recipe with different settings and compares them on validation classes.

Trials never see the test classes (``evaluation.test = false``), so nothing can be selected on them. The best settings
are written to best.toml, a complete recipe; training it evaluates the test classes, once.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from nearfar.bench import executors
from nearfar.bench.tuning import results, samplers
from nearfar.bench.tuning.results import StudyResults
from nearfar.bench.tuning.space import check, finite, from_dict, load, size
from nearfar.bench.tuning.study import Study, TuningPlan, optuna_module, quiet
from nearfar.training import checkpoint, trainer
from nearfar.training.recipe.files import Overrides
from nearfar.training.recipe.files import load as load_recipe
from nearfar.training.recipe.schema import Recipe
from nearfar.training.run.folder import RunFolder, read_log
from nearfar.training.run.loggers import StopTraining
from nearfar.training.run.provenance import is_finished
from nearfar.training.trainer import Stopped, catch_signals
from nearfar.utils import plugins
from nearfar.utils.folders import remove
from nearfar.utils.progress import Console, Display
from nearfar.utils.validation import one_of, whole

ENUMERATING = ("grid", "in_turn")  # samplers that enumerate values; the others draw them
SAMPLERS = ("tpe", "random", *ENUMERATING)
TRIALS = 50  # default of samplers that draw
MOST_COMBINATIONS = 1000  # of a grid without a number of trials
FAILURES = 3  # if so many trials fail and none succeeds, tuning ends

OnUpdate = Callable[[StudyResults], None]


class TrialFailed(Exception):
    """Raised inside Optuna's loop for a trial without a result."""


def tune(
    recipe: str | Path | Mapping[str, Any] | Recipe,
    space: str | Path | Mapping[str, Any],
    out: str | Path,
    *,
    sampler: str = "tpe",
    trials: int | None = None,
    storage: str | None = None,
    study: str | None = None,
    jobs: int = 1,
    prune: bool | None = None,
    keep: bool = False,
    seed: int = 0,
    cache: str | Path | None = None,
    overrides: Overrides = (),
    first: Mapping[str, Any] | None = None,
    display: Display | None = None,
    on_update: OnUpdate | None = None,
) -> StudyResults:
    """Search for the best settings of a recipe on its validation classes. The test classes are never used.

    Writes best.toml (a complete recipe) and trials.json to ``out``. The same call resumes an interrupted search, and
    more ``trials`` extend it.

    Args:
        recipe: A recipe with validation classes: a TOML file, its name, or its content.
        space: Keys to tune and their values: a TOML file, the name of a space, or its content.
        out: Folder of the results.
        sampler: "tpe", "random", "grid" (every combination) or "in_turn" (one key after the other).
        trials: Number of trials, including earlier ones; by default 50, or all of a grid.
        storage: Database that workers share, such as postgresql://…; by default a journal in ``out``.
        study: Name of the study in the database; by default that of ``out``.
        jobs: Trials at a time, each in a process of its own.
        prune: End trials early that are worse than the median of the others; by default unless ``sampler`` is
            "in_turn".
        keep: Keep all files of the trials, including checkpoints.
        seed: Seed of the sampler.
        cache: Folder of decoded images; by default $NEARFAR_CACHE or ~/.cache/nearfar.
        overrides: Changes to the recipe.
        first: Settings of the first trial of a study, by key of the recipe.
        display: Receives the progress.
        on_update: Called with the results after each trial.

    Returns:
        All trials of the study; ``best`` is the one whose recipe is best.toml.
    """
    one_of("sampler", sampler, SAMPLERS)
    whole("seed", seed, low=0)
    whole("jobs", jobs)
    if trials is not None:
        whole("trials", trials)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("tuning trains each trial in one process and cannot run under torchrun; use --jobs instead")
    out = Path(out)
    plan = TuningPlan(
        recipe=load_recipe(recipe, overrides=overrides),
        space=from_dict(space) if isinstance(space, Mapping) else load(space),
        out=out,
        sampler=sampler,
        trials=TRIALS if trials is None and sampler not in ENUMERATING else trials,
        storage=storage,
        study=study or out.absolute().name,
        prune=sampler != "in_turn" if prune is None else prune,
        keep=keep,
        seed=seed,
        cache=cache,
    )
    _check(plan)
    display = display or Display()
    if plan.prune and plan.recipe.evaluation.every == 0:
        display.say("evaluation.every is 0, so no trial can be pruned; --set evaluation.every=1 evaluates every epoch")
    opened = Study(plan)
    if first and not opened.trials():
        opened.enqueue(dict(first))
    before = opened.study.user_attrs.get("sampler", sampler)
    if before != sampler:
        display.say(f"earlier trials used sampler {before!r}; new ones use {sampler!r}")
    opened.study.set_user_attr("sampler", sampler)
    if jobs == 1:
        return _Worker(opened, display, on_update).run()
    _run_jobs(plan, jobs, not isinstance(display, Console), on_update)
    return _updated(opened, on_update)


def _check(plan: TuningPlan) -> None:
    """Check a plan before anything is trained."""
    if plan.recipe.split.name == "standard":
        raise ValueError(
            "split.name is 'standard', which has no validation classes, and tuning must not use the test classes; set "
            "aside some of the training classes: --set split.name=fixed_validation"
        )
    check(plan.space, plan.recipe)
    if plan.sampler in ENUMERATING:
        lengths = [len(values) for values in finite(plan.space, plan.sampler).values()]
        count = size(plan.space) or 0
        if plan.sampler == "grid" and plan.trials is None and count > MOST_COMBINATIONS:
            raise ValueError(
                f"trials is missing; the grid has {count:,} combinations. Set the number of trials to draw from it, or "
                f"use sampler 'in_turn', which needs {sum(lengths):,}"
            )


def _updated(study: Study, on_update: OnUpdate | None) -> StudyResults:
    """Write the current results of a study."""
    current = results.read(study)
    current.write()
    if on_update is not None:
        on_update(current)
    return current


def _run_jobs(plan: TuningPlan, jobs: int, silent: bool, on_update: OnUpdate | None) -> None:
    """Run the missing trials in several processes, which share only the storage."""
    context = multiprocessing.get_context("spawn")
    workers: list[BaseProcess] = []
    with catch_signals() as asked:
        # Round-robin over the GPUs, of which several workers may share one.
        for number, slot in enumerate(executors.slots(device=plan.recipe.training.device, jobs=jobs, per_gpu=jobs)):
            given = (plan, number, slot, silent, on_update, list(plugins.used()))
            process = context.Process(target=_work, args=given, name=f"worker {number}")
            executors.start(process, slot)
            workers.append(process)
        stopping = False
        while any(worker.is_alive() for worker in workers):
            if asked and not stopping:
                stopping = True
                for worker in workers:
                    worker.terminate()  # SIGTERM: the worker saves its trial and stops
            for worker in workers:
                worker.join(timeout=0.1)
    if asked:
        raise Stopped(asked[0], f"stopped; resume {plan.out} with the same command")
    if all(worker.exitcode for worker in workers):
        raise RuntimeError("all workers failed; see the messages above")


def _work(
    plan: TuningPlan, number: int, slot: executors.Slot, silent: bool, on_update: OnUpdate | None, files: Sequence[Path]
) -> None:
    """Run one worker as the main function of its process."""
    executors.begin(slot)
    plugins.use(*files)
    display = Display() if silent else Console(bars=False)
    try:
        _Worker(Study(plan), display, on_update, number, slot.device).run()
    except Stopped as stopped:
        raise SystemExit(stopped.code) from None
    except Exception as error:
        Console(bars=False).say(f"worker {number}: {' '.join(str(error).split())}")
        raise SystemExit(1) from None


class _Worker:
    """Runs trials one after the other until there are enough, and writes the results after each."""

    def __init__(
        self, study: Study, display: Display, on_update: OnUpdate | None, number: int = 0, device: str | None = None
    ) -> None:
        self.study, self.plan, self.display, self.on_update = study, study.plan, display, on_update
        self.number, self.device = number, device
        self.optuna = optuna_module()
        self.study.study.sampler = self._sampler()
        self.stopped: Stopped | None = None

    def run(self) -> StudyResults:
        while self._run_one():
            _updated(self.study, self.on_update)
            if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
                # Free the memory of this trial before the next one needs it.
                gc.collect()
                torch.cuda.empty_cache()
            if self.stopped is not None:
                self.display.say(f"stopped; resume {self.plan.out} with the same command")
                raise self.stopped
            ended = [trial for trial in self.study.counted() if trial.state.is_finished()]
            if len(ended) >= FAILURES and all("error" in trial.user_attrs for trial in ended):
                raise RuntimeError(f"all {len(ended)} trials failed; the last one: {ended[-1].user_attrs['error']}")
        return _updated(self.study, self.on_update)

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
        """Lock the study and return whether there is a trial to run; one that is not in the queue is put there."""
        plan, states = self.plan, self.study.states
        while True:
            study_lock.enter_context(self.study.exclusive())
            self.study.recover()
            counted = self.study.counted()
            if any(trial.state == states.WAITING for trial in counted):
                return True
            if plan.trials is not None and len(counted) >= plan.trials:
                return False
            point = self._next_point()
            if point is not None:
                self.study.enqueue(point)
                return True
            # The values of the next key depend on trials that other workers are running.
            if plan.sampler != "in_turn" or all(trial.state.is_finished() for trial in counted):
                return False
            study_lock.close()
            time.sleep(0.5)

    def _next_point(self) -> samplers.Point | None:
        if self.plan.sampler not in ENUMERATING:
            return {}
        values, tried = finite(self.plan.space, self.plan.sampler), self.study.tried()
        if self.plan.sampler == "grid":
            return samplers.next_combination(values, tried, self.plan.seed)
        return samplers.next_in_turn(values, tried)

    def _trial(self, trial_lock: ExitStack, study_lock: ExitStack, trial: Any) -> float:
        """Train with the settings of a trial and return the metric to maximize."""
        if self.study.is_surplus(trial):
            trial.set_user_attr("dropped", True)
            raise TrialFailed
        point = trial.user_attrs["point"]
        asked = [parameter for parameter in self.plan.space if not point or parameter.key in point]
        values = {parameter.key: parameter.suggest(trial) for parameter in asked}
        folder = trial_lock.enter_context(self.study.claim(trial))
        study_lock.close()
        reporter = _Reporter(trial, self.plan)
        try:
            value, seconds, epoch = self._train_all(folder, values, reporter)
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

    def _train_all(self, folder: Path, values: Mapping[str, Any], reporter: _Reporter) -> tuple[float, float, int]:
        """Train a trial, on every fold of a k-fold split, and return its metric, seconds and selected epoch.

        The metric of a k-fold split is the mean over its folds, and the epoch that of the last fold.
        """
        folds = _folds(folder, self.plan)
        scores: list[float] = []
        seconds, epoch = 0.0, 0
        for fold, place in enumerate(folds):
            run = RunFolder(place)
            if run.metrics.is_file() and is_finished(run):  # before an interruption
                metrics = json.loads(run.metrics.read_bytes())
            elif len(folds) > 1:
                metrics = self._train(place, {**values, "split.fold": fold}, None)
            else:
                metrics = self._train(place, values, reporter)
            if not self.plan.keep:
                run.drop_checkpoints()
            scores.append(float(metrics["validation"][self.plan.metric]))
            seconds, epoch = seconds + metrics["seconds"], metrics["epoch"]
            if len(folds) > 1:
                reporter.report_fold(sum(scores) / len(scores), last=fold + 1 == len(folds))
        return sum(scores) / len(scores), seconds, epoch

    def _train(self, folder: Path, values: Mapping[str, Any], reporter: _Reporter | None) -> dict[str, Any]:
        device = {} if self.device is None else {"training.device": self.device}
        unseen = {"evaluation.test": False, "evaluation.test_every": 0}
        recipe = load_recipe(self.plan.recipe, overrides={**device, **values, **unseen})
        begun = RunFolder(folder).recipe.is_file()
        if begun and reporter is not None:
            reporter.catch_up(folder)
        result = trainer.train(
            recipe,
            out=None if begun else folder,
            resume=folder if begun else None,
            display=_WithoutMessages(self.display),
            loggers=[] if reporter is None else [reporter],
            cache=self.plan.cache,
        )
        return result.metrics

    def _say(self, trial: Any, outcome: str, values: Mapping[str, Any]) -> None:
        of = f"/{self.plan.trials}" if self.plan.trials else ""
        self.display.say(f"trial {trial.number + 1}{of}: {outcome}  {results.settings_text(values)}")

    def _sampler(self) -> Any:
        """Return the sampler of Optuna, with another seed for each call and worker: one seed would repeat points."""
        import numpy as np

        numbers = [self.plan.seed, len(self.study.study.get_trials(deepcopy=False)), self.number]
        seed = int(np.random.SeedSequence(numbers).generate_state(1)[0])
        with quiet():
            if self.plan.sampler == "tpe":
                return self.optuna.samplers.TPESampler(seed=seed, constant_liar=True)
            return self.optuna.samplers.RandomSampler(seed=seed)


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
        self.best = float("-inf")
        self._report(mean)
        if not last and self.trial.should_prune():
            raise StopTraining

    def catch_up(self, folder: Path) -> None:
        """Report the evaluations before an interruption again, up to the checkpoint that the run resumes from."""
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
