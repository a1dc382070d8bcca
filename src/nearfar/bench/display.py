"""Progress of a grid for the user: bars on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from nearfar.bench.grid import Cell
from nearfar.utils.progress import Progress


class GridDisplay:
    """Receives the progress of a grid; this base class shows nothing."""

    def watch(self, work: str) -> Progress | None:
        """Called when other work begins, such as decoding images."""
        return None

    def begin(self, done: int, total: int) -> None:
        """Called once with the number of cells that are finished already, and of all cells."""

    def started(self, cell: Cell) -> None:
        """Called when a cell is started or resumed."""

    def ended(self, cell: Cell) -> None:
        """Called when a cell has finished, failed or stopped."""

    def show(self, running: Sequence[Cell]) -> None:
        """Called about once a second with the cells that are running."""

    def say(self, text: str) -> None:
        """Called with a message for the user."""

    def close(self) -> None:
        """Called at the end."""


class GridLines(GridDisplay):
    """Prints a line for each cell that starts or ends."""

    def __init__(self) -> None:
        self._done = self._total = 0

    def begin(self, done: int, total: int) -> None:
        self._done, self._total = done, total
        if done:
            self.say(f"{done} of {total} cells are already finished")

    def started(self, cell: Cell) -> None:
        self.say(f"{'resumed' if cell.state == 'begun' else 'started'}: {cell.name}")

    def ended(self, cell: Cell) -> None:
        self._done += cell.state == "finished"
        self.say(f"[{self._done}/{self._total}] {summary(cell)}")

    def say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)


class GridBars(GridDisplay):
    """Shows a bar for the grid and one for each running cell; ended cells remain above as lines."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as RichBars

        columns = (
            TextColumn("{task.description}"),
            BarColumn(24),
            TextColumn("{task.fields[text]}"),
            TimeElapsedColumn(),
        )
        self._console = Console(stderr=True)
        self._bars = RichBars(*columns, console=self._console, transient=True)
        self._all: Any = None
        self._each: dict[str, Any] = {}
        self._done = self._total = 0
        self._bars.start()

    def watch(self, work: str) -> Progress | None:
        task = self._bars.add_task(work, total=None, text="")

        def update(done: int, total: int) -> None:
            self._bars.update(task, completed=done, total=total, text=f"{done:,}/{total:,}", visible=done < total)

        return update

    def begin(self, done: int, total: int) -> None:
        self._done, self._total = done, total
        self._all = self._bars.add_task("cells", total=total, completed=done, text=f"{done}/{total}")

    def started(self, cell: Cell) -> None:
        self._each[str(cell.folder)] = self._bars.add_task(cell.name, total=None, text="")

    def ended(self, cell: Cell) -> None:
        self._bars.remove_task(self._each.pop(str(cell.folder)))
        self._done += cell.state == "finished"
        self._bars.update(self._all, completed=self._done, text=f"{self._done}/{self._total}")
        self.say(summary(cell))

    def show(self, running: Sequence[Cell]) -> None:
        for cell in running:
            steps = cell.steps()
            if steps is not None:
                done, total = steps
                task = self._each[str(cell.folder)]
                self._bars.update(task, completed=done, total=total, text=f"step {done:,}/{total:,}")

    def say(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def close(self) -> None:
        self._bars.stop()


def create(*, quiet: bool = False) -> GridDisplay:
    """Create the display that fits standard error: bars on a terminal, lines elsewhere."""
    if quiet:
        return GridDisplay()
    return GridBars() if sys.stderr.isatty() else GridLines()


def summary(cell: Cell) -> str:
    """Return in one line how a cell ended."""
    if cell.state != "finished":
        return f"{cell.state}: {cell.name}" + (f": {cell.error}" if cell.error else "")
    score = cell.score_text()
    words = [f"finished: {cell.name}", *([] if score is None else [f"recall@1 {score}"])]
    return "  ".join([*words, f"{cell.metrics().get('seconds', 0.0):.1f} s"])
