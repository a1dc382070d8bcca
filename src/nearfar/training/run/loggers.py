"""Who else is told how a training goes. The run folder's own log.jsonl is always written; these come on top.

A logger has two methods: ``log(step, values)`` and ``close()``. Anything with them will do.

>>> class Printer:
...     def log(self, step, values):
...         print(step, values)
...     def close(self):
...         pass
>>> logger: Logger = Printer()
>>> logger.log(20, flat({"loss": 1.5, "metrics": {"test": {"recall@1": 0.5}}}))
20 {'loss': 1.5, 'metrics/test/recall@1': 0.5}
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from nearfar.utils.atomic import write_text
from nearfar.utils.validation import one_of

NAMES = ("tensorboard", "mlflow")
LONGEST_VALUE = 500  # characters that MLflow keeps of a parameter at the least
MOST_AT_ONCE = 100  # parameters that MLflow takes in one call


@runtime_checkable
class Logger(Protocol):
    """Somebody to tell."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Numbers after ``step`` iterations."""

    def close(self) -> None:
        """There is nothing more to tell."""


def check(name: str) -> None:
    """Refuse a logger that is not known, or whose package is not installed."""
    if one_of("logger", name, NAMES) == "tensorboard":
        _tensorboard()
    else:
        _mlflow()


def create(name: str, folder: str | Path, *, settings: Mapping[str, Any] | None = None) -> Logger:
    """The logger of a run by name: "tensorboard" or "mlflow".

    Args:
        folder: The run folder. TensorBoard's files lie in it; MLflow's store is mlflow.db beside it, so that all runs
            of a folder stand in one table, unless MLFLOW_TRACKING_URI names another.
        settings: The recipe, for MLflow's table.
    """
    check(name)
    folder = Path(folder)
    if name == "tensorboard":
        return TensorBoardLogger(folder / "tensorboard")
    where = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{folder.absolute().parent / 'mlflow.db'}"
    return MLflowLogger(where, name=folder.name, settings=settings, keep=folder / "mlflow.txt")


class TensorBoardLogger:
    """Curves for TensorBoard: ``tensorboard --logdir FOLDER``.

    A run that is resumed writes to the same folder again, and TensorBoard joins the pieces.
    """

    def __init__(self, folder: str | Path) -> None:
        self._writer: Any = _tensorboard()(str(folder))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class MLflowLogger:
    """A run in MLflow.

    Args:
        where: The store: "sqlite:///mlflow.db", or the address of a tracking server.
        experiment: Which runs this one is to be compared with.
        name: Of the run.
        settings: Nested tables of what was chosen; MLflow's parameters.
        keep: A file with the run's number: where it is there, that run is gone on with.

    MLflow allows no ``@`` in names: recall@1 is recall_at_1 there.
    """

    def __init__(
        self,
        where: str = "sqlite:///mlflow.db",
        *,
        experiment: str = "nearfar",
        name: str | None = None,
        settings: Mapping[str, Any] | None = None,
        keep: Path | None = None,
    ) -> None:
        self._client: Any = _mlflow()(tracking_uri=where)
        if keep is not None and keep.is_file():
            self.run = keep.read_text(encoding="utf-8").strip()
            self._client.update_run(self.run, status="RUNNING")
            return
        found = self._client.get_experiment_by_name(experiment)
        number = self._client.create_experiment(experiment) if found is None else found.experiment_id
        self.run = self._begin(number, name, settings or {})
        if keep is not None:
            keep.parent.mkdir(parents=True, exist_ok=True)
            write_text(keep, self.run + "\n")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric  # type: ignore[import-not-found, unused-ignore]

        now = int(time.time() * 1000)
        entries = [Metric(mlflow_name(name), float(value), now, step) for name, value in values.items()]
        self._client.log_batch(self.run, metrics=entries)

    def close(self) -> None:
        self._client.set_terminated(self.run)

    def _begin(self, experiment: str, name: str | None, settings: Mapping[str, Any]) -> str:
        from mlflow.entities import Param  # type: ignore[import-not-found, unused-ignore]

        run: str = self._client.create_run(experiment, run_name=name).info.run_id
        entries = [
            Param(mlflow_name(key, "."), str(value)[:LONGEST_VALUE])
            for key, value in flat(settings, ".", any_value=True).items()
        ]
        for start in range(0, len(entries), MOST_AT_ONCE):
            self._client.log_batch(run, params=entries[start : start + MOST_AT_ONCE])
        return run


def flat(values: Mapping[str, Any], joint: str = "/", *, any_value: bool = False) -> dict[str, Any]:
    """Nested tables as one, names joined; numbers only unless told.

    >>> flat({"lr": 0.1, "note": "warm", "test": {"map@r": 0.25}})
    {'lr': 0.1, 'test/map@r': 0.25}
    """
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            found |= {f"{name}{joint}{key}": inner for key, inner in flat(value, joint, any_value=any_value).items()}
        elif any_value or (isinstance(value, (int, float)) and not isinstance(value, bool)):
            found[str(name)] = value
    return found


def mlflow_name(name: str, instead: str = "_") -> str:
    """A name as MLflow allows it.

    >>> mlflow_name("test/recall@1")
    'test/recall_at_1'
    """
    return re.sub(r"[^\w\-. /]", instead, name.replace("@", "_at_"))


def _tensorboard() -> Any:
    """TensorBoard's writer, or a line that names the extra."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ImportError(
            "the tensorboard logger needs tensorboard; install it with: pip install 'nearfar[tensorboard]'"
        ) from error
    return SummaryWriter


def _mlflow() -> Any:
    """MLflow's client, or a line that names the extra."""
    try:
        from mlflow import MlflowClient  # type: ignore[import-not-found, unused-ignore]
    except ImportError as error:
        raise ImportError("the mlflow logger needs mlflow; install it with: pip install 'nearfar[mlflow]'") from error
    return MlflowClient
