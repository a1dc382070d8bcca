"""Loggers for TensorBoard, MLflow and Weights & Biases, in addition to log.jsonl of the run folder.

A logger is any object with two methods: ``log(step, values)`` and ``close()``.

>>> class Printer:
...     def log(self, step, values):
...         print(step, values)
...     def close(self):
...         pass
>>> logger: Logger = Printer()
>>> logger.log(20, numbers({"loss": 1.5, "metrics": {"test": {"recall@1": 0.5}}}))
20 {'loss': 1.5, 'metrics/test/recall@1': 0.5}
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from nearfar.training.recipe.files import flat
from nearfar.utils.atomic import write_text
from nearfar.utils.system import require
from nearfar.utils.validation import one_of

MODULES = {"tensorboard": "torch.utils.tensorboard", "mlflow": "mlflow", "wandb": "wandb"}
LONGEST_VALUE = 500  # characters of a parameter that every MLflow server accepts
MOST_AT_ONCE = 100  # parameters that MLflow accepts in one call


class StopTraining(Exception):
    """Raised by a logger to end a training; its other exceptions are warnings."""


@runtime_checkable
class Logger(Protocol):
    """Receives the numbers of a training."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log numbers."""

    def close(self) -> None:
        """End the log."""


def package(name: str) -> Any:
    """Return the package of a logger; an error names what is missing."""
    return require(f"the {name} logger", MODULES[one_of("logger", name, tuple(MODULES))], f"nearfar[{name}]", name)


def create(name: str, folder: str | Path, *, settings: Mapping[str, Any] | None = None) -> Logger:
    """Create the logger of a run."""
    package(name)
    folder = Path(folder)
    if name == "tensorboard":
        return TensorBoardLogger(folder / "tensorboard")
    if name == "wandb":
        return WandbLogger(folder, settings=settings)
    where = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{folder.absolute().parent / 'mlflow.db'}"
    return MLflowLogger(where, name=folder.name, settings=settings, keep=folder / "mlflow.txt")


class TensorBoardLogger(Logger):
    """Writes curves for TensorBoard: ``tensorboard --logdir FOLDER``.

    A resumed run writes to the same folder, and TensorBoard joins the parts.
    """

    def __init__(self, folder: str | Path) -> None:
        self._writer: Any = package("tensorboard").SummaryWriter(str(folder))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class MLflowLogger(Logger):
    """Logs a run to MLflow, which allows no ``@`` in names: recall@1 becomes recall_at_1."""

    def __init__(
        self,
        where: str = "sqlite:///mlflow.db",
        *,
        experiment: str = "nearfar",
        name: str | None = None,
        settings: Mapping[str, Any] | None = None,
        keep: Path | None = None,
    ) -> None:
        mlflow = package("mlflow")
        self._client, self._entities = mlflow.MlflowClient(tracking_uri=where), mlflow.entities
        if keep is not None and keep.is_file():
            self.run = keep.read_text(encoding="utf-8").strip()
            self._client.update_run(self.run, status="RUNNING")
            return
        known = self._client.get_experiment_by_name(experiment)
        number = self._client.create_experiment(experiment) if known is None else known.experiment_id
        self.run = self._client.create_run(number, run_name=name).info.run_id
        parameters = [
            self._entities.Param(mlflow_name(key, "."), str(value)[:LONGEST_VALUE])
            for key, value in flat(settings or {}).items()
        ]
        for start in range(0, len(parameters), MOST_AT_ONCE):
            self._client.log_batch(self.run, params=parameters[start : start + MOST_AT_ONCE])
        if keep is not None:
            keep.parent.mkdir(parents=True, exist_ok=True)
            write_text(keep, self.run + "\n")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        metric, now = self._entities.Metric, int(time.time() * 1000)
        entries = [metric(mlflow_name(name), float(value), now, step) for name, value in values.items()]
        self._client.log_batch(self.run, metrics=entries)

    def close(self) -> None:
        self._client.set_terminated(self.run)


class WandbLogger(Logger):
    """Logs a run to Weights & Biases. Its environment variables apply: ``WANDB_MODE=offline`` sends nothing.

    Numbers are shown over "step", because the best epoch is logged after the last one, and W&B's own steps only grow.
    """

    def __init__(
        self, folder: str | Path, *, project: str = "nearfar", settings: Mapping[str, Any] | None = None
    ) -> None:
        wandb, folder = package("wandb"), Path(folder)
        keep = folder / "wandb.txt"
        known = keep.read_text(encoding="utf-8").strip() if keep.is_file() else None
        folder.mkdir(parents=True, exist_ok=True)
        self._run: Any = wandb.init(
            project=os.environ.get("WANDB_PROJECT", project),
            name=folder.absolute().name,
            id=known,
            resume="allow",
            dir=str(folder),
            config=None if settings is None else dict(settings),
            reinit="create_new",
        )
        self._run.define_metric("*", step_metric="step")
        write_text(keep, f"{self._run.id}\n")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, **values})

    def close(self) -> None:
        self._run.finish()


def numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of nested tables, by names such as metrics/test/recall@1."""
    return {
        name: value
        for name, value in flat(values, "/").items()
        if isinstance(value, (int, float)) and not isinstance(value, bool)
    }


def mlflow_name(name: str, instead: str = "_") -> str:
    """A name that MLflow accepts."""
    return re.sub(r"[^\w\-. /]", instead, name.replace("@", "_at_"))
