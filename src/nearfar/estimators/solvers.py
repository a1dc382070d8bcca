"""Solvers of the classical methods: descent over positive semi-definite matrices, L-BFGS, distances in tiles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Objective = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Value and gradient of a function at a matrix."""


def project(matrix: torch.Tensor) -> torch.Tensor:
    """Return the closest positive semi-definite matrix."""
    values, vectors = torch.linalg.eigh((matrix + matrix.T) / 2)
    projected: torch.Tensor = (vectors * values.clamp_min(0)) @ vectors.T
    return projected


def project_diagonal(matrix: torch.Tensor) -> torch.Tensor:
    """Return the closest non-negative diagonal matrix."""
    return matrix.diagonal().clamp_min(0).diag()


def descend(
    objective: Objective,
    start: torch.Tensor,
    *,
    max_iter: int,
    tol: float,
    projection: Callable[[torch.Tensor], torch.Tensor] = project,
) -> tuple[torch.Tensor, list[float]]:
    """Minimize a function over a convex set of matrices by spectral projected gradients.

    The step length is that of Barzilai and Borwein. A line search makes sure that the objective never increases; it
    also keeps the iterates inside the domain of an objective that is infinite elsewhere.
    """
    point = start
    value, gradient = objective(point)
    history = [float(value)]
    length = 1.0 / max(float(gradient.norm()), 1e-12)
    for _ in range(max_iter):
        direction = projection(point - length * gradient) - point
        slope = float((gradient * direction).sum())
        if slope >= 0:
            break
        share = 1.0
        while share > 1e-12:
            trial = point + share * direction
            trial_value, trial_gradient = objective(trial)
            if float(trial_value) <= float(value) + 1e-4 * share * slope:
                break
            share /= 4 if not torch.isfinite(trial_value) else 2
        else:
            break
        step, change = trial - point, trial_gradient - gradient
        curvature = float((step * change).sum())
        length = float(np.clip(float((step * step).sum()) / curvature, 1e-12, 1e12)) if curvature > 0 else 2 * length
        gain = float(value) - float(trial_value)
        point, value, gradient = trial, trial_value, trial_gradient
        history.append(float(value))
        if gain <= tol * max(abs(float(value)), 1e-12):
            break
    return point, history


def lbfgs(objective: Objective, start: torch.Tensor, *, max_iter: int, tol: float) -> tuple[torch.Tensor, list[float]]:
    """Minimize a smooth function of a matrix by L-BFGS."""
    from scipy.optimize import minimize

    values: list[float] = []

    def flat(x: NDArray[Any]) -> tuple[float, NDArray[Any]]:
        value, gradient = objective(torch.as_tensor(x.reshape(start.shape), dtype=start.dtype, device=start.device))
        if not values:
            values.append(float(value))
        return float(value), gradient.double().cpu().numpy().ravel()

    def note(intermediate_result: Any) -> None:
        values.append(float(intermediate_result.fun))

    first = start.double().cpu().numpy().ravel()
    result = minimize(
        flat, first, jac=True, method="L-BFGS-B", callback=note, options={"maxiter": max_iter, "ftol": tol, "maxls": 30}
    )
    return torch.as_tensor(result.x.reshape(start.shape), dtype=torch.float64, device=start.device), values


def over_factor(objective: Objective) -> Objective:
    """Return a function of A as one of G with A = GᵀG, which needs no constraint."""

    def of_factor(g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        value, gradient = objective(g.T @ g)
        return value, 2 * g @ gradient

    return of_factor


def regularized(regularizer: Objective, cost: Objective, weight: float = 1.0) -> Objective:
    """Return the sum of a regularizer and a weighted cost, which is not computed where the regularizer is infinite."""

    def objective(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        value, gradient = regularizer(matrix)
        if not torch.isfinite(value):
            return value, gradient
        charged, slope = cost(matrix)
        return value + weight * charged, gradient + weight * slope

    return objective


def squared_distances(differences: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """Return δᵀAδ of each pair."""
    return ((differences @ matrix) * differences).sum(dim=1)


def pair_bounds(
    similar_pairs: torch.Tensor, dissimilar_pairs: torch.Tensor, upper: float | None = None, lower: float | None = None
) -> torch.Tensor:
    """Return the bound of each similar and then of each dissimilar pair's squared distance."""
    squared = torch.cat([similar_pairs, dissimilar_pairs]).square().sum(dim=1)
    similar = squared.quantile(0.05) if upper is None else squared.new_tensor(upper)
    dissimilar = squared.quantile(0.95) if lower is None else squared.new_tensor(lower)
    return torch.cat([similar.expand(len(similar_pairs)), dissimilar.expand(len(dissimilar_pairs))])


def weighted_scatter(differences: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return Σ w δδᵀ."""
    return (differences * weights[:, None]).T @ differences


def logdet_divergence(matrix: torch.Tensor, inverse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tr(A A₀⁻¹) − log det(A A₀⁻¹) − d and its gradient by A; infinite if A is not positive definite."""
    root, failed = torch.linalg.cholesky_ex(matrix)
    if failed:
        return torch.full((), torch.inf).to(matrix), inverse
    logarithm = 2 * root.diagonal().log().sum() + torch.linalg.slogdet(inverse).logabsdet
    return (matrix * inverse).sum() - logarithm - len(matrix), inverse - torch.cholesky_inverse(root)


def over_rows(
    points: torch.Tensor,
    weigh: Callable[[torch.Tensor, slice], tuple[torch.Tensor, torch.Tensor]],
    tile: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum a function of each point's squared distances to all points, with its gradient, in tiles of rows."""
    n = len(points)
    size = 8 if points.device.type == "cpu" else 64  # MiB; the kernel takes larger tensors back when they are freed
    tile = tile or max(1, (size << 20) // (n * points.element_size()))
    norms = points.square().sum(dim=1)
    total = points.new_zeros((), dtype=torch.float64)
    gradient = torch.zeros_like(points)
    for start in range(0, n, tile):
        rows = slice(start, min(start + tile, n))
        part = points[rows]
        distances = torch.addmm(norms, part, points.T, alpha=-2).add_(norms[rows, None]).clamp_min_(0)
        distances.diagonal(rows.start).zero_()
        value, weights = weigh(distances, rows)
        total += value.double()
        gradient[rows].addcmul_(weights.sum(dim=1, keepdim=True), part).sub_(weights @ points)
        gradient.addcmul_(weights.sum(dim=0)[:, None], points).addmm_(weights.T, part, alpha=-1)
    return total, gradient.mul_(2)
