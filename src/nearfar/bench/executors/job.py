"""Jobs: one cell of a grid, trained in a process of its own.

``COMMAND`` starts a process that reads a job as one line of JSON from standard input. Standard input stays open for as
long as the caller lives: when it is closed, the job saves its state and stops.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from nearfar.bench.grid.grid import FROZEN
from nearfar.utils import plugins
from nearfar.utils.atomic import write_json
from nearfar.utils.folders import claim
from nearfar.utils.system import reuse_memory

LABELS = "cell.json"  # file in a run folder with the name, key and labels of its cell
COMMAND = (sys.executable, "-c", "from nearfar.bench.executors.job import main; main()")
TAIL_BYTES = 20_000


@dataclass(frozen=True, kw_only=True)
class Job:
    """A cell to train, as it is sent to another process."""

    name: str  # unique name of the job: the folder name of the cell
    key: str  # key of the cell
    labels: Mapping[str, str] = field(default_factory=dict)  # labels of the cell by axis
    what: str = "train"  # "train", or "frozen" for the baseline
    recipe: Mapping[str, Any]  # recipe as nested dictionaries
    folder: str  # run folder; a run that was interrupted there is resumed
    output: str  # file that standard output and standard error are appended to
    cache: str | None = None  # folder of decoded images
    device: str | None = None  # device that replaces the one in the recipe
    lean: bool = False  # whether to delete weights and embeddings once the metrics are written
    plugins: Sequence[str] = ()  # python files of the user to run first

    def to_line(self) -> bytes:
        """Return the job as one line of JSON."""
        return json.dumps(asdict(self)).encode() + b"\n"


class Executor(Protocol):
    """Runs jobs."""

    @property
    def room(self) -> int:
        """Number of jobs that can be started now."""

    def start(self, job: Job) -> None:
        """Start a job."""

    def ended(self) -> list[tuple[str, int]]:
        """Return names and exit codes of the jobs that have ended since the last call."""

    def stop(self, *, now: bool = False) -> None:
        """Ask all running jobs to save their state and stop, or kill them ``now``; ``ended`` reports them as usual."""

    def close(self) -> None:
        """Kill what is still running and release all resources."""


def execute(job: Job) -> int:
    """Run a job in this process and return its exit code; errors are printed with their traceback."""
    try:
        _train(job)
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BaseException as error:
        traceback.print_exc()
        print(f"{type(error).__name__}: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    return 0


def _train(job: Job) -> None:
    from nearfar.bench.grid import baseline
    from nearfar.training.api import start
    from nearfar.training.recipe.files import load
    from nearfar.training.run.console import Lines
    from nearfar.training.run.folder import RunFolder

    plugins.use(*job.plugins)
    recipe = load(job.recipe, overrides={"training.device": job.device} if job.device else ())
    run = RunFolder(job.folder)
    claim(run.folder, "run")
    write_json(run.folder / LABELS, {"cell": job.name, "key": job.key, "labels": dict(job.labels)})
    if job.what == FROZEN:
        baseline.measure(recipe, run.folder, cache=job.cache)
    elif run.recipe.is_file():
        start(recipe, resume=run.folder, display=Lines(), cache=job.cache)
    else:
        start(recipe, out=run.folder, display=Lines(), cache=job.cache)
    if job.lean:
        run.drop_checkpoints()
        run.embeddings.unlink(missing_ok=True)


def stop_after(wait: Callable[[], object]) -> None:
    """Send SIGTERM to this process as soon as ``wait``, called in a thread, returns."""

    def watch() -> None:
        wait()
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


def last_lines(output: str | Path, *, lines: int = 20) -> list[str]:
    """Return the last lines of a job's output that are not empty."""
    try:
        with open(output, "rb") as file:
            file.seek(max(0, os.path.getsize(output) - TAIL_BYTES))
            text = file.read().decode(errors="replace").splitlines()
    except OSError:
        return []
    return [line.rstrip() for line in text if line.strip()][-lines:]


def failure_reason(code: int, output: Sequence[str]) -> str:
    """Return in one line why a job failed."""
    if code < 0:
        name = signal.Signals(-code).name
        return f"killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
    return output[-1] if output else f"exit code {code} without any output"


def main() -> None:
    """Read a job from standard input and run it."""
    # Unbuffered: a thread that waits inside a buffered reader holds its lock and blocks the exit of the process.
    with open(0, "rb", buffering=0, closefd=False) as stdin:
        job = Job(**json.loads(stdin.readline()))

    def wait_for_caller() -> None:
        while os.read(0, 1):
            pass

    stop_after(wait_for_caller)
    reuse_memory()
    sys.exit(execute(job))
