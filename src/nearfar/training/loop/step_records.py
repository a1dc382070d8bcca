"""What steps tell, read by the host without stopping the device."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from nearfar.training.loop.step import Outcome


@dataclass(frozen=True)
class Page:
    """What is known of some steps in a row.

    Args:
        first: The number of the first of them.
        losses: Of each.
        finite: Of each: whether loss and gradient were numbers.
        pictures: They saw together.
        seconds: They took together.
    """

    first: int
    losses: list[float]
    finite: list[bool]
    pictures: int
    seconds: float

    @property
    def loss(self) -> float | None:
        """The mean over the steps that were finite; None where none was."""
        kept = [loss for loss, finite in zip(self.losses, self.finite, strict=True) if finite]
        return sum(kept) / len(kept) if kept else None

    @property
    def strange(self) -> list[int]:
        """The numbers of the steps that were not finite."""
        return [self.first + number for number, finite in enumerate(self.finite) if not finite]


class Ledger:
    """Collects outcomes on the device and gives them to the host a page at a time.

    A page is sent on its way when ``steps`` are on it or ``seconds`` have gone by, and read once it has arrived, some
    steps later. The device never waits for the host, and the host waits only in ``flush``.

    >>> ledger = Ledger(torch.device("cpu"), steps=2)
    >>> for number in range(2):
    ...     pages = ledger.add(number, Outcome(torch.tensor(1.0 + number), torch.tensor(True)), pictures=8)
    >>> pages[0].loss, pages[0].pictures
    (1.5, 16)
    """

    def __init__(
        self,
        device: torch.device,
        *,
        steps: int = 20,
        seconds: float = 1.0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.device, self.steps, self.seconds, self._clock = device, steps, seconds, clock
        self._open: list[Outcome] = []
        self._first = self._pictures = 0
        self._since = clock()
        self._sent: deque[tuple[Tensor, torch.cuda.Event | None, int, int, float]] = deque()

    def restart(self) -> None:
        """Time from now on: what went by was no training."""
        self._since = self._clock()

    def add(self, number: int, outcome: Outcome, pictures: int) -> list[Page]:
        """Enter a step; gives the pages that have arrived meanwhile."""
        if not self._open:
            self._first = number
        self._open.append(outcome)
        self._pictures += pictures
        if len(self._open) >= self.steps or self._clock() - self._since >= self.seconds:
            self._send()
        return self._arrived(wait=False)

    def flush(self) -> list[Page]:
        """All that is left, for which the host waits."""
        if self._open:
            self._send()
        return self._arrived(wait=True)

    def _send(self) -> None:
        table = torch.stack([torch.stack([each.loss.float(), each.finite.float()]) for each in self._open])
        event = None
        if self.device.type == "cuda":
            host = torch.empty(table.shape, pin_memory=True)
            host.copy_(table, non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(self.device))
            table = host
        now = self._clock()
        self._sent.append((table, event, self._first, self._pictures, now - self._since))
        self._open, self._pictures, self._since = [], 0, now

    def _arrived(self, wait: bool) -> list[Page]:
        pages = []
        while self._sent:
            table, event, first, pictures, seconds = self._sent[0]
            if event is not None and not event.query():  # type: ignore[no-untyped-call]
                if not wait:
                    break
                event.synchronize()
            self._sent.popleft()
            losses, finite = table.T.tolist()
            pages.append(Page(first, losses, [bool(one) for one in finite], pictures, seconds))
        return pages


class Pace:
    """How long a step takes, by the last pages: their median, which the few that make a device ready do not move.

    >>> pace = Pace()
    >>> pace.add(Page(0, [1.0], [True], 8, seconds=20.0))
    >>> pace.seconds() is None  # it may well have been the first step alone
    True
    >>> pace.add(Page(1, [1.0, 1.0], [True, True], 16, seconds=1.0))
    >>> pace.seconds()
    0.5
    """

    def __init__(self, pages: int = 20) -> None:
        self._pages: deque[tuple[float, int]] = deque(maxlen=pages)  # seconds a step, and steps

    def add(self, page: Page) -> None:
        """Enter what has arrived."""
        self._pages.append((page.seconds / len(page.losses), len(page.losses)))

    def seconds(self) -> float | None:
        """Of a step; None while only one page is known."""
        if len(self._pages) < 2:
            return None
        return statistics.median_low(pace for pace, steps in self._pages for _ in range(steps))
