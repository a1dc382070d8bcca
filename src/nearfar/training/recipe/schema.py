"""Recipes: everything that makes a run, in one value."""

from __future__ import annotations

from dataclasses import dataclass, field

from nearfar.training.recipe.checks import check
from nearfar.training.recipe.sections import (
    Augmentation,
    Data,
    Evaluation,
    Loss,
    Network,
    Optimizer,
    Sampler,
    Schedule,
    Selection,
    SplitRule,
    Stage,
    Training,
)

__all__ = [
    "Augmentation",
    "Data",
    "Evaluation",
    "Loss",
    "Network",
    "Optimizer",
    "Recipe",
    "Sampler",
    "Schedule",
    "Selection",
    "SplitRule",
    "Stage",
    "Training",
]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """All sections of a recipe. One that exists holds no contradiction; ``nearfar.training.recipe.files`` reads them.

    >>> recipe = Recipe(
    ...     sampler=Sampler(classes=4, per_class=8),
    ...     network=Network(name="mlp", dim=16),
    ...     loss=Loss(name="raw", settings={"alpha": 3.0}),
    ...     optimizer=Optimizer(lr=1e-3),
    ...     training=Training(epochs=5),
    ... )
    >>> recipe.data.name, recipe.selection.metric
    ('digits', 'recall@1')
    """

    data: Data = field(default_factory=Data)
    split: SplitRule = field(default_factory=SplitRule)
    sampler: Sampler
    augmentation: Augmentation = field(default_factory=Augmentation)
    network: Network
    loss: Loss
    optimizer: Optimizer
    schedule: Schedule = field(default_factory=Schedule)
    training: Training
    stages: tuple[Stage, ...] = ()
    evaluation: Evaluation = field(default_factory=Evaluation)
    selection: Selection = field(default_factory=Selection)

    def __post_init__(self) -> None:
        check(self)

    def loss_of(self, stage: int) -> Loss:
        """The loss of a stage: its own, or the recipe's."""
        own = self.stages[stage].loss if self.stages else None
        return self.loss if own is None else own
