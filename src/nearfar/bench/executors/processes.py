"""Jobs as processes that are started one by one."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO

from nearfar.bench.executors.job import COMMAND, Job, environment


class Process:
    """A job under way.

    Args:
        job: What to do.
        changes: To the environment.
    """

    def __init__(self, job: Job, changes: Mapping[str, str]) -> None:
        output = Path(job.output)
        output.parent.mkdir(parents=True, exist_ok=True)
        with open(output, "ab") as file:
            self._process = subprocess.Popen(
                COMMAND,
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=environment(changes),
                # Ctrl-C on the terminal is for whoever asked for the job, and asks it to stop but once.
                start_new_session=True,
            )
        stdin: IO[bytes] | None = self._process.stdin
        assert stdin is not None
        self._stdin = stdin
        with suppress(BrokenPipeError):  # it ended before it read anything; the code says how
            stdin.write(job.line())
            stdin.flush()

    def wait(self, seconds: float | None = None) -> int | None:
        """The exit code, None if it has not ended after so long."""
        try:
            code = self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        with suppress(BrokenPipeError):
            self._stdin.close()
        return code

    def stop(self, *, now: bool = False) -> None:
        """Ask it to save and stop, or end it."""
        if now:
            self._process.kill()
        else:
            self._process.terminate()


class Processes:
    """All jobs under way, by name."""

    def __init__(self) -> None:
        self._under_way: dict[str, Process] = {}

    def start(self, job: Job, changes: Mapping[str, str]) -> None:
        """Begin a job, with changes to its environment."""
        self._under_way[job.name] = Process(job, changes)

    def code(self, name: str) -> int | None:
        """How a job ended, None while it has not."""
        return self._under_way[name].wait(0)

    def stop(self, name: str, *, now: bool = False) -> None:
        """Ask a job to save and stop, or end it."""
        self._under_way[name].stop(now=now)

    def close(self) -> None:
        """Wait for all."""
        for process in self._under_way.values():
            process.wait()
