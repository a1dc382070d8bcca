"""Optimizers and learning rate schedules of recipes."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from nearfar.losses.base import loss_groups
from nearfar.networks import Embedder, Ensemble
from nearfar.training.recipe.schema import OptimizerSection, ScheduleSection
from nearfar.utils.validation import positive, whole


def create_optimizer(
    section: OptimizerSection, model: Embedder | Ensemble, losses: nn.Module, device: str | torch.device = "cpu"
) -> torch.optim.Optimizer:
    """Create the optimizer of a recipe.

    Create it while the backbone is not frozen: parameters that are frozen later have no gradient and are not updated.
    Parameters of losses have no weight decay. On a GPU the fused implementation is used where PyTorch has one.
    """
    groups = [*model.param_groups(section.lr, section.head_multiplier, section.weight_decay)]
    groups += loss_groups(losses, section.lr, section.loss_multiplier)
    if not groups:
        raise ValueError("there is nothing to train: neither the network nor the loss has parameters")
    fused: dict[str, Any] = {"fused": True} if torch.device(device).type == "cuda" else {}
    settings = section.model_dump(include={"lr", "weight_decay", *section.keys[section.name]})
    if section.name == "radam":  # has no fused kernel
        return _without_compiler(torch.optim.RAdam)(groups, **settings)
    kinds: dict[str, type[torch.optim.Optimizer]] = {
        "sgd": torch.optim.SGD,
        "adam": torch.optim.Adam,
        "adamw": torch.optim.AdamW,
    }
    return _without_compiler(kinds[section.name])(groups, **settings, **fused)


def _without_compiler(kind: type[torch.optim.Optimizer]) -> Callable[..., torch.optim.Optimizer]:
    """The optimizer without the wrappers of its methods that import PyTorch's compiler, which takes seconds."""
    names = "add_param_group", "load_state_dict", "state_dict", "step", "zero_grad"
    methods = {name: inspect.unwrap(getattr(kind, name)) for name in names}
    return type(kind.__name__, (kind,), {**methods, "step": torch.no_grad()(methods["step"])})


class LearningRateSchedule:
    """Sets the learning rates of an optimizer to their initial values times warm-up × schedule × stage.

    The factor depends on the numbers of iterations and epochs done and, for "plateau", on the metrics seen. Call
    ``step_iteration`` after each update and ``step_epoch`` after each epoch. The state consists of plain numbers.
    """

    def __init__(
        self, section: ScheduleSection, optimizer: torch.optim.Optimizer, *, steps_per_epoch: int, steps: int
    ) -> None:
        self.section, self.optimizer = section, optimizer
        self.steps_per_epoch, self.steps = whole("steps_per_epoch", steps_per_epoch), whole("steps", steps)
        self.initial = [float(group["lr"]) for group in optimizer.param_groups]
        self.iteration = self.epoch = self.waited = 0
        self.stage = self.reduced = 1.0
        self.best: float | None = None
        self._set()

    def step_iteration(self) -> None:
        """Count an update."""
        self.iteration += 1
        self._set()

    def step_epoch(self, metric: float | None = None) -> None:
        """Count an epoch."""
        self.epoch += 1
        if metric is not None and self.section.name == "plateau":
            self._reduce_on_plateau(metric)
        self._set()

    def enter_stage(self, lr_factor: float) -> None:
        """Multiply the learning rates by a factor from now on."""
        self.stage = positive("lr_factor", lr_factor)
        self._set()

    def rates(self) -> dict[str, float]:
        """Return the current learning rates by the names of the parameter groups."""
        return {group.get("name", str(i)): float(group["lr"]) for i, group in enumerate(self.optimizer.param_groups)}

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain numbers."""
        return {name: getattr(self, name) for name in ("iteration", "epoch", "waited", "stage", "reduced", "best")}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state."""
        for name in self.state_dict():
            setattr(self, name, state[name])
        self._set()

    def factor(self) -> float:
        """Return the current factor of the initial learning rates."""
        warmup = self.section.warmup
        rising = (self.iteration + 1) / warmup if self.iteration < warmup else 1.0
        return rising * self._scheduled() * self.stage

    def _set(self) -> None:
        factor = self.factor()
        for group, initial in zip(self.optimizer.param_groups, self.initial, strict=True):
            group["lr"] = initial * factor

    def _scheduled(self) -> float:
        section = self.section
        done = self.epoch if section.per == "epoch" else self.iteration
        if section.name == "step":
            return section.gamma ** (done // (section.step_size or 1))
        if section.name == "multi_step":
            return section.gamma ** sum(done >= milestone for milestone in section.milestones)
        if section.name == "cosine":
            # The cosine begins after the warm-up.
            over = self.iteration if section.per == "iteration" else self.epoch * self.steps_per_epoch
            share = min(max(over - section.warmup, 0) / max(self.steps - section.warmup, 1), 1.0)
            return section.minimum + (1.0 - section.minimum) * (1.0 + math.cos(math.pi * share)) / 2.0
        return self.reduced  # 1 except for "plateau"

    def _reduce_on_plateau(self, metric: float) -> None:
        if self.best is None or metric > self.best:
            self.best, self.waited = metric, 0
            return
        self.waited += 1
        if self.waited > self.section.patience:
            self.reduced = max(self.reduced * self.section.gamma, self.section.minimum)
            self.waited = 0
