"""Where cells run: one after another in this process, in processes of this machine, or as tasks of a Ray cluster."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field, replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from nearfar.bench.grid import Cell
from nearfar.utils import plugins
from nearfar.utils.atomic import write_json
from nearfar.utils.folders import claim
from nearfar.utils.progress import Console
from nearfar.utils.system import connect_ray, processors, reuse_memory
from nearfar.utils.validation import whole

SIGNALS = {128 + signal.SIGINT: signal.SIGINT, 128 + signal.SIGTERM: signal.SIGTERM}  # by exit code
# Importing takes longer than training a small cell. On Linux a server process imports everything once and forks for
# each cell; it computes nothing itself and never touches a GPU. Elsewhere PyTorch does not survive a fork.
METHOD = "forkserver" if sys.platform == "linux" else "spawn"
PRELOAD = ("nearfar.bench.baseline", "nearfar.training.trainer")
# Variables that would make a cell believe to be one rank of a distributed training.
DISTRIBUTED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

Work = Callable[[Cell, str | None], int]  # trains a cell on a device and returns its exit code


def execute(
    cell: Cell, device: str | None, *, cache: str | None = None, lean: bool = False, files: Sequence[Path] = ()
) -> int:
    """Train a cell in this process and return its exit code; errors are printed with their traceback."""
    try:
        _train(cell, device, cache, lean, files)
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BaseException as error:
        traceback.print_exc()
        print(f"{type(error).__name__}: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    return 0


def _train(cell: Cell, device: str | None, cache: str | None, lean: bool, files: Sequence[Path]) -> None:
    from nearfar.bench import baseline
    from nearfar.training.recipe.files import load
    from nearfar.training.run.folder import RunFolder
    from nearfar.training.run.provenance import LABELS
    from nearfar.training.trainer import train

    plugins.use(*files)
    other = device not in (None, cell.recipe.training.device)
    recipe = load(cell.recipe, overrides={"training.device": device}) if other else cell.recipe
    run = RunFolder(cell.folder)
    claim(run.folder, "run")
    write_json(run.folder / LABELS, {"cell": cell.folder.name, "key": cell.key, "labels": dict(cell.labels)})
    if cell.is_baseline:
        baseline.measure(recipe, run.folder, cache=cache)
    elif run.recipe.is_file():
        train(recipe, resume=run.folder, display=Console(bars=False), cache=cache)
    else:
        train(recipe, out=run.folder, display=Console(bars=False), cache=cache)
    if lean:
        run.drop_checkpoints()
        run.embeddings.unlink(missing_ok=True)


def _absolute(cell: Cell) -> Cell:
    """A cell for a process that may have another working directory."""
    return replace(cell, folder=cell.folder.absolute())


class Executor:
    """Runs cells in this process. Libraries and devices are set up once; a cell that crashes ends the grid as well."""

    def __init__(self, work: Work, device: str | None = None) -> None:
        self._work, self._device = work, device
        self._ended: list[tuple[Cell, int]] = []

    @property
    def room(self) -> int:
        """Number of cells that can be started now."""
        return 0 if self._ended else 1

    def start(self, cell: Cell) -> None:
        """Start a cell; in this process, run it to its end."""
        import torch

        cell.output.parent.mkdir(parents=True, exist_ok=True)
        with open(cell.output, "a", encoding="utf-8") as output, redirect_stdout(output), redirect_stderr(output):
            code = self._work(cell, self._device)
        self._ended.append((cell, code))
        gc.collect()  # what the cell held on the device
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch._C._cuda_clearCublasWorkspaces()  # those of the streams that CUDA graphs were captured on
            torch.cuda.empty_cache()
        if code in SIGNALS:  # the cell handled the signal; the grid has to see it too
            os.kill(os.getpid(), SIGNALS[code])

    def ended(self) -> list[tuple[Cell, int]]:
        """Return the cells that have ended since the last call, with their exit codes."""
        ended, self._ended = self._ended, []
        return ended

    def stop(self, *, now: bool = False) -> None:
        """Ask the running cells to save their state and stop, or end them ``now``; ``ended`` reports them as usual."""

    def close(self) -> None:
        """End what is still running and release all resources."""


@dataclass(frozen=True)
class Slot:
    """Room for one process."""

    device: str | None = None  # device of the process; None keeps that of the recipe
    environment: dict[str, str] = field(default_factory=dict)  # its environment variables


def slots(*, device: str | None = None, jobs: int | None = None, per_gpu: int = 1) -> list[Slot]:
    """Return the room on this machine: ``per_gpu`` processes on each visible GPU, or ``jobs`` on the CPU."""
    whole("per_gpu", per_gpu)
    most = None if jobs is None else whole("jobs", jobs)
    gpus = _gpus(device)
    if gpus:
        # Round-robin, so that the first cells go to different GPUs.
        room = [Slot("cuda", {"CUDA_VISIBLE_DEVICES": gpu}) for _ in range(per_gpu) for gpu in gpus][:most]
    else:
        room = [Slot("cpu" if device in (None, "auto", "cpu") else device) for _ in range(most or 1)]
    if "OMP_NUM_THREADS" not in os.environ:
        threads = str(max(1, processors() // len(room)))
        for slot in room:
            slot.environment["OMP_NUM_THREADS"] = threads
    return room


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
    every = [word.strip() for word in visible.split(",")][:count] if visible else [str(at) for at in range(count)]
    if not number:
        return every
    if not number.isdecimal() or int(number) >= count:
        raise ValueError(f"device is {device!r}; available are cuda:0 to cuda:{count - 1}")
    return [every[int(number)]]


class Processes(Executor):
    """Runs each cell in a process of its own, so that a crash, a kill or a lack of memory affects no other cell."""

    def __init__(self, work: Work, room: Sequence[Slot], imports: Sequence[str] = ()) -> None:
        self._work, self._free = work, list(room)
        self._running: list[tuple[Cell, BaseProcess, Slot]] = []
        self._context: Any = multiprocessing.get_context(METHOD)
        # Processes import the main module of this one; for the command line that is this package.
        main = [name for name in ("nearfar.cli",) if name in sys.modules]
        self._context.set_forkserver_preload([*PRELOAD, *main, *imports])

    @property
    def room(self) -> int:
        """Number of free slots."""
        return len(self._free)

    def start(self, cell: Cell) -> None:
        slot = self._free.pop(0)
        process = self._context.Process(target=_run, args=(self._work, _absolute(cell), slot), name=cell.name)
        start(process, slot)
        self._running.append((cell, process, slot))

    def ended(self) -> list[tuple[Cell, int]]:
        codes = [(*running, running[1].exitcode) for running in self._running]
        self._running = [(cell, process, slot) for cell, process, slot, code in codes if code is None]
        self._free += [slot for *_, slot, code in codes if code is not None]
        return [(cell, code) for cell, *_, code in codes if code is not None]

    def stop(self, *, now: bool = False) -> None:
        for _, process, _ in self._running:
            if now:
                process.kill()
            else:
                process.terminate()

    def close(self) -> None:
        self.stop(now=True)
        for _, process, _ in self._running:
            process.join()


def start(process: BaseProcess, slot: Slot) -> None:
    """Start a process with the environment of its slot: libraries read some variables only while they are imported."""
    # The NVML check tells whether there is a GPU without initializing CUDA, which would break forked processes.
    variables: dict[str, str | None] = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1", **dict.fromkeys(DISTRIBUTED)}
    variables |= slot.environment
    before = {name: os.environ.get(name) for name in variables}
    try:
        _change_environment(variables)
        process.start()
    finally:
        _change_environment(before)


def _change_environment(variables: Mapping[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def begin(slot: Slot) -> None:
    """Prepare a process that was started for a slot; it ends, as after SIGTERM, with the one that started it."""
    if sys.platform != "win32":
        os.setsid()  # Ctrl-C in the terminal must reach only the caller, which stops its processes itself
    os.environ.update(slot.environment)
    if "OMP_NUM_THREADS" in slot.environment:
        import torch

        torch.set_num_threads(int(slot.environment["OMP_NUM_THREADS"]))
    caller = multiprocessing.parent_process()
    assert caller is not None

    def stop_with_caller() -> None:
        caller.join()
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=stop_with_caller, daemon=True).start()


def _run(work: Work, cell: Cell, slot: Slot) -> None:
    """Run a cell as the main function of its process."""
    _take_output(cell.output)
    begin(slot)
    sys.exit(work(cell, slot.device))


def _take_output(file: Path) -> None:
    """Append everything that this process, which runs one cell, prints to a file."""
    for name in DISTRIBUTED:
        os.environ.pop(name, None)
    file.parent.mkdir(parents=True, exist_ok=True)
    output = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    for standard in (1, 2):
        os.dup2(output, standard)
    os.close(output)
    reuse_memory()


class Ray(Executor):
    """Runs cells as tasks of a Ray cluster, with run folders on storage that all its machines share."""

    def __init__(
        self,
        work: Work,
        *,
        address: str | None = None,
        jobs: int | None = None,
        per_gpu: int = 1,
        device: str | None = None,
    ) -> None:
        whole("per_gpu", per_gpu)
        most = None if jobs is None else whole("jobs", jobs)
        self._ray, self._own = connect_ray(address)
        has = self._ray.cluster_resources()
        gpus = device != "cpu" and has.get("GPU", 0) > 0
        if not gpus and device is not None and device.startswith("cuda"):
            raise ValueError(f"device is {device!r}, but the Ray cluster has no GPU")
        self._work, self._device = work, "cuda" if gpus else "cpu"
        # A worker that ran a cell is not used again, as after a cell in a process of its own.
        wants = {"num_cpus": 1, "num_gpus": 1 / per_gpu if gpus else 0, "max_retries": 0, "max_calls": 1}
        self._task = self._ray.remote(**wants)(_task)
        # Enough to fill the cluster and queue one more; cells that are not submitted yet need not be cancelled.
        free = min(has.get("CPU", 1), has.get("GPU", 0) * per_gpu) if gpus else has.get("CPU", 1)
        self._limit = most or max(1, int(free)) + 1
        self._running: list[tuple[Cell, Any]] = []

    @property
    def room(self) -> int:
        """Number of tasks that can be submitted now."""
        return self._limit - len(self._running)

    def start(self, cell: Cell) -> None:
        self._running.append((cell, self._task.remote(self._work, _absolute(cell), self._device)))

    def ended(self) -> list[tuple[Cell, int]]:
        tasks = [task for _, task in self._running]
        ready = self._ray.wait(tasks, num_returns=len(tasks), timeout=0)[0] if tasks else []
        ended = [(cell, self._code(task)) for cell, task in self._running if task in ready]
        self._running = [(cell, task) for cell, task in self._running if task not in ready]
        return ended

    def _code(self, task: Any) -> int:
        errors = self._ray.exceptions
        try:
            return int(self._ray.get(task))
        except errors.TaskCancelledError:
            return 128 + signal.SIGTERM
        except errors.RayError:  # the machine was lost, or the worker was killed
            return 1

    def stop(self, *, now: bool = False) -> None:
        for _, task in self._running:
            self._ray.cancel(task, force=now)  # without force, an interrupt in the main thread of the worker

    def close(self) -> None:
        if self._running:
            self.stop(now=True)
        if self._own:
            self._ray.shutdown()


def _task(work: Work, cell: Cell, device: str | None) -> int:
    """Run a cell in the worker of a Ray task."""
    _take_output(cell.output)
    return work(cell, device)
