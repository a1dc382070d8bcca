"""The stages of a run, and a loss for every output of a model."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from nearfar import losses
from nearfar.networks import Embedder, Ensemble
from nearfar.training.recipe.schema import Loss, Recipe

Model = Embedder | Ensemble


@dataclass(frozen=True, eq=False)
class Stage:
    """Some epochs with one loss.

    Args:
        losses: A loss for each output of the model, by the keys of :func:`dims_of`; their sum is what is trained.
        first: Its first epoch.
        epochs: How many it has.
        lr_factor: What the learning rate is multiplied by.
    """

    losses: nn.ModuleDict
    first: int
    epochs: int
    lr_factor: float = 1.0


def members_of(model: Model) -> list[Embedder]:
    """The members of an ensemble, or the one embedder there is."""
    if isinstance(model, Embedder):
        return [model]
    return [member for member in model.members if isinstance(member, Embedder)]


def dims_of(model: Model) -> dict[str, int]:
    """The dimensions of all outputs that have a loss of their own: of every level, and of every member of an ensemble.

    >>> from nearfar.networks import create
    >>> dims_of(create("linear", in_dim=8, dim=2))
    {'high': 2}
    """
    dims: dict[str, int] = {}
    for number, member in enumerate(members_of(model)):
        for level, head in member.heads.items():
            kept = isinstance(head, nn.Identity)
            dim = member.backbone.channels[level] if kept else member.dim // len(member.levels)
            dims[level if isinstance(model, Embedder) else f"{number}_{level}"] = dim
    return dims


def stages_of(recipe: Recipe, model: Model, num_classes: int, epochs: int) -> tuple[nn.ModuleList, tuple[Stage, ...]]:
    """All losses, once each, and the stages that use them.

    Stages with the same loss go on with it. Stages with different losses share class vectors of the same shape: the
    classifier that softmax trained is where Group Loss begins.
    """
    kept: list[tuple[Loss, nn.ModuleDict]] = []
    stages: list[Stage] = []
    first = 0
    for number in range(len(recipe.stages) or 1):
        section = recipe.loss_of(number)
        used = next((modules for known, modules in kept if known == section), None)
        if used is None:
            used = nn.ModuleDict(
                {key: section.create(num_classes=num_classes, dim=dim) for key, dim in dims_of(model).items()}
            )
            if kept:
                _share(kept[-1][1], used)
            kept.append((section, used))
        stage = recipe.stages[number] if recipe.stages else None
        length = epochs - first if stage is None or stage.epochs is None else stage.epochs
        stages.append(Stage(used, first, length, 1.0 if stage is None else stage.lr_factor))
        first += length
    return nn.ModuleList([modules for _, modules in kept]), tuple(stages)


def _share(earlier: nn.ModuleDict, later: nn.ModuleDict) -> None:
    for key, loss in later.items():
        before = earlier[key]
        both = isinstance(before, losses.ProxyLoss) and isinstance(loss, losses.ProxyLoss)
        if both and before.proxies.shape == loss.proxies.shape:
            loss.proxies = before.proxies
