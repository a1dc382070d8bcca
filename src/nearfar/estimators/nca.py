"""Methods in which each sample chooses neighbors at random by distance: NCA, MCML and MLKR."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Self

import torch
from numpy.typing import ArrayLike, NDArray

from nearfar.estimators.base import LabelMethod, centered, principal_directions, to_device
from nearfar.estimators.solvers import lbfgs, over_rows

Array = NDArray[Any]
Precision = Literal["auto", "float32", "float64"]
Weigh = Callable[[torch.Tensor, slice], tuple[torch.Tensor, torch.Tensor]]


def _choose(distances: torch.Tensor, rows: slice) -> torch.Tensor:
    """Return the probabilities p_ij with which each row chooses each other sample; its own is zero."""
    distances.diagonal(rows.start).fill_(torch.inf)
    return torch.softmax(distances.neg_(), dim=1)


@dataclass(kw_only=True, eq=False, repr=False)
class _SoftmaxNeighbors(LabelMethod):
    """Common settings of the three methods.

    Args:
        n_components: The number of output dimensions; that of the input by default.
        max_iter: The largest number of L-BFGS iterations.
        tol: Iterations end when the objective improves by less than this share.
        precision: "float32", "float64" or "auto": float32 from 5,000 samples on.
    """

    n_components: int | None = None
    max_iter: int = 50
    tol: float = 1e-8
    precision: Precision = "auto"

    def _tensor(self, samples: Array) -> torch.Tensor:
        """Return the centered samples in the wanted precision."""
        if self.precision not in ("auto", "float32", "float64"):
            raise ValueError(f"precision is {self.precision!r}; it must be 'auto', 'float32' or 'float64'")
        double = self.precision == "float64" or (self.precision == "auto" and len(samples) <= 5000)
        return centered(samples, self.device, torch.float64 if double else torch.float32)

    def _minimize(self, data: torch.Tensor, weigh: Weigh) -> Self:
        """Minimize a sum over rows of distances by L-BFGS over G, from the principal directions."""

        def objective(g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            value, gradient = over_rows(data @ g.T, weigh)
            return value, gradient.T @ data

        start = principal_directions(data, self.n_components)
        return self._set(*lbfgs(objective, start, max_iter=self.max_iter, tol=self.tol))


class NCA(_SoftmaxNeighbors):
    """Neighborhood components analysis: maximizes the expected accuracy of random neighbors.

    Formula:
        max Σ_i Σ_{j in class of i} p_ij, p_ij = exp(−|Gx_i − Gx_j|²) / Σ_{k ≠ i} exp(−|Gx_i − Gx_k|²).

    Differences:
        Memory is O(tile · n) instead of O(n²).

    Reference:
        Goldberger et al., "Neighbourhood components analysis", NIPS 2004.

    Example:
        >>> from sklearn.datasets import load_iris
        >>> NCA(n_components=2).fit_transform(*load_iris(return_X_y=True)).shape
        (150, 2)
    """

    def _learn(self, samples: Array, codes: Array) -> Self:
        data = self._tensor(samples)
        labels = torch.as_tensor(codes, device=data.device)

        def weigh(distances: torch.Tensor, rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
            chosen = _choose(distances, rows)
            same = torch.mul(chosen, labels[rows, None] == labels, out=distances)
            hit = same.sum(dim=1, keepdim=True)
            return -hit.sum(), same.addcmul_(chosen, hit, value=-1)  # of −Σ p_i by the distances

        return self._minimize(data, weigh)


class MCML(_SoftmaxNeighbors):
    """Maximally collapsing metric learning: random neighbors as close as possible to uniform choice in the class.

    Formula:
        min −Σ_i mean of log p_ij over the other samples j of the class of i, with p_ij as for NCA.

    Args:
        n_components: The rank of A = GᵀG; by default full, where every local minimum is a global one.

    Differences:
        G is optimized instead of A. Samples that are alone in their class contribute nothing.

    Reference:
        Globerson and Roweis, "Metric learning by collapsing classes", NIPS 2005.

    Example:
        >>> from sklearn.datasets import load_iris
        >>> MCML().fit_transform(*load_iris(return_X_y=True)).shape
        (150, 4)
    """

    def _learn(self, samples: Array, codes: Array) -> Self:
        data = self._tensor(samples)
        labels = torch.as_tensor(codes, device=data.device)
        others = (torch.bincount(labels) - 1)[labels].to(data)

        def weigh(distances: torch.Tensor, rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
            wanted = (labels[rows, None] == labels).to(data)
            wanted.diagonal(rows.start).zero_()
            wanted /= others[rows, None].clamp_min(1)
            present = (others[rows] > 0).to(data)
            mean = (wanted * distances).sum(dim=1)
            chosen = _choose(distances, rows)  # from here on, distances holds their negatives
            logarithm = torch.logsumexp(distances, dim=1)
            return ((mean + logarithm) * present).sum(), wanted.sub_(chosen.mul_(present[:, None]))

        return self._minimize(data, weigh)


class MLKR(_SoftmaxNeighbors):
    """Metric learning for kernel regression: minimizes the leave-one-out error of a kernel regression.

    Formula:
        min Σ_i (y_i − Σ_j p_ij y_j)², with p_ij as for NCA.

    Reference:
        Weinberger and Tesauro, "Metric learning for kernel regression", AISTATS 2007.

    Example:
        >>> from sklearn.datasets import load_diabetes
        >>> MLKR(n_components=2, max_iter=5).fit_transform(*load_diabetes(return_X_y=True)).shape
        (442, 2)
    """

    def fit(self, X: ArrayLike, y: ArrayLike) -> Self:
        """Learn from numbers.

        Args:
            X: Samples, of shape (n, features).
            y: The number to predict for each sample.
        """
        samples, numbers = self._check_labels(X, y, numeric=True)
        data = self._tensor(samples)
        targets = to_device(numbers - numbers.mean(), self.device, data.dtype)

        def weigh(distances: torch.Tensor, rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
            chosen = _choose(distances, rows)
            predicted = chosen @ targets
            error = predicted - targets[rows]
            return error.square().sum(), chosen.mul_(-2 * error[:, None]).mul_(targets - predicted[:, None])

        return self._minimize(data, weigh)
