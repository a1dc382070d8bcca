"""Small data for estimators, and access to the objective that an estimator minimizes."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

Objective = Callable[[Tensor], tuple[Tensor, Tensor]]


def blobs(n=24, d=3, classes=3, seed=0):
    """Overlapping classes of unequal scale."""
    random = np.random.RandomState(seed)
    labels = np.arange(n) % classes
    centers = random.normal(size=(classes, d))
    return (centers[labels] + random.normal(size=(n, d))) * np.linspace(0.5, 2, d), labels


class Problem(NamedTuple):
    """What an estimator passed to its solver."""

    objective: Objective
    start: Tensor


def problem_of(monkeypatch, estimator, *given, **named):
    """Fit an estimator and return the objective and the start that its solver was given."""
    module = import_module(type(estimator).__module__)
    found = []
    for name in ("descend", "lbfgs"):
        solver = getattr(module, name, None)
        if solver is not None:

            def recorded(objective, start, _solver=solver, **settings):
                found.append(Problem(objective, start))
                return _solver(objective, start, **settings)

            monkeypatch.setattr(module, name, recorded)
    estimator.fit(*given, **named)
    return found[0]


def check_objective(problem, oracle, *, symmetric, seed=0):
    """Compare value and gradient with an oracle and its derivative at a random matrix, and the value at the start."""
    random = torch.Generator().manual_seed(seed)
    point = torch.randn(problem.start.shape, generator=random, dtype=torch.float64) / 2
    if symmetric:
        point = point @ point.T + 0.1 * torch.eye(len(point), dtype=torch.float64)
    for matrix in (point, problem.start):
        matrix = matrix.clone().requires_grad_()
        expected = oracle(matrix)
        (slope,) = torch.autograd.grad(expected, matrix)
        if symmetric:  # only the symmetric part matters
            slope = (slope + slope.T) / 2
        value, gradient = problem.objective(matrix.detach())
        torch.testing.assert_close(value.double(), expected.detach(), rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(gradient, slope, rtol=1e-8, atol=1e-9)


def squared(a, delta):
    """The squared distance δᵀAδ."""
    return delta @ a @ delta
