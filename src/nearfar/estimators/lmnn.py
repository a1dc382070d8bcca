"""Large margin nearest neighbor."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import product
from typing import Any, Self

import torch
from numpy.typing import NDArray

from nearfar.estimators.base import LabelMethod, centered, principal_directions
from nearfar.estimators.solvers import lbfgs

Array = NDArray[Any]
CHUNK = 1 << 14
TILE = (1024, 2048)  # distances computed at a time
REACH = 100  # other samples within reach of a sample, on average, beyond which a step is too long


@dataclass(kw_only=True, eq=False, repr=False)
class LMNN(LabelMethod):
    """Pulls each sample's nearest neighbors of its class closer and pushes other classes out of their reach.

    Formula:
        min (1 − μ) Σ d(i, j) + μ Σ max(0, 1 + d(i, j) − d(i, l)) over samples i, their k target neighbors j of the same
        class and all l of other classes, with d the squared distance after G.

    Args:
        neighbors: k. Target neighbors are the nearest of the class before training.
        push: μ, the weight of the second sum.
        n_components: The number of output dimensions; that of the input by default.
        rounds: How often the samples of other classes within reach are searched.
        max_iter: L-BFGS iterations between two searches.
        tol: Rounds end when the objective improves by less than this share.

    Differences:
        Only samples within reach are compared between two searches, which are exact. A round that would increase the
        objective over all samples, or bring far more samples within reach, is shortened, so the objective never
        increases.

    Reference:
        Weinberger and Saul, "Distance metric learning for large margin nearest neighbor classification", JMLR 2009.

    Example:
        >>> from sklearn.datasets import load_iris
        >>> LMNN(n_components=2).fit_transform(*load_iris(return_X_y=True)).shape
        (150, 2)
    """

    neighbors: int = 3
    push: float = 0.5
    n_components: int | None = None
    rounds: int = 12
    max_iter: int = 10
    tol: float = 1e-4

    def _learn(self, samples: Array, codes: Array) -> Self:
        if not 0 < self.push < 1:
            raise ValueError(f"push is {self.push}; it must be between 0 and 1")
        data = centered(samples, self.device, torch.float64 if len(samples) <= 5000 else torch.float32)
        labels = torch.as_tensor(codes, device=data.device)
        order = torch.argsort(labels, stable=True)  # classes are contiguous, so that a class is a range of columns
        data, labels = data[order], labels[order]
        targets = target_neighbors(data, labels, self.neighbors)
        g = principal_directions(data, self.n_components)
        pairs = within_reach(data @ g.T, labels, targets)
        value = self._objective(g, data, targets, pairs)[0]
        history = [float(value)]
        for _ in range(self.rounds):
            objective = partial(self._objective, data=data, targets=targets, pairs=pairs)
            proposal = lbfgs(objective, g, max_iter=self.max_iter, tol=self.tol / 10)[0].to(data)
            most = max(REACH * len(data), 2 * len(pairs.rows))
            for _ in range(10):
                trial = within_reach(data @ proposal.T, labels, targets, most)
                if len(trial.rows) <= most:
                    reached = self._objective(proposal, data, targets, trial)[0]
                    if reached < value:
                        break
                proposal = (proposal + g) / 2
            else:
                break
            g, value = proposal, reached
            history.append(float(value))
            pairs = trial.union(pairs)
            if history[-2] - history[-1] <= self.tol * abs(history[-1]):
                break
        return self._set(g, history)

    def _objective(
        self, g: torch.Tensor, data: torch.Tensor, targets: torch.Tensor, pairs: SparsePairs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the objective over the target neighbors and the given pairs, and its gradient by G."""
        points = data @ g.T
        reach = target_distances(points, targets)
        distances = pairs.distances(points)
        pushed = torch.zeros_like(distances)  # how many target neighbors the other sample is too close for
        pulls = reach.isfinite().to(points) * (1 - self.push)
        total = reach[reach.isfinite()].sum(dtype=torch.float64) * (1 - self.push)
        for j in range(reach.shape[1]):
            excess = 1 + reach[pairs.rows, j] - distances
            active = (excess > 0) & excess.isfinite()
            total += excess[active].sum(dtype=torch.float64) * self.push
            pushed += active
            pulls[:, j] += self.push * torch.bincount(pairs.rows[active], minlength=len(points)).to(points)
        gradient = pairs.laplacian(points, -self.push * pushed)
        for j in range(reach.shape[1]):
            difference = (points - points[targets[:, j].clamp_min(0)]) * pulls[:, j, None]
            gradient += difference
            gradient.index_add_(0, targets[:, j].clamp_min(0), difference, alpha=-1)
        return total, 2 * gradient.T @ data


@dataclass(frozen=True)
class SparsePairs:
    """Pairs of rows as the non-zero places of a sparse matrix, by rows and, for its transpose, by columns."""

    rows: torch.Tensor  # the first sample of each pair, in increasing order
    columns: torch.Tensor
    n: int  # samples

    def union(self, other: SparsePairs) -> SparsePairs:
        """Return the pairs of both, once each."""
        keys = torch.cat([self.rows * self.n + self.columns, other.rows * self.n + other.columns])
        keys = torch.unique(keys)
        return SparsePairs(keys // self.n, keys % self.n, self.n)

    def distances(self, points: torch.Tensor) -> torch.Tensor:
        """Return the squared distance of each pair."""
        distances = points.new_empty(len(self.rows))
        for start in range(0, len(distances), CHUNK):
            part = slice(start, start + CHUNK)
            difference = points[self.rows[part]].sub_(points[self.columns[part]])
            torch.linalg.vecdot(difference, difference, out=distances[part])
        return distances

    def laplacian(self, points: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return half the gradient of Σ w |z_i − z_j|² by the points."""
        sums = torch.zeros_like(points[:, 0])
        sums.index_add_(0, self.rows, weights).index_add_(0, self.columns, weights)
        product = self._sparse(self.rows, self.columns, weights) @ points
        order = self._by_column
        product += self._sparse(self.columns[order], self.rows[order], weights[order]) @ points
        return sums[:, None] * points - product

    @cached_property
    def _by_column(self) -> torch.Tensor:
        return torch.argsort(self.columns, stable=True)

    def _sparse(self, rows: torch.Tensor, columns: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        places = torch.stack([rows, columns])
        return torch.sparse_coo_tensor(places, weights, (self.n, self.n), check_invariants=False, is_coalesced=True)


def target_neighbors(data: torch.Tensor, labels: torch.Tensor, k: int) -> torch.Tensor:
    """Return the k nearest samples of the same class, -1 where a class has too few."""
    targets = torch.full((len(data), k), -1, device=data.device)
    start = 0
    for size in torch.bincount(labels).tolist():
        part = data[start : start + size]
        count = min(k, size - 1)
        if count:
            for first in range(0, size, 2048):
                rows = part[first : first + 2048]
                distances = torch.cdist(rows, part)
                distances.diagonal(first).fill_(torch.inf)
                nearest = distances.topk(count, dim=1, largest=False).indices
                targets[start + first : start + first + len(rows), :count] = nearest + start
        start += size
    return targets


def target_distances(points: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the squared distances to the target neighbors, -inf where there is none."""
    columns = [(points - points[column.clamp_min(0)]).square().sum(dim=1) for column in targets.T]
    return torch.where(targets >= 0, torch.stack(columns, dim=1), -torch.inf)


def within_reach(
    points: torch.Tensor, labels: torch.Tensor, targets: torch.Tensor, most: float = math.inf
) -> SparsePairs:
    """Find all samples of other classes closer than the farthest target neighbor plus the margin of 1."""
    limit = target_distances(points, targets).max(dim=1).values + 1
    norms = points.square().sum(dim=1)
    ends = torch.bincount(labels).cumsum(0).tolist()
    parts = []
    start = count = 0
    for end in ends:  # each pair of classes once: its distances serve both
        for first, other in product(range(start, end, TILE[0]), range(end, len(points), TILE[1])):
            if count > most:
                break
            rows, columns = slice(first, min(first + TILE[0], end)), slice(other, other + TILE[1])
            distances = torch.addmm(norms[columns], points[rows], points[columns].T, alpha=-2).add_(norms[rows, None])
            for close, transposed in ((distances < limit[rows, None], False), (distances < limit[columns], True)):
                row, column = close.nonzero(as_tuple=True)
                pair = (row + first, column + other)
                parts.append(pair[transposed] * len(points) + pair[not transposed])
                count += len(row)
        start = end
    keys = torch.cat(parts).sort().values
    return SparsePairs(keys // len(points), keys % len(points), len(points))
