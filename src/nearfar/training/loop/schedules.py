"""Learning rates over time.

A schedule is a function of how many iterations and epochs are done, and for "plateau" of the metrics seen. Its state is
a few plain numbers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from nearfar.training.recipe.schema import Schedule as Section
from nearfar.utils.validation import positive, whole


class Schedule:
    """Keeps the rates of an optimiser's groups at their first values times a factor.

    The factor is warm-up × schedule × stage. ``step_iteration`` is called after each update, and ``step_epoch`` after
    each epoch.

    Args:
        section: Of the recipe.
        optimizer: Whose groups it sets.
        steps_per_epoch: Updates in an epoch.
        steps: Updates in all, which is where "cosine" ends.
    """

    def __init__(self, section: Section, optimizer: torch.optim.Optimizer, *, steps_per_epoch: int, steps: int) -> None:
        self.section, self.optimizer = section, optimizer
        self.steps_per_epoch, self.steps = whole("steps_per_epoch", steps_per_epoch), whole("steps", steps)
        self.first = [float(group["lr"]) for group in optimizer.param_groups]
        self.iteration = self.epoch = self.waited = 0
        self.stage = self.reduced = 1.0
        self.best: float | None = None
        self._set()

    def step_iteration(self) -> None:
        """One more update was made."""
        self.iteration += 1
        self._set()

    def step_epoch(self, metric: float | None = None) -> None:
        """One more epoch is done; ``metric`` (the more the better) is that of the validation classes, if measured."""
        self.epoch += 1
        if metric is not None and self.section.name == "plateau":
            self._look(metric)
        self._set()

    def enter_stage(self, lr_factor: float) -> None:
        """From now on, so many times what the schedule says."""
        self.stage = positive("lr_factor", lr_factor)
        self._set()

    def rates(self) -> dict[str, float]:
        """The learning rates now, by the names of the groups."""
        return {group.get("name", str(i)): float(group["lr"]) for i, group in enumerate(self.optimizer.param_groups)}

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers that ``load_state_dict`` goes on with."""
        return {name: getattr(self, name) for name in ("iteration", "epoch", "waited", "stage", "reduced", "best")}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where another schedule of the same recipe stood."""
        for name in self.state_dict():
            setattr(self, name, state[name])
        self._set()

    def factor(self) -> float:
        """What the first rates are multiplied by now."""
        warmup = self.section.warmup
        rising = (self.iteration + 1) / warmup if self.iteration < warmup else 1.0
        return rising * self._scheduled() * self.stage

    def _set(self) -> None:
        factor = self.factor()
        for group, first in zip(self.optimizer.param_groups, self.first, strict=True):
            group["lr"] = first * factor

    def _scheduled(self) -> float:
        section = self.section
        done = self.epoch if section.per == "epoch" else self.iteration
        if section.name == "step":
            return section.gamma ** (done // (section.step_size or 1))
        if section.name == "multi_step":
            return section.gamma ** sum(done >= milestone for milestone in section.milestones)
        if section.name == "cosine":
            # Warm-up comes before the cosine, not instead of its beginning.
            over = self.iteration if section.per == "iteration" else self.epoch * self.steps_per_epoch
            share = min(max(over - section.warmup, 0) / max(self.steps - section.warmup, 1), 1.0)
            return section.minimum + (1.0 - section.minimum) * (1.0 + math.cos(math.pi * share)) / 2.0
        return self.reduced  # 1 but for "plateau"

    def _look(self, metric: float) -> None:
        if self.best is None or metric > self.best:
            self.best, self.waited = metric, 0
            return
        self.waited += 1
        if self.waited > self.section.patience:
            self.reduced = max(self.reduced * self.section.gamma, self.section.minimum)
            self.waited = 0


def create(section: Section, optimizer: torch.optim.Optimizer, *, steps_per_epoch: int, steps: int) -> Schedule:
    """The schedule of a recipe, with the learning rate of the first update set.

    >>> optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=8.0)
    >>> schedule = create(Section(name="step", step_size=2, gamma=0.5), optimizer, steps_per_epoch=10, steps=60)
    >>> for epoch in range(4):
    ...     schedule.step_epoch()
    >>> schedule.rates()
    {'0': 2.0}
    """
    return Schedule(section, optimizer, steps_per_epoch=steps_per_epoch, steps=steps)
