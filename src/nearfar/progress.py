"""Progress of long work: bars on a terminal, nothing elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

Progress = Callable[[int, int], None]  # told how much is done, of how much
Watch = Callable[[str], Progress | None]  # told what work begins


@contextmanager
def bars() -> Iterator[Watch]:
    """A bar for each piece of work, gone when all is done."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description:<12}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Bars(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:

        def watch(work: str) -> Progress:
            task = progress.add_task(work, total=None)
            return lambda done, total: progress.update(task, completed=done, total=total)

        yield watch
