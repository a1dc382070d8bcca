"""Cells on this machine: a process each, a few at a time on every GPU, or on the processors."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from nearfar.bench.executors.forkserver import Nursery
from nearfar.bench.executors.job import Job
from nearfar.bench.executors.processes import Processes
from nearfar.utils.system import processors
from nearfar.utils.validation import whole


class Engine(Protocol):
    """Who does jobs."""

    @property
    def room(self) -> int:
        """How many more jobs it would take now."""

    def start(self, job: Job) -> None:
        """Begin with a job."""

    def ended(self) -> list[tuple[str, int]]:
        """Names and exit codes of jobs that have ended since it was last asked."""

    def stop(self, *, now: bool = False) -> None:
        """Ask all jobs to save and stop, or end them ``now``; they are among the ended when they have."""

    def close(self) -> None:
        """There are no more jobs."""


@dataclass(frozen=True)
class Slot:
    """Room for one job.

    Args:
        device: What the job is to compute on; None leaves it to the recipe.
        changes: To the environment of its process.
    """

    device: str | None = None
    changes: dict[str, str] = field(default_factory=dict)


def slots(*, device: str | None = None, jobs: int | None = None, per_gpu: int = 1) -> list[Slot]:
    """Room on this machine: ``per_gpu`` jobs on each GPU that can be seen, or ``jobs`` on the processors.

    Args:
        device: "auto" (None is the same), "cuda", "cuda:1" or "cpu".
        jobs: At most so many at a time; on the processors, one unless told.
        per_gpu: On each GPU.

    >>> [slot.device for slot in slots(device="cpu", jobs=2)]
    ['cpu', 'cpu']
    """
    whole("per_gpu", per_gpu)
    most = None if jobs is None else whole("jobs", jobs)
    gpus = _gpus(device)
    if gpus:
        # In turn, so that the first jobs go to different GPUs.
        found = [Slot("cuda", {"CUDA_VISIBLE_DEVICES": gpu}) for _ in range(per_gpu) for gpu in gpus][:most]
    else:
        found = [Slot("cpu" if device in (None, "auto", "cpu") else device) for _ in range(most or 1)]
    if "OMP_NUM_THREADS" not in os.environ:
        threads = str(max(1, processors() // len(found)))
        for slot in found:
            slot.changes["OMP_NUM_THREADS"] = threads
    return found


def _gpus(device: str | None) -> list[str]:
    """The GPUs to use, as CUDA_VISIBLE_DEVICES names them."""
    import torch

    name, _, number = (device or "auto").partition(":")
    if name not in ("auto", "cuda"):
        return []
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        if name == "cuda":
            raise ValueError(f"device is {device!r}, and PyTorch finds no GPU here")
        return []
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    every = [word.strip() for word in seen.split(",")][:count] if seen else [str(each) for each in range(count)]
    if not number:
        return every
    if not number.isdecimal() or int(number) >= count:
        raise ValueError(f"device is {device!r}; GPUs here are cuda:0 to cuda:{count - 1}")
    return [every[int(number)]]


class Workers(Protocol):
    """Who makes processes: ``Nursery``, or ``Processes`` where a process cannot be forked."""

    def start(self, job: Job, changes: Mapping[str, str]) -> None: ...

    def code(self, name: str) -> int | None: ...

    def stop(self, name: str, *, now: bool = False) -> None: ...

    def close(self) -> None: ...


class Local:
    """Does jobs on this machine.

    Args:
        room: See ``slots``.
        imports: Modules that jobs will need, best imported once.
    """

    def __init__(self, room: Sequence[Slot], imports: Sequence[str] = ()) -> None:
        self._free = list(room)
        self._under_way: dict[str, Slot] = {}
        self._workers: Workers = Nursery(room[0].changes, imports) if sys.platform == "linux" else Processes()

    @property
    def room(self) -> int:
        return len(self._free)

    def start(self, job: Job) -> None:
        slot = self._free.pop(0)
        if slot.device is not None:
            job = replace(job, device=slot.device)
        self._under_way[job.name] = slot
        self._workers.start(job, slot.changes)

    def ended(self) -> list[tuple[str, int]]:
        codes = {name: self._workers.code(name) for name in self._under_way}
        found = [(name, code) for name, code in codes.items() if code is not None]
        self._free += [self._under_way.pop(name) for name, _ in found]
        return found

    def stop(self, *, now: bool = False) -> None:
        for name in self._under_way:
            self._workers.stop(name, now=now)

    def close(self) -> None:
        self.stop(now=True)
        self._workers.close()
