"""Cells one after another in this process: nothing starts anew, which is most of the work where cells are small."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path

from nearfar.bench.executors.job import Job, perform
from nearfar.bench.executors.local import Slot

ASKED_TO_STOP = {128 + signal.SIGINT: signal.SIGINT, 128 + signal.SIGTERM: signal.SIGTERM}


class Inline:
    """Does jobs here. Libraries and devices are set up once; a job that ends this process ends the grid, too.

    Args:
        room: See ``nearfar.bench.executors.local.slots``; the first is used.
    """

    def __init__(self, room: Sequence[Slot]) -> None:
        self._device = room[0].device
        self._ended: list[tuple[str, int]] = []

    @property
    def room(self) -> int:
        return 0 if self._ended else 1

    def start(self, job: Job) -> None:
        """Do a job; it has ended when this returns."""
        if self._device is not None:
            job = replace(job, device=self._device)
        Path(job.output).parent.mkdir(parents=True, exist_ok=True)
        with open(job.output, "a", encoding="utf-8") as output, redirect_stdout(output), redirect_stderr(output):
            code = perform(job)
        self._ended.append((job.name, code))
        _tidy()
        if code in ASKED_TO_STOP:  # the job heard it, and now the grid does
            os.kill(os.getpid(), ASKED_TO_STOP[code])

    def ended(self) -> list[tuple[str, int]]:
        found, self._ended = self._ended, []
        return found

    def stop(self, *, now: bool = False) -> None:
        """Nothing is under way when this can be called."""

    def close(self) -> None:
        """Nothing is left behind."""


def _tidy() -> None:
    """Give back what the last job held."""
    import torch

    gc.collect()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch._C._cuda_clearCublasWorkspaces()  # of the streams that recordings were made on
        torch.cuda.empty_cache()
