"""Progress of a training on the console: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TextIO

from nearfar.utils.formatting import duration
from nearfar.utils.progress import Progress

BETWEEN_LINES = 10.0  # seconds between two lines without a terminal


@dataclass(frozen=True)
class Status:
    """The progress of a training."""

    step: int  # updates done
    steps: int  # updates in total
    epoch: int  # the current epoch, from 1
    epochs: int  # epochs in total
    loss: float | None = None  # mean over the last few steps; None if none was finite
    images_s: float = 0.0  # images per second
    seconds_left: float | None = None  # estimated time until the last step; None while it is not known
    skipped: int = 0  # steps left out because the loss was NaN or infinite
    metrics: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # of the last evaluation, by part

    def text(self) -> str:
        """The progress in one line."""
        words = [f"epoch {self.epoch}/{self.epochs}", f"step {self.step:,}/{self.steps:,}"]
        words.append(f"loss {'–' if self.loss is None else format(self.loss, '.4f')}")
        if self.images_s:
            words.append(f"{self.images_s:,.0f} images/s")
        if self.seconds_left is not None:
            words.append(f"{duration(self.seconds_left)} left")
        if self.skipped:
            words.append(f"{self.skipped} skipped")
        return "  ".join([*words, *shown(self.metrics)])


@dataclass(frozen=True)
class Conclusion:
    """The end of a training."""

    seconds: float  # how long it took
    selection: str  # how the epoch was selected, such as "last epoch"
    epoch: int  # the selected epoch, from 1
    metrics: Mapping[str, Mapping[str, Any]]  # of that epoch, by part

    def text(self) -> str:
        """The outcome in one line."""
        words = f"finished after {duration(self.seconds)}: {self.selection}, epoch {self.epoch}"
        return "  ".join([words, *shown(self.metrics)])


class Display(Protocol):
    """Shows the progress of a training."""

    def watch(self, work: str) -> Progress | None:
        """Show that other work begins."""

    def show(self, status: Status) -> None:
        """Show the progress after some steps."""

    def say(self, text: str) -> None:
        """Print a message on a line of its own."""

    def finish(self, outcome: Conclusion) -> None:
        """Show the end of a training."""
        self.say(outcome.text())

    def close(self) -> None:
        """End the display."""


class Silent(Display):
    """Shows nothing."""

    def watch(self, work: str) -> Progress | None:
        return None

    def show(self, status: Status) -> None:
        pass

    def say(self, text: str) -> None:
        pass

    def finish(self, outcome: Conclusion) -> None:
        pass

    def close(self) -> None:
        pass


class Lines(Display):
    """Plain lines: messages, and the progress at intervals."""

    def __init__(self, out: TextIO | None = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._out, self._clock = out, clock
        self._last = clock()

    def watch(self, work: str) -> Progress | None:
        def tell(done: int, total: int) -> None:
            if done < total and self._clock() - self._last >= BETWEEN_LINES:
                self.say(f"{work}: {done:,} of {total:,}")

        return tell

    def show(self, status: Status) -> None:
        if self._clock() - self._last >= BETWEEN_LINES:
            self.say(status.text())

    def say(self, text: str) -> None:
        print(text, file=self._out or sys.stderr, flush=True)
        self._last = self._clock()

    def close(self) -> None:
        pass


class Terminal(Display):
    """A bar with loss, speed, time left and the last metrics; messages stay above it."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as Bars

        columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), TextColumn("{task.fields[text]}"))
        self._console = Console(stderr=True)
        self._bars = Bars(*columns, console=self._console, transient=True)
        self._training: Any = None
        self._bars.start()

    def watch(self, work: str) -> Progress | None:
        task = self._bars.add_task(work, total=None, text="")

        def tell(done: int, total: int) -> None:
            finished = done >= total
            self._bars.update(task, completed=done, total=total, text=f"{done:,}/{total:,}", visible=not finished)

        return tell

    def show(self, status: Status) -> None:
        if self._training is None:
            self._training = self._bars.add_task("training", total=status.steps, text="")
        self._bars.update(self._training, completed=status.step, total=status.steps, text=status.text())

    def say(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def close(self) -> None:
        self._bars.stop()


def create(*, quiet: bool = False) -> Display:
    """The display that suits standard error."""
    if quiet:
        return Silent()
    return Terminal() if sys.stderr.isatty() else Lines()


def shown(metrics: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The main metrics, a text for each part."""
    found = []
    for part, values in metrics.items():
        first = next((name for name in values if name.startswith("recall@")), None)
        names = [name for name in (first, "map@r", "nmi", "auc", "accuracy") if name is not None and name in values]
        found.append(" ".join([part, *(f"{name} {values[name]:.4f}" for name in names)]))
    return found
