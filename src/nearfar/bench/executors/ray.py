"""The same cells as tasks of a Ray cluster; folders lie on storage that all its machines share."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from nearfar.bench.executors.job import COMMAND, Job
from nearfar.utils.validation import whole

GLANCE = 0.3  # seconds between a task's looks at whether it should stop
PATIENCE = 60.0  # seconds that a stopped cell may take to save


class Ray:
    """Does jobs on a Ray cluster.

    Args:
        folder: Of the grid, on shared storage.
        address: Of the cluster, as for ``ray.init``; one on this machine is started unless there is one already.
        jobs: At most so many at a time; unless told, as many as the cluster has room for.
        per_gpu: Jobs that share a GPU.
        device: "cpu" leaves GPUs alone.
    """

    def __init__(
        self,
        folder: Path,
        *,
        address: str | None = None,
        jobs: int | None = None,
        per_gpu: int = 1,
        device: str | None = None,
    ) -> None:
        self._ray = _ray()
        whole("per_gpu", per_gpu)
        self._most = None if jobs is None else whole("jobs", jobs)
        self._own = not self._ray.is_initialized()
        if self._own:
            self._ray.init(address=address, include_dashboard=None if address else False, log_to_driver=False)
        has = self._ray.cluster_resources()
        gpus = device != "cpu" and has.get("GPU", 0) > 0
        if not gpus and device is not None and device.startswith("cuda"):
            raise ValueError(f"device is {device!r}, and the Ray cluster has no GPU")
        self._device = "cuda" if gpus else "cpu"
        wants = {"num_cpus": 1, "num_gpus": 1 / per_gpu if gpus else 0, "max_retries": 0}
        self._task = self._ray.remote(**wants)(_task())
        # Enough to fill the cluster and have one more in line: what is not handed out yet can be taken back.
        free = min(has.get("CPU", 1), has.get("GPU", 0) * per_gpu) if gpus else has.get("CPU", 1)
        self._room = self._most or max(1, int(free)) + 1
        self._stop = folder.absolute() / f".stop-{uuid.uuid4().hex}"
        self._under_way: dict[str, Any] = {}

    @property
    def room(self) -> int:
        return self._room - len(self._under_way)

    def start(self, job: Job) -> None:
        line = replace(job, device=self._device).line()
        self._under_way[job.name] = self._task.remote(COMMAND, line, job.output, str(self._stop), GLANCE, PATIENCE)

    def ended(self) -> list[tuple[str, int]]:
        if not self._under_way:
            return []
        ready, _ = self._ray.wait(list(self._under_way.values()), num_returns=len(self._under_way), timeout=0)
        found = []
        for name, task in list(self._under_way.items()):
            if task in ready:
                del self._under_way[name]
                found.append((name, self._code(task)))
        return found

    def _code(self, task: Any) -> int:
        try:
            return int(self._ray.get(task))
        except self._ray.exceptions.RayError:  # the machine is gone, or the task was taken away
            return 1

    def stop(self, *, now: bool = False) -> None:
        self._stop.touch()
        if now:
            for task in self._under_way.values():
                self._ray.cancel(task, force=True)

    def close(self) -> None:
        if self._under_way:
            self.stop(now=True)
        self._stop.unlink(missing_ok=True)
        if self._own:
            self._ray.shutdown()


def _task() -> Callable[..., int]:
    """What a machine of the cluster does: start the process of a job, wait for it, and give its exit code.

    A function within a function travels as it is, with nothing but the standard library: importing this package
    takes a process seconds, and the job's own does it anyway.
    """

    def task(command: Sequence[str], line: bytes, output: str, stop: str, glance: float, patience: float) -> int:
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
        except BrokenPipeError:  # it ended before it read anything; the code says how
            pass
        while process.poll() is None:
            if os.path.exists(stop):
                process.terminate()
                try:
                    return process.wait(patience)
                except subprocess.TimeoutExpired:
                    process.kill()
            try:
                process.wait(glance)
            except subprocess.TimeoutExpired:
                continue
        return process.wait()

    return task


def _ray() -> Any:
    try:
        import ray
    except ImportError:
        raise ImportError("the engine 'ray' needs the package ray: pip install 'nearfar[ray]'") from None
    return ray
