"""Studies: trials in a database that any number of workers share, on one machine or on many.

Trials that have ended (finished, pruned, failed) are never repeated. Trials that were interrupted, and those of workers
that died, are queued again and resume from their checkpoint if it still exists. Optuna's heartbeat finds dead workers
on other machines. Its retry callback is not used: it covers only lost heartbeats, while a lock tells at once whether a
worker on this machine is alive, and stopped trials have to be repeated as well.
"""

from __future__ import annotations

import socket
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from nearfar.bench.tuning.samplers import TakenPoint
from nearfar.bench.tuning.space import Space, to_dict
from nearfar.training.recipe.files import from_dict
from nearfar.training.recipe.files import to_dict as recipe_tables
from nearfar.training.recipe.schema import Recipe
from nearfar.training.run.folder import contradictions
from nearfar.utils.folders import claim
from nearfar.utils.system import exclusive, require

HEARTBEAT, GRACE = 60, 180  # seconds between heartbeats, and without one until a worker counts as dead
DATABASE = "study.db"
TRIALS, LOCKS = "trials", ".locks"


def optuna_module() -> Any:
    """Import Optuna."""
    return require("tuning", "optuna", "nearfar[tune]")


class Study:
    """The trials of a recipe and a space."""

    def __init__(self, out: Path, name: str, storage: str | None, recipe: Recipe, space: Space, *, pruner: Any) -> None:
        optuna = optuna_module()
        self.out, self.states = out, optuna.trial.TrialState
        claim(out, "study", [recipe.data.root])
        for place in (out / TRIALS, out / LOCKS):
            place.mkdir(parents=True, exist_ok=True)
        self.name, self._pruner, self._is_shared = name, pruner, storage is not None
        with quiet():
            self._storage = _storage(storage or f"sqlite:///{(out / DATABASE).absolute()}")
        self.study = self._create()
        changed = self._changed(recipe, space)
        if changed and not any(trial.state != self.states.FAIL for trial in self.trials()):
            # All trials failed, and the user has changed what was wrong.
            optuna.delete_study(study_name=name, storage=self._storage)
            self.study, changed = self._create(), ""
        if changed:
            raise ValueError(
                f"the study {name!r} was started with another {changed}; choose another study or another out"
            )
        self.study.set_user_attr("space", to_dict(space))
        self.study.set_user_attr("recipe", recipe_tables(recipe))

    def trials(self) -> list[Any]:
        """Return all trials but those that were dropped as redundant."""
        found: list[Any] = self.study.get_trials(deepcopy=False)
        return [trial for trial in found if "dropped" not in trial.user_attrs]

    def counted(self) -> list[Any]:
        """Return the trials that count towards the number of trials: all but the interrupted ones."""
        return [trial for trial in self.trials() if not self.was_interrupted(trial)]

    def was_interrupted(self, trial: Any) -> bool:
        """Return whether a trial ended without a result and without an error."""
        return trial.state == self.states.FAIL and "error" not in trial.user_attrs

    def taken_points(self) -> list[TakenPoint]:
        """Return the points that are taken, including interrupted ones, which are queued again."""
        latest = {repr(sorted(point.items())): trial for trial in self.trials() if (point := _point(trial)) is not None}
        return [
            TakenPoint(
                trial.user_attrs["point"],
                trial.value if trial.state == self.states.COMPLETE else None,
                trial.state.is_finished() and not self.was_interrupted(trial),
            )
            for trial in latest.values()
        ]

    def exclusive(self) -> AbstractContextManager[object]:
        """Lock the choice of the next trial among workers with this folder: SQLite could give one trial to two."""
        return FileLock(self._lock("turn"))

    def enqueue(self, point: dict[str, Any]) -> None:
        """Queue a trial at a point."""
        self._queue(point, {"point": point, "claim": f"point {sorted(point.items())}"})

    def recover(self) -> None:
        """Queue interrupted trials and those of dead workers again; only inside ``exclusive``."""
        for trial in self.trials():
            if trial.state != self.states.RUNNING:
                continue
            if self._is_held(trial):
                # Its worker is alive, even if it sent no heartbeat while the machine was suspended.
                self._storage.record_heartbeat(trial._trial_id)
            elif self._is_abandoned(trial):
                self.study.tell(trial.number, state=self.states.FAIL, skip_if_finished=True)
        optuna_module().storages.fail_stale_trials(self.study)
        again = {trial.user_attrs.get("again") for trial in self.study.get_trials(deepcopy=False)}
        for trial in self.trials():
            # It may have ended before it had all its values.
            values = {**trial.user_attrs.get("queued", {}), **trial.params}
            if values and self.was_interrupted(trial) and trial.number not in again and not self._is_held(trial):
                kept = {name: trial.user_attrs[name] for name in ("point", "folder") if name in trial.user_attrs}
                self._queue(values, {**kept, "again": trial.number, "claim": f"again {trial.number}"})

    def is_redundant(self, trial: Any, most: int | None, *, drawn: bool = True) -> bool:
        """Return whether another worker was faster."""
        before = [one for one in self.trials() if one.number < trial.number]
        claim = trial.user_attrs.get("claim")
        if claim is None and not drawn:
            return True
        if claim is not None and any(one.user_attrs.get("claim") == claim for one in before):
            return True
        return most is not None and sum(not self.was_interrupted(one) for one in before) >= most

    @contextmanager
    def claim(self, trial: Any) -> Iterator[Path]:
        """Lock the folder of a trial and return it; the lock ends with this process at the latest."""
        name = trial.user_attrs.get("folder") or f"{trial.number + 1:04d}"
        folder = self.out / TRIALS / name
        with exclusive(self._lock(name), RuntimeError(f"{folder} is in use by another process")):
            trial.set_user_attr("folder", name)
            trial.set_user_attr("worker", self._worker())
            yield folder

    def _queue(self, values: dict[str, Any], attributes: dict[str, Any]) -> None:
        self.study.enqueue_trial(values, user_attrs={**attributes, "queued": values})

    def _is_abandoned(self, trial: Any) -> bool:
        """Whether a trial that is not locked was started on this machine; elsewhere only heartbeats tell."""
        worker = trial.user_attrs.get("worker")
        # Without a worker, its worker died before `claim`; in a shared database it may be about to call it.
        return not self._is_shared if worker is None else worker == self._worker()

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
        return self.out / LOCKS / folder

    def _worker(self) -> str:
        return f"{socket.gethostname()}:{self.out.resolve()}"

    def _create(self) -> Any:
        with quiet():
            return optuna_module().create_study(
                storage=self._storage,
                study_name=self.name,
                pruner=self._pruner,
                direction="maximize",
                load_if_exists=True,
            )

    def _changed(self, recipe: Recipe, space: Space) -> str:
        """Describe what differs from the start of the study; empty if nothing does."""
        attributes = self.study.user_attrs
        if "recipe" not in attributes:
            return ""
        changed = contradictions(from_dict(attributes["recipe"]), recipe)
        if changed:
            return f"recipe ({'; '.join(changed)})"
        return "space" if attributes.get("space") != to_dict(space) else ""


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


def _storage(url: str) -> Any:
    optuna = optuna_module()
    # Let workers wait for each other's writes instead of failing.
    settings = {"connect_args": {"timeout": 60}} if url.startswith("sqlite") else {"pool_pre_ping": True}
    try:
        return optuna.storages.RDBStorage(url, engine_kwargs=settings, heartbeat_interval=HEARTBEAT, grace_period=GRACE)
    except ImportError:
        raise
    except Exception as error:  # errors of SQLAlchemy; the URL may contain a password
        reason = str(error).splitlines()[0]
        raise ValueError(f"the storage {url.rpartition('@')[2]!r} cannot be opened: {reason}") from None


def _point(trial: Any) -> dict[str, Any] | None:
    found: dict[str, Any] | None = trial.user_attrs.get("point")
    return found
