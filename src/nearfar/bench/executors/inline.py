"""Jobs one after another in the current process, without the start-up time of a process for each."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path

from nearfar.bench.executors.job import Executor, Job, execute
from nearfar.bench.executors.local import Slot

SIGNALS = {128 + signal.SIGINT: signal.SIGINT, 128 + signal.SIGTERM: signal.SIGTERM}  # by exit code


class InlineExecutor(Executor):
    """Runs jobs in this process. Libraries and devices are set up once; a job that crashes ends the grid as well."""

    def __init__(self, room: Sequence[Slot]) -> None:
        self._device = room[0].device
        self._ended: list[tuple[str, int]] = []

    @property
    def room(self) -> int:
        """Number of jobs that can be started now."""
        return 0 if self._ended else 1

    def start(self, job: Job) -> None:
        """Run a job to its end."""
        if self._device is not None:
            job = replace(job, device=self._device)
        Path(job.output).parent.mkdir(parents=True, exist_ok=True)
        with open(job.output, "a", encoding="utf-8") as output, redirect_stdout(output), redirect_stderr(output):
            code = execute(job)
        self._ended.append((job.name, code))
        _free_memory()
        if code in SIGNALS:  # the job handled the signal; the grid has to see it too
            os.kill(os.getpid(), SIGNALS[code])

    def ended(self) -> list[tuple[str, int]]:
        found, self._ended = self._ended, []
        return found

    def stop(self, *, now: bool = False) -> None:
        """Do nothing: no job is running when this can be called."""

    def close(self) -> None:
        """Do nothing: no resources are held."""


def _free_memory() -> None:
    """Free what the last job held on the device."""
    import torch

    gc.collect()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch._C._cuda_clearCublasWorkspaces()  # those of the streams that CUDA graphs were captured on
        torch.cuda.empty_cache()
