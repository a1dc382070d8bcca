"""Tuning: trials of a recipe with other settings, judged by the validation classes alone.

The test classes are left out of every trial (``evaluation.test = false``), so that nothing can be chosen by them. What
was found is in best.toml, a complete recipe; training it measures the test, once.
"""

from __future__ import annotations

import gc
import os
import shutil
import time
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from nearfar.bench.tuning import results
from nearfar.bench.tuning.plan import POINTWISE, Plan, plan
from nearfar.bench.tuning.samplers import Wait, grid_point, next_in_turn
from nearfar.bench.tuning.space import finite
from nearfar.bench.tuning.study import Study, optuna_module, quiet
from nearfar.training.loop.signals import Stopped
from nearfar.training.recipe.files import load as load_recipe
from nearfar.training.run.console import Display, Silent, Status
from nearfar.training.run.folder import RunFolder, read_log

__all__ = ["Plan", "open_study", "plan", "tune"]

FAILURES = 3  # at the beginning, one after the other: then something is wrong with all of them
STARTUP = 5  # trials that are never pruned: there must be something to compare with


class _Failed(Exception):
    """A trial that came to nothing."""


def open_study(plan: Plan) -> Study:
    """The study of a plan, new or as it was left; refused where it was begun with another recipe or space."""
    every = plan.recipe.evaluation.every
    pruners = optuna_module().pruners
    pruner = pruners.NopPruner()
    if plan.prune:
        warmup = plan.recipe.training.warmup_epochs // every if every else 0
        pruner = pruners.MedianPruner(n_startup_trials=STARTUP, n_warmup_steps=warmup)
    return Study(plan.out, plan.study, plan.storage, plan.recipe, plan.space, pruner=pruner)


def tune(
    plan: Plan,
    *,
    display: Display | None = None,
    worker: int = 0,
    above: BaseProcess | None = None,
    device: str | None = None,
) -> results.Results:
    """Make the trials that are missing, and write down what was found.

    Args:
        plan: What is tuned.
        display: What a person sees, see ``nearfar.training.run.console``.
        worker: Its number among those that work on the study in this sitting; see ``nearfar.bench.tuning.workers``.
        above: No new trial is begun when this process has ended.
        device: Where this worker trains, if not where the recipe says; nothing of it is written to best.toml.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("tuning runs in one process for each trial, and not under torchrun; --jobs makes several")
    return _Worker(plan, display or Silent(), worker, above, device).run()


class _Worker:
    """Makes trials, one after the other, until there are enough."""

    def __init__(
        self, plan: Plan, display: Display, number: int, above: BaseProcess | None, device: str | None
    ) -> None:
        self.plan, self.display, self.number, self.above, self.device = plan, display, number, above, device
        self.optuna, self.study = optuna_module(), open_study(plan)
        self.study.study.sampler = self._sampler()
        before = self.study.study.user_attrs.get("sampler", plan.sampler)
        if before != plan.sampler and number == 0:
            self.display.say(f"trials were drawn by sampler {before!r} so far, and are by {plan.sampler!r} from now on")
        self.study.study.set_user_attr("sampler", plan.sampler)
        self.stopped: Stopped | None = None

    def run(self) -> results.Results:
        while self._make_one():
            results.write(self.study, self.plan)
            if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
                # What a trial held of a device, before the next one asks for it.
                gc.collect()
                torch.cuda.empty_cache()
            if self.stopped is not None:
                self.display.say(f"stopped; the same command goes on with {self.plan.out}")
                raise self.stopped
            self._refuse_to_fail_forever()
        return results.write(self.study, self.plan)

    def _make_one(self) -> bool:
        """Make the next trial; False where there is none."""
        # It is found and taken in one turn: in between another worker might take it too. Then it is this worker's own
        # until the study knows its result: to others it would seem to be left.
        with ExitStack() as held, ExitStack() as turn, quiet():
            if not self._go_on(turn):
                return False
            self.study.study.optimize(partial(self._trial, held, turn), n_trials=1, catch=(_Failed,))
        return True

    def _go_on(self, turn: ExitStack) -> bool:
        """Whether there is a trial to make; one that is queued, or one of a sampler's own. It is this worker's turn."""
        while self.above is None or self.above.is_alive():
            turn.enter_context(self.study.turn())
            self.study.recover()
            counted = self.study.counted()
            if any(trial.state == self.study.states.WAITING for trial in counted):
                return True
            if self.plan.trials is not None and len(counted) >= self.plan.trials:
                return False
            if self.plan.sampler not in POINTWISE:
                return True
            values, tried = finite(self.plan.space, self.plan.sampler), self.study.tried()
            try:
                point = grid_point(values, tried, self.plan.seed) if self.plan.sampler == "grid" else None
                point = next_in_turn(values, tried) if self.plan.sampler == "in_turn" else point
            except Wait:
                turn.close()
                time.sleep(0.5)
                continue
            if point is not None:
                self.study.enqueue(point)
            return point is not None
        return False

    def _trial(self, held: ExitStack, turn: ExitStack, trial: Any) -> float:
        """A training, as a number to maximise."""
        if self.study.is_superfluous(trial, self.plan.trials, drawn=self.plan.sampler not in POINTWISE):
            trial.set_user_attr("dropped", True)
            raise _Failed
        wanted = trial.user_attrs.get("point")
        values = {one.key: one.suggested(trial) for one in self.plan.space if wanted is None or one.key in wanted}
        folder = held.enter_context(self.study.owned(trial))
        turn.close()
        listener = _Listener(trial, self.plan, self.optuna)
        try:
            metrics = self._trained(folder, values, listener)
        except self.optuna.TrialPruned:
            self._say(trial, f"pruned at {listener.best:.4f}, evaluation {listener.count}", values)
            _clear(folder, keep=self.plan.keep)
            raise
        except Stopped as stopped:
            self.stopped = stopped
            raise _Failed from None
        except (OSError, ImportError):
            raise  # not this trial's fault
        except Exception as error:
            said = " ".join(str(error).split()) or type(error).__name__
            trial.set_user_attr("error", said)
            self._say(trial, f"failed: {said}", values)
            _clear(folder, keep=self.plan.keep)
            raise _Failed from None
        trial.set_user_attr("seconds", metrics["seconds"])
        trial.set_user_attr("epoch", metrics["epoch"])
        if not self.plan.keep:
            shutil.rmtree(folder / "checkpoint", ignore_errors=True)
        value = float(metrics["validation"][self.plan.metric])
        self._say(trial, f"validation {self.plan.metric} {value:.4f}", values)
        return value

    def _trained(self, folder: Path, values: Mapping[str, Any], listener: _Listener) -> dict[str, Any]:
        from nearfar.training.api import start

        here = {} if self.device is None else {"training.device": self.device}
        recipe = load_recipe(self.plan.recipe, overrides={**here, **values, "evaluation.test": False})
        begun = RunFolder(folder).recipe.is_file()
        if begun:
            listener.catch_up(folder)
        result = start(
            recipe,
            out=None if begun else folder,
            resume=folder if begun else None,
            display=_Shown(self.display),
            loggers=[listener],
            cache=self.plan.cache,
        )
        return result.metrics

    def _say(self, trial: Any, what: str, values: Mapping[str, Any]) -> None:
        of = f"/{self.plan.trials}" if self.plan.trials else ""
        self.display.say(f"trial {trial.number + 1}{of}: {what}  {results.shown(values)}")

    def _refuse_to_fail_forever(self) -> None:
        ended = [trial for trial in self.study.counted() if trial.state.is_finished()]
        if len(ended) >= FAILURES and all("error" in trial.user_attrs for trial in ended):
            raise RuntimeError(f"all {len(ended)} trials failed; the last one: {ended[-1].user_attrs['error']}")

    def _sampler(self) -> Any:
        """Optuna's. Another seed for each sitting and worker: the same would draw the same points again."""
        import numpy as np

        numbers = [self.plan.seed, len(self.study.study.get_trials(deepcopy=False)), self.number]
        seed = int(np.random.SeedSequence(numbers).generate_state(1)[0])
        samplers = self.optuna.samplers
        with quiet():
            if self.plan.sampler == "tpe":
                return samplers.TPESampler(seed=seed, constant_liar=True)
            return samplers.RandomSampler(seed=seed)


class _Listener:
    """Hears the evaluations of a trial, passes them on to the study, and ends the trial when it is hopeless."""

    def __init__(self, trial: Any, plan: Plan, optuna: Any) -> None:
        self.trial, self.plan, self.pruned = trial, plan, optuna.TrialPruned
        self.count, self.best = 0, float("-inf")
        epochs, every = plan.recipe.training.epochs, plan.recipe.evaluation.every
        self.last = -(-epochs // every) if epochs and every else None

    def log(self, step: int, values: Mapping[str, float]) -> None:
        value = values.get(f"metrics/validation/{self.plan.metric}")
        if value is None:
            return
        self._hear(value)
        # The best epoch will be selected, so it is the best one that is compared; a last one has nothing to save.
        if self.count != self.last and self.trial.should_prune():
            raise self.pruned

    def catch_up(self, folder: Path) -> None:
        """Hear again what was evaluated before an interruption, up to the checkpoint that the run goes on from."""
        from nearfar.training.run import checkpoints

        last = RunFolder(folder).last
        checkpoints.recover(last)
        if checkpoints.exists(last):
            iteration = checkpoints.values_of(last)["place"]["iteration"]
            for line in read_log(RunFolder(folder).log):
                value = (line.get("metrics") or {}).get("validation", {}).get(self.plan.metric)
                if value is not None and line["step"] <= iteration:
                    self._hear(value)

    def _hear(self, value: float) -> None:
        self.count, self.best = self.count + 1, max(self.best, value)
        self.trial.report(self.best, self.count)

    def close(self) -> None:
        pass


class _Shown(Silent):
    """Progress of a trial; what it says at each epoch is too much for many of them."""

    def __init__(self, display: Display) -> None:
        self.display = display

    def watch(self, work: str) -> Any:
        return self.display.watch(work)

    def show(self, status: Status) -> None:
        self.display.show(status)


def _clear(folder: Path, *, keep: bool) -> None:
    """Nothing stays of a trial without a result, unless it is wanted; then it is marked."""
    if keep and folder.is_dir():
        (folder / "given_up").touch()
    else:
        shutil.rmtree(folder, ignore_errors=True)
