"""Studies: trials that any number of workers share, in a journal in the folder of the study, or in a database.

Trials that have ended (finished, pruned, failed) are never repeated. Trials that were interrupted, and those of workers
that died, are queued again and resume from their checkpoint if it still exists. The lock of a trial's folder tells at
once whether a worker on this machine is alive; in a database heartbeats find dead workers on other machines.
"""

from __future__ import annotations

import socket
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from nearfar.bench.tuning.samplers import Point, Tried
from nearfar.bench.tuning.space import Space, to_dict
from nearfar.training.recipe.files import from_dict
from nearfar.training.recipe.files import to_dict as recipe_tables
from nearfar.training.recipe.schema import Recipe
from nearfar.training.run.folder import contradictions
from nearfar.utils.folders import claim
from nearfar.utils.system import exclusive, require

HEARTBEAT, GRACE = 60, 180  # seconds between heartbeats, and without one until a worker counts as dead
STARTUP = 5  # trials before pruning begins
JOURNAL = "study.log"
TRIALS, LOCKS = "trials", ".locks"


@dataclass(frozen=True)
class TuningPlan:
    """What to tune, and how: the arguments of ``tune``, checked."""

    recipe: Recipe
    space: Space
    out: Path
    sampler: str
    trials: int | None  # None for all of a grid
    storage: str | None
    study: str
    prune: bool
    keep: bool
    seed: int
    cache: str | Path | None

    @property
    def metric(self) -> str:
        """Metric on the validation classes that is maximized."""
        return self.recipe.selection.metric


def optuna_module() -> Any:
    """Import Optuna."""
    return require("tuning", "optuna", "nearfar[tune]")


class Study:
    """The trials of a plan."""

    def __init__(self, plan: TuningPlan) -> None:
        optuna = optuna_module()
        self.plan, self.states = plan, optuna.trial.TrialState
        claim(plan.out, "study", [plan.recipe.data.root])
        for place in (plan.out / TRIALS, plan.out / LOCKS):
            place.mkdir(parents=True, exist_ok=True)
        with quiet():
            self._storage = _storage(plan)
        self.study = self._create()
        changed = self._changed()
        if changed and not any(trial.state != self.states.FAIL for trial in self.trials()):
            # All trials failed, and the user has changed what was wrong.
            optuna.delete_study(study_name=plan.study, storage=self._storage)
            self.study, changed = self._create(), ""
        if changed:
            raise ValueError(
                f"the study {plan.study!r} was started with another {changed}; choose another study or another out"
            )
        self.study.set_user_attr("space", to_dict(plan.space))
        self.study.set_user_attr("recipe", recipe_tables(plan.recipe))

    def trials(self) -> list[Any]:
        """Return all trials but those that were dropped as surplus."""
        trials: list[Any] = self.study.get_trials(deepcopy=False)
        return [trial for trial in trials if "dropped" not in trial.user_attrs]

    def counted(self) -> list[Any]:
        """Return the trials that count towards the number of trials: all but the interrupted ones."""
        return [trial for trial in self.trials() if not self._was_interrupted(trial)]

    def tried(self) -> list[Tried]:
        """Return the points of all trials, including interrupted ones, which are queued again."""
        latest = {repr(sorted(point.items())): trial for trial in self.trials() if (point := _point(trial))}
        return [
            Tried(
                trial.user_attrs["point"],
                trial.value if trial.state == self.states.COMPLETE else None,
                trial.state.is_finished() and not self._was_interrupted(trial),
            )
            for trial in latest.values()
        ]

    def exclusive(self) -> AbstractContextManager[object]:
        """Lock the choice of the next trial among workers with this folder."""
        return FileLock(self._lock("turn"))

    def enqueue(self, point: Point) -> None:
        """Queue a trial with these settings; with none, the sampler draws them."""
        self.study.enqueue_trial(point, user_attrs={"point": point})

    def recover(self) -> None:
        """Queue interrupted trials and those of dead workers again; only inside ``exclusive``."""
        optuna = optuna_module()
        for trial in self.trials():
            if trial.state != self.states.RUNNING:
                continue
            if not self._is_held(trial):
                if self._is_abandoned(trial):
                    self.study.tell(trial.number, state=self.states.FAIL, skip_if_finished=True)
            elif self.plan.storage is not None:
                # Its worker is alive, even if it sent no heartbeat while the machine was suspended.
                self._storage.record_heartbeat(trial._trial_id)
        optuna.storages.fail_stale_trials(self.study)
        again = {trial.user_attrs.get("again") for trial in self.study.get_trials(deepcopy=False)}
        for trial in self.trials():
            if self._was_interrupted(trial) and trial.number not in again and not self._is_held(trial):
                copy = optuna.trial.create_trial(
                    state=self.states.WAITING,
                    params=trial.params,  # it may have ended before it had all of them
                    distributions=trial.distributions,
                    user_attrs={**trial.user_attrs, "again": trial.number},
                    system_attrs=trial.system_attrs,
                )
                self.study.add_trial(copy)

    def is_surplus(self, trial: Any) -> bool:
        """Return whether a worker on another machine was faster: with this point, or with the last trial."""
        before = [other for other in self.counted() if other.number < trial.number]
        point = _point(trial)
        taken = point is None or (point and any(_point(other) == point for other in before))
        return bool(taken) or (self.plan.trials is not None and len(before) >= self.plan.trials)

    @contextmanager
    def claim(self, trial: Any) -> Iterator[Path]:
        """Lock the folder of a trial and return it; the lock ends with this process at the latest."""
        name = trial.user_attrs.get("folder") or f"{trial.number + 1:04d}"
        folder = self.plan.out / TRIALS / name
        with exclusive(self._lock(name), RuntimeError(f"{folder} is in use by another process")):
            trial.set_user_attr("folder", name)
            trial.set_user_attr("worker", self._worker())
            yield folder

    def _was_interrupted(self, trial: Any) -> bool:
        """Whether a trial ended without a result and without an error."""
        return trial.state == self.states.FAIL and "error" not in trial.user_attrs

    def _is_abandoned(self, trial: Any) -> bool:
        """Whether a trial that is not locked was started on this machine; elsewhere only heartbeats tell."""
        worker = trial.user_attrs.get("worker")
        # Without a worker, its worker died before `claim`; in a shared database it may be about to call it.
        return self.plan.storage is None if worker is None else worker == self._worker()

    def _is_held(self, trial: Any) -> bool:
        """Whether a process has locked the folder of a trial."""
        if "folder" not in trial.user_attrs:
            return False
        try:
            with FileLock(self._lock(trial.user_attrs["folder"]), blocking=False):
                return False
        except Timeout:
            return True

    def _lock(self, folder: str) -> Path:
        return self.plan.out / LOCKS / folder

    def _worker(self) -> str:
        return f"{socket.gethostname()}:{self.plan.out.resolve()}"

    def _create(self) -> Any:
        optuna, recipe = optuna_module(), self.plan.recipe
        pruner = optuna.pruners.NopPruner()
        if self.plan.prune:
            every = recipe.evaluation.every
            warmup = recipe.training.warmup_epochs // every if every else 0
            pruner = optuna.pruners.MedianPruner(n_startup_trials=STARTUP, n_warmup_steps=warmup)
        with quiet():
            return optuna.create_study(
                storage=self._storage,
                study_name=self.plan.study,
                pruner=pruner,
                direction="maximize",
                load_if_exists=True,
            )

    def _changed(self) -> str:
        """Describe what differs from the start of the study; empty if nothing does."""
        attributes = self.study.user_attrs
        if "recipe" not in attributes:
            return ""
        changed = contradictions(from_dict(attributes["recipe"]), self.plan.recipe)
        if changed:
            return f"recipe ({'; '.join(changed)})"
        return "space" if attributes.get("space") != to_dict(self.plan.space) else ""


@contextmanager
def quiet() -> Iterator[None]:
    """Silence Optuna; the display reports the trials."""
    optuna = optuna_module()
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            yield
    finally:
        optuna.logging.set_verbosity(before)


def _storage(plan: TuningPlan) -> Any:
    storages, url = optuna_module().storages, plan.storage
    if url is None:
        return storages.JournalStorage(storages.journal.JournalFileBackend(str(plan.out / JOURNAL)))
    # Let workers wait for each other's writes instead of failing.
    settings = {"connect_args": {"timeout": 60}} if url.startswith("sqlite") else {"pool_pre_ping": True}
    try:
        return storages.RDBStorage(url, engine_kwargs=settings, heartbeat_interval=HEARTBEAT, grace_period=GRACE)
    except ImportError:
        raise
    except Exception as error:  # errors of SQLAlchemy; the URL may contain a password
        reason = str(error).splitlines()[0]
        raise ValueError(f"the storage {url.rpartition('@')[2]!r} cannot be opened: {reason}") from None


def _point(trial: Any) -> Point | None:
    point: Point | None = trial.user_attrs.get("point")
    return point
