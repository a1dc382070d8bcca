"""Progress of long computations: bars on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from nearfar.utils.formatting import duration

Progress = Callable[[int, int], None]  # called with the amount done and the total
Watch = Callable[[str], Progress | None]  # called with the name of the work that begins

PAUSE = 20.0  # seconds between two lines


@contextmanager
def bars() -> Iterator[Watch]:
    """Show a progress bar for each piece of work; without a terminal, print plain lines to stderr."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    console = Console(stderr=True)
    if not console.is_terminal:
        yield _lines
        return
    columns = (
        TextColumn("{task.description:<12}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Bars(*columns, console=console, transient=True) as progress:

        def watch(work: str) -> Progress:
            task = progress.add_task(work, total=None)
            return lambda done, total: progress.update(task, completed=done, total=total)

        yield watch


def _lines(work: str) -> Progress:
    start = said = time.monotonic()

    def tell(done: int, total: int) -> None:
        nonlocal said
        now = time.monotonic()
        if now - said < PAUSE or not 0 < done < total:
            return
        said = now
        left = (now - start) * (total - done) / done
        print(f"{work}: {done:,} of {total:,}, about {duration(left)} left", file=sys.stderr, flush=True)

    return tell
