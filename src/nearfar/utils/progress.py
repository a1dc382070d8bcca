"""Progress and messages of long work on stderr: bars on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

from nearfar.utils.formatting import duration

Progress = Callable[[int, int], None]  # called with the amount done and the total
Watch = Callable[[str], Progress | None]  # called with the name of the work that begins

BETWEEN_LINES = 10.0  # seconds between two lines without a terminal


def begin(watch: Watch | None, work: str) -> Progress:
    """Tell a watch, if there is one, that work begins."""
    return (watch and watch(work)) or (lambda done, total: None)


class Display:
    """Receives the progress of work; this base class shows nothing."""

    def watch(self, work: str) -> Progress | None:
        """Called when work begins."""
        return None

    def show(self, work: str, done: int, total: int | None, text: str) -> None:
        """Called with the progress of work that describes itself."""

    def say(self, text: str) -> None:
        """Called with a message, which is a line of its own."""

    def close(self) -> None:
        """Called at the end."""


class Console(Display):
    """Shows a bar for each piece of work, below the messages; without a terminal, a line of progress at intervals."""

    def __init__(self, *, bars: bool | None = None) -> None:
        self._last = time.monotonic()
        self._bars: Any = None
        self._tasks: dict[str, Any] = {}
        if sys.stderr.isatty() if bars is None else bars:
            from rich import console, progress

            columns = progress.TextColumn("{task.description}"), progress.BarColumn(24)
            text = progress.TextColumn("{task.fields[text]}")
            self._bars = progress.Progress(*columns, text, console=console.Console(stderr=True), transient=True)
            self._bars.start()

    def watch(self, work: str) -> Progress:
        start = time.monotonic()

        def tell(done: int, total: int) -> None:
            left = (time.monotonic() - start) * (total - done) / max(done, 1)
            self.show(work, done, total, f"{done:,} of {total:,}, about {duration(left)} left")

        return tell

    def show(self, work: str, done: int, total: int | None, text: str) -> None:
        running = total is None or done < total
        if self._bars is not None:
            if work not in self._tasks:
                self._tasks[work] = self._bars.add_task(work, total=None, text="")
            self._bars.update(self._tasks[work], completed=done, total=total, text=text, visible=running)
        elif running and time.monotonic() - self._last >= BETWEEN_LINES:
            self.say(f"{work}: {text}")

    def say(self, text: str) -> None:
        if self._bars is not None:
            self._bars.console.print(text, highlight=False, markup=False, soft_wrap=True)
        else:
            print(text, file=sys.stderr, flush=True)
        self._last = time.monotonic()

    def close(self) -> None:
        if self._bars is not None:
            self._bars.stop()


@contextmanager
def bars() -> Iterator[Watch]:
    """Show the progress of each piece of work until the end of a block."""
    with closing(Console()) as console:
        yield console.watch
