"""Grids that train for a second or two, and displays that record their progress."""

import signal

from training_runs import vectors

from nearfar.utils.progress import Display

STEPS = 900
LONG = {"training": {"epochs": 3}, "sampler": {"steps": STEPS // 3}}  # long enough to be interrupted


def small(folder, **changes):
    """A grid of two losses on vectors of a few classes."""
    return {
        "name": "small",
        "recipe": {
            "data": {"name": "arrays", "root": str(vectors(folder))},
            "sampler": {"classes": 4, "per_class": 3, "steps": 3},
            "network": {"name": "mlp", "dim": 4, "settings": {"hidden": [8]}},
            "optimizer": {"lr": 1e-2},
            "training": {"epochs": 2, "device": "cpu"},
            "evaluation": {"every": 0},
        },
        "losses": {"contrastive": {}, "proxy_anchor": {}},
        **changes,
    }


class Recorder(Display):
    """Notes what is said."""

    def __init__(self):
        self.said = []

    def say(self, text):
        self.said.append(text)

    @property
    def trained(self):
        """The names of the cells that were started, without their first seed."""
        words = [line.partition(": ") for line in self.said]
        return [name.removesuffix("-seed0") for word, _, name in words if word in ("started", "resumed")]


class Interrupts(Recorder):
    """Sends this process a signal once a cell, or two of them, have done their first step."""

    def __init__(self, number=signal.SIGINT, *, both=False):
        super().__init__()
        self.number, self.wanted, self.begun = number, 2 if both else 1, set()

    def show(self, work, done, total, text):
        if text.startswith("step"):
            self.begun.add(work)
        if self.number is not None and len(self.begun) >= self.wanted:
            number, self.number = self.number, None
            signal.raise_signal(number)
