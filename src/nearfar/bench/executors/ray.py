"""Jobs as tasks of a Ray cluster, with run folders on storage that all its machines share."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from nearfar.bench.executors.job import COMMAND, Executor, Job
from nearfar.utils.system import connect_ray
from nearfar.utils.validation import whole

POLL_SECONDS = 0.3  # between two checks of a task whether it should stop
SAVE_SECONDS = 60.0  # that a stopped job may take to save its state


class RayExecutor(Executor):
    """Runs jobs on a Ray cluster."""

    def __init__(
        self,
        folder: Path,
        *,
        address: str | None = None,
        jobs: int | None = None,
        per_gpu: int = 1,
        device: str | None = None,
    ) -> None:
        whole("per_gpu", per_gpu)
        self._most = None if jobs is None else whole("jobs", jobs)
        self._ray, self._own = connect_ray(address)
        has = self._ray.cluster_resources()
        gpus = device != "cpu" and has.get("GPU", 0) > 0
        if not gpus and device is not None and device.startswith("cuda"):
            raise ValueError(f"device is {device!r}, but the Ray cluster has no GPU")
        self._device = "cuda" if gpus else "cpu"
        wants = {"num_cpus": 1, "num_gpus": 1 / per_gpu if gpus else 0, "max_retries": 0}
        self._task = self._ray.remote(**wants)(_task())
        # Enough to fill the cluster and queue one more; cells that are not submitted yet need not be cancelled.
        free = min(has.get("CPU", 1), has.get("GPU", 0) * per_gpu) if gpus else has.get("CPU", 1)
        self._limit = self._most or max(1, int(free)) + 1
        self._stop = folder.absolute() / f".stop-{uuid.uuid4().hex}"
        self._running: dict[str, Any] = {}

    @property
    def room(self) -> int:
        """Number of jobs that can be started now."""
        return self._limit - len(self._running)

    def start(self, job: Job) -> None:
        line = replace(job, device=self._device).to_line()
        arguments = COMMAND, line, job.output, str(self._stop), POLL_SECONDS, SAVE_SECONDS
        self._running[job.name] = self._task.remote(*arguments)

    def ended(self) -> list[tuple[str, int]]:
        if not self._running:
            return []
        ready, _ = self._ray.wait(list(self._running.values()), num_returns=len(self._running), timeout=0)
        found = []
        for name, task in list(self._running.items()):
            if task in ready:
                del self._running[name]
                found.append((name, self._code(task)))
        return found

    def _code(self, task: Any) -> int:
        try:
            return int(self._ray.get(task))
        except self._ray.exceptions.RayError:  # the machine was lost, or the task was cancelled
            return 1

    def stop(self, *, now: bool = False) -> None:
        self._stop.touch()
        if now:
            for task in self._running.values():
                self._ray.cancel(task, force=True)

    def close(self) -> None:
        """Cancel what is still running, and shut Ray down if it was started here."""
        if self._running:
            self.stop(now=True)
        self._stop.unlink(missing_ok=True)
        if self._own:
            self._ray.shutdown()


def _task() -> Callable[..., int]:
    """Return the task that runs on the cluster: start the process of a job, wait for it, and return its exit code.

    Ray pickles a nested function by value. It needs only the standard library, so that the Ray worker does not spend
    seconds on importing this package; the process of the job does that anyway.
    """

    def task(command: Sequence[str], line: bytes, output: str, stop: str, poll: float, grace: float) -> int:
        import os
        import subprocess

        if os.path.exists(stop):
            return 143
        os.makedirs(os.path.dirname(output), exist_ok=True)
        with open(output, "ab") as file:
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=file, stderr=subprocess.STDOUT)
        assert process.stdin is not None
        try:
            process.stdin.write(line)
            process.stdin.flush()
        except BrokenPipeError:  # it ended before it read the job; the exit code tells how
            pass
        while process.poll() is None:
            if os.path.exists(stop):
                process.terminate()
                try:
                    return process.wait(grace)
                except subprocess.TimeoutExpired:
                    process.kill()
            try:
                process.wait(poll)
            except subprocess.TimeoutExpired:
                continue
        return process.wait()

    return task
