"""Grids that train for a second or two, and displays that record their progress."""

import signal

from training_runs import vectors

from nearfar.bench.display import GridDisplay

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


class Recorder(GridDisplay):
    """Notes the cells that are started, and what is said."""

    def __init__(self):
        self.started_cells = []
        self.said = []

    def started(self, cell):
        self.started_cells.append(cell)

    def say(self, text):
        self.said.append(text)

    @property
    def losses(self):
        """The losses of the cells that were started."""
        return [cell.labels["loss"] for cell in self.started_cells]


class Interrupts(Recorder):
    """Sends this process a signal once a cell, or two of them, have done its first step."""

    def __init__(self, number=signal.SIGINT, *, both=False):
        super().__init__()
        self.number = number
        self.wanted = 2 if both else 1

    def show(self, running):
        if self.number is not None and sum(cell.steps() is not None for cell in running) >= self.wanted:
            number, self.number = self.number, None
            signal.raise_signal(number)
