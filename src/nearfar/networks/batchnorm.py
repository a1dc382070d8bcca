"""Frozen batch norms: statistics and affine parameters do not change."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import batch_norm
from torch.nn.modules.batchnorm import _BatchNorm


def layers(module: nn.Module) -> Iterator[nn.Module]:
    """Iterate over all batch norms of a module, including itself.

    Example:
        >>> [layer.num_features for layer in layers(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)))]
        [3]
    """
    return (layer for layer in module.modules() if isinstance(layer, _BatchNorm))


def freeze(module: nn.Module) -> None:
    """Freeze statistics and affine parameters of all batch norms until ``module.train()``.

    A :class:`~nearfar.networks.Backbone` with frozen batch norms calls this again after ``train()``.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
        >>> freeze(model)
        >>> model[1].training, model[1].weight.requires_grad, model[0].weight.requires_grad
        (False, False, True)
    """
    for layer in layers(module):
        layer.eval()
        layer.requires_grad_(False)
        if type(layer) is nn.BatchNorm2d:
            layer.__class__ = FixedBatchNorm2d


class FixedBatchNorm2d(nn.BatchNorm2d):
    """A batch norm whose backward pass is one multiplication while it is frozen.

    PyTorch's batch norm stores its input for a gradient that is not needed, and takes five times as long for
    channels-last maps. :func:`freeze` converts layers to this class; after unfreezing they work as usual.
    """

    def forward(self, x: Tensor) -> Tensor:
        parameters = (self.running_mean, self.running_var, self.weight, self.bias)
        trainable = any(each.requires_grad for each in self.parameters())
        if (
            self.training
            or trainable
            or not (torch.is_grad_enabled() and x.requires_grad)
            or any(each is None for each in parameters)
        ):
            return super().forward(x)
        found: Tensor = _Fixed.apply(x, *parameters, self.eps)  # type: ignore[no-untyped-call]
        return found


class _Fixed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, mean: Tensor, variance: Tensor, weight: Tensor, bias: Tensor, eps: float
    ) -> Tensor:
        ctx.save_for_backward(variance, weight)
        ctx.eps = eps
        return batch_norm(x, mean, variance, weight, bias, eps=eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        variance, weight = ctx.saved_tensors
        zero = torch.zeros_like(weight)
        # A batch norm without mean and bias is this multiplication, with a fast kernel for every memory layout.
        return batch_norm(gradient, zero, variance, weight, zero, eps=ctx.eps), None, None, None, None, None
