"""Jobs on this machine: one process each, a few at a time on every GPU or on the CPU."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from multiprocessing.process import BaseProcess
from typing import Any

from nearfar.bench.executors.job import Executor, Job, execute, stop_after
from nearfar.utils.system import processors, reuse_memory
from nearfar.utils.validation import whole

# Importing takes longer than training a small cell. On Linux a server process imports everything once and forks for
# each job; it computes nothing itself and never touches a GPU. Elsewhere PyTorch does not survive a fork.
METHOD = "forkserver" if sys.platform == "linux" else "spawn"
PRELOAD = ("nearfar.bench.grid.baseline", "nearfar.training.api", "nearfar.training.loop.trainer")
SERVER_LOST = 255  # exit code that multiprocessing reports when the server process was killed
# Variables that would make a job believe to be one rank of a distributed training.
DISTRIBUTED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Slot:
    """Room for one job."""

    device: str | None = None  # device of the job; None keeps the device of the recipe
    environment: dict[str, str] = field(default_factory=dict)  # environment variables of its process


def slots(*, device: str | None = None, jobs: int | None = None, per_gpu: int = 1) -> list[Slot]:
    """Return the room on this machine: ``per_gpu`` jobs on each visible GPU, or ``jobs`` on the CPU."""
    whole("per_gpu", per_gpu)
    most = None if jobs is None else whole("jobs", jobs)
    gpus = _gpus(device)
    if gpus:
        # Round-robin, so that the first jobs go to different GPUs.
        found = [Slot("cuda", {"CUDA_VISIBLE_DEVICES": gpu}) for _ in range(per_gpu) for gpu in gpus][:most]
    else:
        found = [Slot("cpu" if device in (None, "auto", "cpu") else device) for _ in range(most or 1)]
    if "OMP_NUM_THREADS" not in os.environ:
        threads = str(max(1, processors() // len(found)))
        for slot in found:
            slot.environment["OMP_NUM_THREADS"] = threads
    return found


def _gpus(device: str | None) -> list[str]:
    """Return the GPUs to use, as CUDA_VISIBLE_DEVICES names them."""
    import torch

    name, _, number = (device or "auto").partition(":")
    if name not in ("auto", "cuda"):
        return []
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        if name == "cuda":
            raise ValueError(f"device is {device!r}, but PyTorch finds no GPU")
        return []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    every = [word.strip() for word in visible.split(",")][:count] if visible else [str(each) for each in range(count)]
    if not number:
        return every
    if not number.isdecimal() or int(number) >= count:
        raise ValueError(f"device is {device!r}; available are cuda:0 to cuda:{count - 1}")
    return [every[int(number)]]


class LocalExecutor(Executor):
    """Runs each job in a process of its own, so that a crash, a kill or a lack of memory affects no other job."""

    def __init__(self, room: Sequence[Slot], imports: Sequence[str] = ()) -> None:
        self._free = list(room)
        self._running: dict[str, tuple[BaseProcess, Slot]] = {}
        self._stopping = False
        self._context: Any = multiprocessing.get_context(METHOD)
        # Processes import the main module of this one; for the command line that is this package.
        own = [name for name in ("nearfar.cli",) if name in sys.modules]
        self._context.set_forkserver_preload([*PRELOAD, *own, *imports])

    @property
    def room(self) -> int:
        """Number of jobs that can be started now."""
        return len(self._free)

    def start(self, job: Job) -> None:
        slot = self._free.pop(0)
        if slot.device is not None:
            job = replace(job, device=slot.device)
        process = self._context.Process(target=_run, args=(job, slot.environment), name=job.name)
        # The NVML check tells whether there is a GPU without initializing CUDA, which would break forked processes.
        with _environment({"PYTORCH_NVML_BASED_CUDA_CHECK": "1", **slot.environment}):
            process.start()
        self._running[job.name] = process, slot

    def ended(self) -> list[tuple[str, int]]:
        codes = [(name, process.exitcode) for name, (process, _) in self._running.items()]
        found = []
        for name, code in codes:
            if code is None:
                continue
            process, slot = self._running.pop(name)
            self._free.append(slot)
            if code == SERVER_LOST and METHOD == "forkserver":
                # The server is gone, and with it the exit code; the job itself may still run.
                with suppress(ProcessLookupError):
                    os.kill(process.pid or 0, signal.SIGTERM)
                code = 128 + signal.SIGTERM if self._stopping else -signal.SIGKILL
            found.append((name, code))
        return found

    def stop(self, *, now: bool = False) -> None:
        self._stopping = True
        for process, _ in self._running.values():
            if now:
                process.kill()
            else:
                process.terminate()

    def close(self) -> None:
        self.stop(now=True)
        for process, _ in self._running.values():
            process.join()


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Start processes with other environment variables: libraries read some of them only while they are imported."""
    before = {name: os.environ.get(name) for name in (*DISTRIBUTED, *variables)}

    def change(values: Mapping[str, str | None]) -> None:
        for name, value in values.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

    change({**dict.fromkeys(DISTRIBUTED), **variables})
    try:
        yield
    finally:
        change(before)


def _run(job: Job, environment: Mapping[str, str]) -> None:
    """Run a job as the main function of its process."""
    if sys.platform != "win32":
        os.setsid()  # Ctrl-C in the terminal must reach only the caller, which stops its jobs itself
    for name in DISTRIBUTED:
        os.environ.pop(name, None)
    os.environ.update(environment)
    os.makedirs(os.path.dirname(job.output), exist_ok=True)
    output = os.open(job.output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.dup2(output, 1)
    os.dup2(output, 2)
    if "OMP_NUM_THREADS" in environment:
        import torch

        torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    caller = multiprocessing.parent_process()
    assert caller is not None
    stop_after(caller.join)
    reuse_memory()
    sys.exit(execute(job))
