"""Loggers for TensorBoard, MLflow and Weights & Biases, in addition to log.jsonl of the run folder.

A logger is any object with two methods: ``log(step, values)`` and ``close()``.

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

NAMES = ("tensorboard", "mlflow", "wandb")
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


def check(name: str) -> None:
    """Check that a logger exists and that its package is installed."""
    {"tensorboard": _tensorboard, "mlflow": _mlflow, "wandb": _wandb}[one_of("logger", name, NAMES)]()


def create(name: str, folder: str | Path, *, settings: Mapping[str, Any] | None = None) -> Logger:
    """Create the logger of a run."""
    check(name)
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
        self._writer: Any = _tensorboard()(str(folder))

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


class WandbLogger(Logger):
    """Logs a run to Weights & Biases. Its environment variables apply: ``WANDB_MODE=offline`` sends nothing.

    Numbers are shown over "step", because the best epoch is logged after the last one, and W&B's own steps only grow.
    """

    def __init__(
        self, folder: str | Path, *, project: str = "nearfar", settings: Mapping[str, Any] | None = None
    ) -> None:
        wandb, folder = _wandb(), Path(folder)
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


def flat(values: Mapping[str, Any], joint: str = "/", *, any_value: bool = False) -> dict[str, Any]:
    """Flatten nested tables."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            found |= {f"{name}{joint}{key}": inner for key, inner in flat(value, joint, any_value=any_value).items()}
        elif any_value or (isinstance(value, (int, float)) and not isinstance(value, bool)):
            found[str(name)] = value
    return found


def mlflow_name(name: str, instead: str = "_") -> str:
    """A name that MLflow accepts."""
    return re.sub(r"[^\w\-. /]", instead, name.replace("@", "_at_"))


def _tensorboard() -> Any:
    """TensorBoard's writer; an error names the extra to install."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ImportError(
            "the tensorboard logger needs tensorboard; install it with: pip install 'nearfar[tensorboard]'"
        ) from error
    return SummaryWriter


def _mlflow() -> Any:
    """MLflow's client; an error names the extra to install."""
    try:
        from mlflow import MlflowClient  # type: ignore[import-not-found, unused-ignore]
    except ImportError as error:
        raise ImportError("the mlflow logger needs mlflow; install it with: pip install 'nearfar[mlflow]'") from error
    return MlflowClient


def _wandb() -> Any:
    """W&B's module; an error names the extra to install."""
    try:
        import wandb  # type: ignore[import-not-found, unused-ignore]
    except ImportError as error:
        raise ImportError("the wandb logger needs wandb; install it with: pip install 'nearfar[wandb]'") from error
    return wandb
