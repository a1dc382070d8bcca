"""Batch norms that stay as they are: statistics and affine parameters."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


def layers(module: nn.Module) -> Iterator[nn.Module]:
    """All batch norms below a module, itself included.

    >>> [layer.num_features for layer in layers(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)))]
    [3]
    """
    return (layer for layer in module.modules() if isinstance(layer, _BatchNorm))


def freeze(module: nn.Module) -> None:
    """Use the running statistics and train none of the affine parameters, from now until ``module.train()``.

    A :class:`~nearfar.networks.Backbone` that was told to ``freeze_batchnorm()`` calls this again whenever something
    could have undone it.

    >>> model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    >>> freeze(model)
    >>> model[1].training, model[1].weight.requires_grad, model[0].weight.requires_grad
    (False, False, True)
    """
    for layer in layers(module):
        layer.eval()
        layer.requires_grad_(False)
