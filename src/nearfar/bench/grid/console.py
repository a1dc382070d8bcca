"""What a person sees of a grid: bars on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, Protocol

from nearfar.bench.grid.records import Record
from nearfar.utils.progress import Progress


class Watcher(Protocol):
    """Who is told how a grid goes."""

    def watch(self, work: str) -> Progress | None:
        """Other work begins, such as decoding."""

    def begin(self, done: int, total: int) -> None:
        """How many cells are finished already, and how many there are."""

    def started(self, record: Record) -> None:
        """A cell begins, or goes on."""

    def ended(self, record: Record) -> None:
        """A cell is finished, or failed, or was stopped."""

    def show(self, under_way: Sequence[Record]) -> None:
        """Called now and then with the cells that are being trained."""

    def say(self, text: str) -> None:
        """Something worth a line of its own."""

    def close(self) -> None:
        """There is nothing more to tell."""


class Nobody:
    """Sees nothing."""

    def watch(self, work: str) -> Progress | None:
        return None

    def begin(self, done: int, total: int) -> None:
        pass

    def started(self, record: Record) -> None:
        pass

    def ended(self, record: Record) -> None:
        pass

    def show(self, under_way: Sequence[Record]) -> None:
        pass

    def say(self, text: str) -> None:
        pass

    def close(self) -> None:
        pass


class Lines(Nobody):
    """A line for each cell that begins or ends."""

    def __init__(self) -> None:
        self._done = self._total = 0

    def begin(self, done: int, total: int) -> None:
        self._done, self._total = done, total
        if done:
            self.say(f"{done} of {total} cells are finished already")

    def started(self, record: Record) -> None:
        self.say(f"{'goes on' if record.state == 'begun' else 'begins'}: {record.name}")

    def ended(self, record: Record) -> None:
        self._done += record.state == "finished"
        self.say(f"[{self._done}/{self._total}] {summary(record)}")

    def say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)


class Bars(Nobody):
    """A bar for all cells and one for each that is being trained; cells that have ended stay above as lines."""

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

        def tell(done: int, total: int) -> None:
            shown = done < total
            self._bars.update(task, completed=done, total=total, text=f"{done:,}/{total:,}", visible=shown)

        return tell

    def begin(self, done: int, total: int) -> None:
        self._done, self._total = done, total
        self._all = self._bars.add_task("cells", total=total, completed=done, text=f"{done}/{total}")

    def started(self, record: Record) -> None:
        self._each[record.cell.folder] = self._bars.add_task(record.name, total=None, text="")

    def ended(self, record: Record) -> None:
        self._bars.remove_task(self._each.pop(record.cell.folder))
        self._done += record.state == "finished"
        self._bars.update(self._all, completed=self._done, text=f"{self._done}/{self._total}")
        self.say(summary(record))

    def show(self, under_way: Sequence[Record]) -> None:
        for record in under_way:
            steps = record.steps()
            if steps is not None:
                done, total = steps
                task = self._each[record.cell.folder]
                self._bars.update(task, completed=done, total=total, text=f"step {done:,}/{total:,}")

    def say(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def close(self) -> None:
        self._bars.stop()


def create(*, quiet: bool = False) -> Watcher:
    """What fits where standard error goes."""
    if quiet:
        return Nobody()
    return Bars() if sys.stderr.isatty() else Lines()


def summary(record: Record) -> str:
    """What became of a cell, in a line."""
    if record.state != "finished":
        return f"{record.state}: {record.name}" + (f": {record.error}" if record.error else "")
    told = record.told()
    words = [f"finished: {record.name}", *([] if told is None else [f"recall@1 {told}"])]
    return "  ".join([*words, f"{record.metrics().get('seconds', 0.0):.1f} s"])
