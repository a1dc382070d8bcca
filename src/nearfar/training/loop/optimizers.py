"""Optimisers: the model's groups and the loss's own, each at its learning rate."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from nearfar.losses import Loss
from nearfar.networks import Embedder, Ensemble
from nearfar.training.recipe.schema import Optimizer


def create(
    section: Optimizer, model: Embedder | Ensemble, losses: nn.Module, device: str | torch.device = "cpu"
) -> torch.optim.Optimizer:
    """The optimiser of a recipe for a model and all losses found within ``losses``.

    Make it while the backbone is awake: what is frozen later has no gradient and is left alone. Parameters of losses
    have no weight decay. On a GPU one kernel updates all parameters, where PyTorch has such a kernel.

    >>> from nearfar import networks
    >>> from nearfar.losses import Raw
    >>> optimizer = create(Optimizer(lr=0.5, head_multiplier=4.0), networks.create("mlp", in_dim=8, dim=2), Raw())
    >>> [(group["name"], group["lr"]) for group in optimizer.param_groups]
    [('backbone', 0.5), ('head', 2.0)]
    """
    groups = [*model.param_groups(section.lr, section.head_multiplier, section.weight_decay)]
    groups += loss_groups(losses, section.lr, section.loss_multiplier)
    if not groups:
        raise ValueError("there is nothing to train: neither the network nor the loss has parameters")
    fused: dict[str, Any] = {"fused": True} if torch.device(device).type == "cuda" else {}
    if section.name == "sgd":
        momentum: dict[str, Any] = {"momentum": section.momentum, "nesterov": section.nesterov}
        return torch.optim.SGD(groups, lr=section.lr, weight_decay=section.weight_decay, **momentum, **fused)
    common: dict[str, Any] = {"lr": section.lr, "betas": section.betas, "weight_decay": section.weight_decay}
    if section.name == "adam":
        return torch.optim.Adam(groups, **common, **fused)
    if section.name == "adamw":
        return torch.optim.AdamW(groups, **common, **fused)
    return torch.optim.RAdam(groups, **common)  # has no fused kernel


def loss_groups(losses: nn.Module, lr: float, multiplier: float | None = None) -> list[dict[str, Any]]:
    """The groups of all losses in a module, each parameter once; ``multiplier`` in place of the losses' own."""
    found = [(path, module) for path, module in losses.named_modules() if isinstance(module, Loss)]
    seen: set[int] = set()
    groups = []
    for path, loss in found:
        for group in loss.param_groups(lr):
            params = [each for each in group["params"] if id(each) not in seen]
            seen.update(map(id, params))
            if params:
                rate = group.get("lr", lr) if multiplier is None else lr * multiplier
                name = "loss" if len(found) == 1 else f"loss.{path}"
                groups.append({"weight_decay": 0.0, **group, "name": name, "params": params, "lr": rate})
    return groups
