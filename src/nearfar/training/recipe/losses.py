"""From the loss section of a recipe to a loss."""

from __future__ import annotations

import inspect
from typing import Any

from nearfar import losses
from nearfar.training.recipe.sections import Loss
from nearfar.training.recipe.values import NOTHING

FILLED = ("num_classes", "dim")  # known when data and network are


def create(section: Loss, *, num_classes: int, dim: int) -> losses.Loss:
    """The loss that a section names, for so many classes and embeddings of ``dim`` dimensions.

    A ``num_classes`` that a loss does not need but can use (a boundary for each class in "margin") is asked for
    with true.

    >>> create(Loss(name="proxy_anchor", settings={"alpha": 16}), num_classes=100, dim=512).proxies.shape
    torch.Size([100, 512])
    """
    known = {"num_classes": num_classes, "dim": dim}
    allowed = losses.defaults(section.name)
    settings: dict[str, Any] = {}
    for name, value in section.settings.items():
        if name in FILLED and name in allowed:
            if allowed[name] is inspect.Parameter.empty or not isinstance(value, bool):
                wanted = "it comes from data and network" if allowed[name] is inspect.Parameter.empty else "give true"
                raise ValueError(f"{section.name} was given {name}; {wanted}")
            value = known[name] if value else None
        elif value == NOTHING and not isinstance(allowed.get(name), str):
            value = None
        settings[name] = value
    for name in FILLED:
        if allowed.get(name) is inspect.Parameter.empty:
            settings[name] = known[name]
    return losses.create(section.name, **settings)
