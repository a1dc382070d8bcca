"""Grids that train for a second or two, and an executor without processes."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from training_runs import vectors

from nearfar.bench.executors import local
from nearfar.bench.executors.job import Job, execute
from nearfar.bench.grid.console import GridDisplay
from nearfar.bench.grid.records import CellRecord

STEPS = 900
LONG = {"training": {"epochs": 3}, "sampler": {"steps": STEPS // 3}}  # long enough to be interrupted


def small(folder: Path, **changes: Any) -> dict[str, Any]:
    """A grid of two losses on vectors of a few classes."""
    return {
        "name": "small",
        "recipe": {
            "data": {"name": "arrays", "root": str(vectors(folder))},
            "sampler": {"classes": 4, "per_class": 3, "steps": 3},
            "network": {"name": "mlp", "dim": 4, "settings": {"hidden": [8]}},
            "optimizer": {"lr": 1e-2},
            "training": {"epochs": 2, "device": "cpu"},
            "evaluation": {"every": 0},
        },
        "losses": {"contrastive": {}, "proxy_anchor": {}},
        **changes,
    }


class DirectExecutor:
    """Runs jobs in this process as soon as they are started."""

    def __init__(self, room: Sequence[local.Slot] = (), imports: Sequence[str] = ()) -> None:
        self.started: list[Job] = []
        self._ended: list[tuple[str, int]] = []

    @property
    def room(self) -> int:
        return 1

    def start(self, job: Job) -> None:
        self.started.append(job)
        self._ended.append((job.name, execute(job)))

    def ended(self) -> list[tuple[str, int]]:
        found, self._ended = self._ended, []
        return found

    def stop(self, *, now: bool = False) -> None:
        pass

    def close(self) -> None:
        pass


class Interrupts(GridDisplay):
    """Sends this process a signal once a cell has done its first step."""

    def __init__(self, number: int = signal.SIGINT) -> None:
        self.number: int | None = number
        self.said: list[str] = []

    def show(self, running: Sequence[CellRecord]) -> None:
        if self.number is not None and any(record.steps() for record in running):
            number, self.number = self.number, None
            signal.raise_signal(number)

    def say(self, text: str) -> None:
        self.said.append(text)
