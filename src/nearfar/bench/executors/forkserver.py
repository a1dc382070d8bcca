"""Processes that begin with everything imported.

Importing takes longer than a small cell trains. So one process, the nursery, imports once; for each job it forks a
child that has all of it at once. It computes nothing itself and never touches a GPU, so that a child is as good as a
process of its own: it may crash, run out of memory or be killed, and nobody else is hurt.
"""

from __future__ import annotations

import importlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from nearfar.bench.executors.job import Job, end_with, environment, perform

COMMAND = (sys.executable, "-m", "nearfar.bench.executors.forkserver")
PAUSE = 0.05  # seconds between looks at who has ended
GONE = -signal.SIGKILL  # the code of children whose nursery is no more


class Nursery:
    """The caller's side: jobs go in, exit codes come out.

    Should its process die, the children under way die with it; for the next job there is a new one.

    Args:
        changes: To the environment of all jobs.
        imports: Modules that jobs need besides those that all need.
    """

    def __init__(self, changes: Mapping[str, str], imports: Sequence[str] = ()) -> None:
        self._command = (*COMMAND, *imports)
        # Whether there is a GPU is asked in a way that leaves children free to use it.
        self._changes = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1", **changes}
        self._codes: dict[str, int | None] = {}
        self._open()

    def _open(self) -> None:
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment(self._changes),
            # Ctrl-C on the terminal is for the caller, who asks each job to stop but once.
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def start(self, job: Job, changes: Mapping[str, str]) -> None:
        """Begin a job, with more changes to its environment."""
        if self._process.poll() is not None or not self._reader.is_alive():
            self.close()
            self._codes = {name: GONE if code is None else code for name, code in self._codes.items()}
            self._open()
        self._codes[job.name] = None
        self._tell({"job": json.loads(job.line()), "changes": dict(changes)})

    def code(self, name: str) -> int | None:
        """How a job ended, None while it has not."""
        alive = self._reader.is_alive()  # asked first: what it reads last counts
        code = self._codes.get(name)
        return GONE if code is None and not alive else code

    def stop(self, name: str, *, now: bool = False) -> None:
        """Ask a job to save and stop, or end it."""
        self._tell({"stop": name, "now": now})

    def close(self) -> None:
        """No more jobs; those under way are asked to stop, and waited for."""
        with suppress(BrokenPipeError):
            assert self._process.stdin is not None
            self._process.stdin.close()
        self._process.wait()
        self._reader.join()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _tell(self, message: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it is gone, and `code` says so
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with suppress(ValueError, TypeError):  # it is something that a module said while it was imported
                name, code = json.loads(line)
                if name in self._codes:
                    self._codes[name] = int(code)


class _Children:
    """The nursery's side: who is under way, and the pipe by which each notices that the nursery is gone."""

    def __init__(self) -> None:
        self._under_way: dict[int, tuple[str, int]] = {}

    def fork(self, job: Job, changes: Mapping[str, str]) -> None:
        theirs, ours = os.pipe()
        child = os.fork()
        if child:
            os.close(theirs)
            self._under_way[child] = job.name, ours
            return
        for _, pipe in self._under_way.values():
            os.close(pipe)
        os.close(ours)
        os._exit(_grow_up(job, changes, theirs))

    def reap(self) -> None:
        """Say of all that have ended how."""
        for child, (name, pipe) in list(self._under_way.items()):
            found, status = os.waitpid(child, os.WNOHANG)
            if found:
                os.close(pipe)
                del self._under_way[child]
                with suppress(BrokenPipeError):
                    print(json.dumps([name, os.waitstatus_to_exitcode(status)]), flush=True)

    def stop(self, name: str | None = None, *, now: bool = False) -> None:
        """One of them, or all."""
        for child, (own, _) in self._under_way.items():
            if name in (None, own):
                os.kill(child, signal.SIGKILL if now else signal.SIGTERM)

    def __len__(self) -> int:
        return len(self._under_way)


def _grow_up(job: Job, changes: Mapping[str, str], nursery: int) -> int:
    """The life of a child, up to its exit code."""
    os.makedirs(os.path.dirname(job.output), exist_ok=True)
    output = os.open(job.output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for old, new in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(old, new)
    os.environ.update(changes)
    end_with(nursery)
    code = perform(job)
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def main() -> None:
    """Import, and then fork for each line that comes in; when no more can come, end all and go."""

    import nearfar.bench.grid.baseline
    import nearfar.training.api
    import nearfar.training.loop.trainer  # noqa: F401

    for name in sys.argv[1:]:
        importlib.import_module(name)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    children, rest = _Children(), b""
    while True:
        if select.select([0], [], [], PAUSE if children else None)[0]:
            read = os.read(0, 1 << 16)
            if not read:
                break
            *lines, rest = (rest + read).split(b"\n")
            for message in map(json.loads, lines):
                if "job" in message:
                    children.fork(Job(**message["job"]), message["changes"])
                else:
                    children.stop(message["stop"], now=message["now"])
        children.reap()
    children.stop()
    while children:
        children.reap()
        select.select([], [], [], PAUSE)
    os._exit(0)  # nothing is left to tidy, and taking everything apart takes seconds


if __name__ == "__main__":
    main()
