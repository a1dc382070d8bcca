"""A cell as a process of its own: ``python -m nearfar.bench.executors.job``, with the job as a line on standard input.

Standard input stays open for as long as whoever asked for the job is there. When that goes away, by whatever end, the
job saves what it has and stops.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from nearfar.bench.grid.grid import FROZEN
from nearfar.utils import plugins
from nearfar.utils.atomic import write_json

LABELS = "cell.json"  # what a grid calls a run, beside it
COMMAND = (sys.executable, "-m", "nearfar.bench.executors.job")
# What would make a process believe that it is one of many.
DISTRIBUTED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, kw_only=True)
class Job:
    """What a process is told.

    Args:
        name, key, labels: Of the cell; no two jobs have the same name.
        what: "train", or "frozen" for the baseline.
        recipe: As tables.
        folder: The run folder; a run that began there goes on.
        output: The file that all it says goes to.
        cache: Where decoded pictures are kept.
        device: Where to compute, if not where the recipe says.
        lean: Whether weights and embeddings are thrown away once the numbers are there.
        code: Files of the user's own that are run first.
    """

    name: str
    key: str
    labels: Mapping[str, str] = field(default_factory=dict)
    what: str = "train"
    recipe: Mapping[str, Any]
    folder: str
    output: str
    cache: str | None = None
    device: str | None = None
    lean: bool = False
    code: Sequence[str] = ()

    def line(self) -> bytes:
        """The job as the process reads it."""
        return json.dumps(asdict(self)).encode() + b"\n"


def environment(changes: Mapping[str, str]) -> dict[str, str]:
    """The environment of such a process."""
    found = {key: value for key, value in os.environ.items() if key not in DISTRIBUTED}
    return found | dict(changes)


def work(job: Job) -> None:
    """Train the cell, or go on with it, or measure the baseline."""
    from nearfar.bench.grid import baseline
    from nearfar.training.api import start
    from nearfar.training.recipe.files import load
    from nearfar.training.run.console import Lines
    from nearfar.training.run.folder import RunFolder

    plugins.use(*job.code)
    recipe = load(job.recipe, overrides={"training.device": job.device} if job.device else ())
    run = RunFolder(job.folder)
    run.folder.mkdir(parents=True, exist_ok=True)
    write_json(run.folder / LABELS, {"cell": job.name, "key": job.key, "labels": dict(job.labels)})
    if job.what == FROZEN:
        baseline.measure(recipe, run.folder, cache=job.cache)
    elif run.recipe.is_file():
        start(recipe, resume=run.folder, display=Lines(), cache=job.cache)
    else:
        start(recipe, out=run.folder, display=Lines(), cache=job.cache)
    if job.lean:
        shutil.rmtree(run.last.parent, ignore_errors=True)
        run.embeddings.unlink(missing_ok=True)


def perform(job: Job) -> int:
    """Do it, and say how it ended as processes do; errors go to standard error, whole."""
    try:
        work(job)
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else 1
    except KeyboardInterrupt:
        return 130
    except BaseException as error:
        traceback.print_exc()
        print(f"{type(error).__name__}: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    return 0


def end_with(caller: int) -> None:
    """From now on this process is asked to stop when the other end of a pipe is gone."""

    def wait() -> None:
        while os.read(caller, 1):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, daemon=True).start()


def last_words(output: str | Path, *, lines: int = 20) -> list[str]:
    """The last lines that a job said.

    >>> last_words("not there")
    []
    """
    try:
        with open(output, "rb") as file:
            file.seek(max(0, os.path.getsize(output) - 20_000))
            said = file.read().decode(errors="replace").splitlines()
    except OSError:
        return []
    return [line.rstrip() for line in said if line.strip()][-lines:]


def why(code: int, said: list[str]) -> str:
    """Why a job that ended with this code did, in one line.

    >>> why(1, ["Traceback", "ValueError: data.root is missing"])
    'ValueError: data.root is missing'
    >>> why(-9, [])
    'ended by SIGKILL; was there too little memory?'
    """
    if code < 0:
        name = signal.Signals(-code).name
        return f"ended by {name}" + ("; was there too little memory?" if name == "SIGKILL" else "")
    return said[-1] if said else f"ended with code {code} and said nothing"


def main() -> None:
    """Read the job and do it."""
    # Unbuffered: a thread that waits in a buffer's lock cannot be left behind when the process ends.
    with open(0, "rb", buffering=0, closefd=False) as caller:
        job = Job(**json.loads(caller.readline()))
    end_with(0)
    sys.exit(perform(job))


if __name__ == "__main__":
    main()
