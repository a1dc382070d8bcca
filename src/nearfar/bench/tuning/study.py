"""A study: trials in a data base that any number of workers share, on one machine or on many.

Trials that somebody ended (finished, pruned, failed) are never made again. Those that were interrupted, and those whose
worker is gone, are queued again and go on from their checkpoint where that is still there.
"""

from __future__ import annotations

import socket
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from nearfar.bench.tuning.samplers import Tried
from nearfar.bench.tuning.space import Space, to_dict
from nearfar.training.recipe.files import from_dict, upgrade
from nearfar.training.recipe.files import to_dict as recipe_tables
from nearfar.training.recipe.schema import Recipe
from nearfar.training.run.folder import contradictions
from nearfar.utils.system import locked

HEARTBEAT, GRACE = 60, 180  # seconds between signs of life, and until a silent worker is given up
DATABASE = "study.db"
TRIALS, LOCKS = "trials", ".locks"


def optuna_module() -> Any:
    """Optuna, or a line that names the extra."""
    try:
        import optuna
    except ImportError as error:
        raise ImportError("tuning needs optuna; install it with: pip install 'nearfar[tune]'") from error
    return optuna


class Study:
    """The trials of a recipe and a space.

    Args:
        out: Where the folders of trials lie, and the data base unless ``storage`` names one.
        name: Of the study in its data base.
        storage: The address of a data base, such as postgresql://…; SQLite in ``out`` unless told.
        recipe: What is tuned; a study that was begun with another one is refused, and so is another ``space``.
        pruner: Of Optuna.
    """

    def __init__(self, out: Path, name: str, storage: str | None, recipe: Recipe, space: Space, *, pruner: Any) -> None:
        optuna = optuna_module()
        self.out, self.states = out, optuna.trial.TrialState
        for place in (out / TRIALS, out / LOCKS):
            place.mkdir(parents=True, exist_ok=True)
        self.name, self._pruner, self._is_shared = name, pruner, storage is not None
        with quiet():
            self._storage = _storage(storage or f"sqlite:///{(out / DATABASE).absolute()}")
        self.study = self._create()
        changed = self._changed(recipe, space)
        if changed and not any(trial.state != self.states.FAIL for trial in self.trials()):
            # Nothing came of it, and now somebody mends what was wrong.
            optuna.delete_study(study_name=name, storage=self._storage)
            self.study, changed = self._create(), ""
        if changed:
            raise ValueError(f"the study {name!r} was begun with another {changed}; name another study or another out")
        self.study.set_user_attr("space", to_dict(space))
        self.study.set_user_attr("recipe", recipe_tables(recipe))

    def trials(self) -> list[Any]:
        """All of them as they are now, but for those that were given up as superfluous."""
        found: list[Any] = self.study.get_trials(deepcopy=False)
        return [trial for trial in found if "dropped" not in trial.user_attrs]

    def counted(self) -> list[Any]:
        """Those that use up the number of trials: all but the interrupted."""
        return [trial for trial in self.trials() if not self.was_interrupted(trial)]

    def was_interrupted(self, trial: Any) -> bool:
        """Whether a trial ended without a result and without an error of its own."""
        return trial.state == self.states.FAIL and "error" not in trial.user_attrs

    def tried(self) -> list[Tried]:
        """The points that are taken, for samplers that go through them; interrupted ones are: they come again."""
        latest = {repr(sorted(point.items())): trial for trial in self.trials() if (point := _point(trial)) is not None}
        return [
            Tried(
                trial.user_attrs["point"],
                trial.value if trial.state == self.states.COMPLETE else None,
                trial.state.is_finished() and not self.was_interrupted(trial),
            )
            for trial in latest.values()
        ]

    def turn(self) -> AbstractContextManager[None]:
        """Alone among the workers with this folder, to find a trial and to take it: SQLite would give it to two."""
        return locked(self._lock("turn"), waiting=lambda: None)

    def enqueue(self, point: dict[str, Any]) -> None:
        """Have a trial at this point."""
        self._queue(point, {"point": point, "claim": f"point {sorted(point.items())}"})

    def recover(self) -> None:
        """Queue again what was interrupted, and what a worker that is gone has left. For the one whose turn it is."""
        for trial in self.trials():
            if trial.state != self.states.RUNNING:
                continue
            if self._is_held(trial):
                # Its worker lives, even if it was silent while the machine slept.
                self._storage.record_heartbeat(trial._trial_id)
            elif self._is_left(trial):
                self.study.tell(trial.number, state=self.states.FAIL, skip_if_finished=True)
        optuna_module().storages.fail_stale_trials(self.study)
        again = {trial.user_attrs.get("again") for trial in self.study.get_trials(deepcopy=False)}
        for trial in self.trials():
            # It may have ended before it took all its values, or any.
            values = {**trial.user_attrs.get("queued", {}), **trial.params}
            if values and self.was_interrupted(trial) and trial.number not in again and not self._is_held(trial):
                kept = {name: trial.user_attrs[name] for name in ("point", "folder") if name in trial.user_attrs}
                self._queue(values, {**kept, "again": trial.number, "claim": f"again {trial.number}"})

    def is_superfluous(self, trial: Any, most: int | None, *, drawn: bool = True) -> bool:
        """Whether another worker was faster: with the same point, with the last trial that was wanted, or, where no
        points are ``drawn``, with the one that was queued."""
        before = [one for one in self.trials() if one.number < trial.number]
        claim = trial.user_attrs.get("claim")
        if claim is None and not drawn:
            return True
        if claim is not None and any(one.user_attrs.get("claim") == claim for one in before):
            return True
        return most is not None and sum(not self.was_interrupted(one) for one in before) >= most

    @contextmanager
    def owned(self, trial: Any) -> Iterator[Path]:
        """The folder of a trial, and a mark on it that goes away with this process."""
        name = trial.user_attrs.get("folder") or f"{trial.number + 1:04d}"
        folder = self.out / TRIALS / name

        def refuse() -> None:
            raise RuntimeError(f"{folder} is in use by another process")

        with locked(self._lock(name), waiting=refuse):
            trial.set_user_attr("folder", name)
            trial.set_user_attr("worker", self._worker())
            yield folder

    def _queue(self, values: dict[str, Any], attributes: dict[str, Any]) -> None:
        self.study.enqueue_trial(values, user_attrs={**attributes, "queued": values})

    def _is_left(self, trial: Any) -> bool:
        """Whether a trial that nobody holds was one of this machine. Those of others are known by silence."""
        worker = trial.user_attrs.get("worker")
        # Without a worker it was taken in a turn that did not end, unless there are turns elsewhere too.
        return not self._is_shared if worker is None else worker == self._worker()

    def _is_held(self, trial: Any) -> bool:
        """Whether some process has locked the folder of a trial."""
        return "folder" in trial.user_attrs and _is_held(self._lock(trial.user_attrs["folder"]))

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
        """What is not as it was when the study was begun, and how."""
        attributes = self.study.user_attrs
        if "recipe" not in attributes:
            return ""
        changed = contradictions(from_dict(upgrade(attributes["recipe"])), recipe)
        if changed:
            return f"recipe ({'; '.join(changed)})"
        return "space" if attributes.get("space") != to_dict(space) else ""


@contextmanager
def quiet() -> Iterator[None]:
    """Optuna keeps to itself what is said here in other words."""
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
    # Workers wait for each other's writing instead of failing.
    settings = {"connect_args": {"timeout": 60}} if url.startswith("sqlite") else {"pool_pre_ping": True}
    try:
        return optuna.storages.RDBStorage(url, engine_kwargs=settings, heartbeat_interval=HEARTBEAT, grace_period=GRACE)
    except ImportError:
        raise
    except Exception as error:  # SQLAlchemy's own kinds; the address may hold a password
        said = str(error).splitlines()[0]
        raise ValueError(f"the storage {url.rpartition('@')[2]!r} cannot be opened: {said}") from None


def _point(trial: Any) -> dict[str, Any] | None:
    found: dict[str, Any] | None = trial.user_attrs.get("point")
    return found


def _is_held(lock: Path) -> bool:
    """Whether some process has locked a file."""

    def refuse() -> None:
        raise BlockingIOError

    try:
        with locked(lock, waiting=refuse):
            return False
    except BlockingIOError:
        return True
