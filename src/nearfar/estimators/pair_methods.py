"""Methods that learn from pairs or quadruplets: MMC, ITML, LSML and, one pair at a time, POLA."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.utils import check_random_state
from sklearn.utils.validation import validate_data

from nearfar.estimators.base import centered, factor, to_device
from nearfar.estimators.pairs import ConstraintMethod, check_pairs, check_tuples, draw_pairs
from nearfar.estimators.solvers import (
    descend,
    lbfgs,
    logdet_divergence,
    over_factor,
    pair_bounds,
    project,
    project_diagonal,
    regularized,
    squared_distances,
    weighted_scatter,
)
from nearfar.utils.validation import positive

Array = NDArray[Any]


class _PairMethod(ConstraintMethod):
    """Reads labels or pairs as centered samples and the differences of similar and of dissimilar ones."""

    def fit(self, X: ArrayLike, y: ArrayLike | None = None, *, pairs: Any = None) -> Self:
        """Learn from labels or pairs.

        Args:
            X: Samples, of shape (n, features).
            y: Class labels, from which pairs are drawn.
            pairs: Instead of ``y``, which is then ignored: rows (left, right, same).
        """
        return self._learn(*self._differences(X, y, pairs))

    def _learn(self, data: torch.Tensor, similar: torch.Tensor, dissimilar: torch.Tensor) -> Self:
        """Learn from centered samples and the differences of similar and of dissimilar pairs."""
        raise NotImplementedError

    def _differences(self, X: ArrayLike, y: ArrayLike | None, pairs: Any) -> tuple[torch.Tensor, ...]:
        samples, labels = self._check(X, y if pairs is None else None)
        if pairs is not None:
            similar, dissimilar = check_pairs(pairs, len(samples))
        elif labels is not None:
            similar, dissimilar = draw_pairs(labels, self.n_constraints, check_random_state(self.random_state))
        else:
            name = type(self).__name__
            raise ValueError(f"{name} requires y to be passed, but the target y is None; pairs are the alternative")
        data = centered(samples, self.device)
        return data, *(data[rows[:, 0]] - data[rows[:, 1]] for rows in (similar, dissimilar))


@dataclass(kw_only=True, eq=False, repr=False)
class MMC(_PairMethod):
    """Pulls similar pairs together while the distances of dissimilar pairs keep their sum.

    Formula:
        min over A ⪰ 0 of Σ_similar d_A² − log Σ_dissimilar d_A, with d_A the distance; the first sum is divided by the
        number of pairs. Up to its scale, this A minimizes Σ_similar d_A² subject to Σ_dissimilar d_A ≥ 1.

    Args:
        diagonal: Learn only a weight for each feature.
        max_iter: The largest number of iterations.
        tol: Iterations end when the objective improves by less than this share. 1e-6 comes close to the optimum, which
            has few dimensions; stopping early is better for neighbors in cross-validation.

    Differences:
        The constrained problem of the paper is solved in the equivalent unconstrained form, which the paper uses for
        diagonal matrices, by projected gradients.

    Reference:
        Xing et al., "Distance metric learning with application to clustering with side-information", NIPS 2002.

    Example:
        >>> from sklearn.datasets import load_iris
        >>> MMC(random_state=0).fit_transform(*load_iris(return_X_y=True)).shape[0]
        150
    """

    diagonal: bool = False
    max_iter: int = 200
    tol: float = 0.1

    def _learn(self, data: torch.Tensor, similar: torch.Tensor, dissimilar: torch.Tensor) -> Self:
        if not len(similar) or not len(dissimilar):
            raise ValueError(f"there are {len(similar)} similar and {len(dissimilar)} dissimilar pairs; MMC needs both")
        pull = similar.T @ similar / len(similar)

        def objective(a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            distances = squared_distances(dissimilar, a).clamp_min(0).sqrt()
            total = distances.mean()
            if total == 0:
                return torch.full((), torch.inf).to(a), pull
            slope = weighted_scatter(dissimilar, 0.5 / (distances.clamp_min(1e-12) * total * len(dissimilar)))
            return (a * pull).sum() - total.log(), pull - slope

        start = torch.eye(pull.shape[0]).to(pull) / pull.trace().clamp_min(1e-12)
        projection = project_diagonal if self.diagonal else project
        matrix, history = descend(objective, start, max_iter=self.max_iter, tol=self.tol, projection=projection)
        return self._set(factor(matrix), history)


@dataclass(kw_only=True, eq=False, repr=False)
class ITML(_PairMethod):
    """Information-theoretic metric learning: stays close to a prior metric while pairs keep to distance bounds.

    Formula:
        min over A, ξ of D(A, A₀) + γ Σ D(ξ, ξ₀) with d_A ≤ ξ for similar and d_A ≥ ξ for dissimilar pairs, where D is
        the LogDet divergence, d_A the squared distance and ξ₀ is u or l.

    Args:
        gamma: γ, how much it costs to break a bound.
        bounds: (u, l) for squared distances; by default the 5th and 95th percentile of the pairs' squared distances.
        prior: A₀: "identity" or "covariance" (the inverse covariance of the samples).
        max_iter: The largest number of iterations.
        tol: Iterations end when the objective improves by less than this share.

    Differences:
        The paper projects on one constraint after another. Here ξ is eliminated, which leaves γ Σ (t − log t − 1) with
        t = d_A / ξ₀ over the broken bounds, and A = GᵀG is found by L-BFGS on all constraints: the same solution.

    Reference:
        Davis et al., "Information-theoretic metric learning", ICML 2007.

    Example:
        >>> from sklearn.datasets import load_iris
        >>> len(ITML(random_state=0).fit_transform(*load_iris(return_X_y=True)))
        150
    """

    gamma: float = 1.0
    bounds: tuple[float, float] | None = None
    prior: str = "identity"
    max_iter: int = 200
    tol: float = 1e-6

    def _learn(self, data: torch.Tensor, similar: torch.Tensor, dissimilar: torch.Tensor) -> Self:
        positive("gamma", self.gamma)
        if self.bounds is not None and (len(self.bounds) != 2 or min(self.bounds) <= 0):
            raise ValueError(f"bounds is {tuple(self.bounds)}; it must be two positive numbers")
        delta = torch.cat([similar, dissimilar])
        sign = torch.cat([torch.ones(len(similar)), -torch.ones(len(dissimilar))]).to(delta)
        bound = pair_bounds(similar, dissimilar, *(self.bounds or (None, None))).clamp_min(1e-9)
        prior, inverse = prior_metric(self.prior, data)

        def cost(a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            ratio = squared_distances(delta, a) / bound
            broken = (sign * ratio > sign) & (ratio > 0)  # no metric changes the distance of equal samples
            ratio = torch.where(broken, ratio.clamp_min(1e-200), 1.0)  # a bound that holds costs nothing
            return (ratio - ratio.log() - 1).sum(), weighted_scatter(delta, (1 - 1 / ratio) / bound)

        objective = over_factor(regularized(partial(logdet_divergence, inverse=inverse), cost, self.gamma))
        return self._set(*lbfgs(objective, factor(prior), max_iter=self.max_iter, tol=self.tol))


def prior_metric(prior: str, data: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the prior metric A₀ and its inverse."""
    d = data.shape[1]
    identity = torch.eye(d).to(data)
    if prior == "identity":
        return identity, identity
    if prior == "covariance":
        covariance = data.T @ data / (len(data) - 1)
        covariance = covariance + 1e-9 * covariance.trace() / d * identity
        inverse = torch.linalg.inv(covariance)
        return (inverse + inverse.T) / 2, covariance
    raise ValueError(f"prior is {prior!r}; it must be 'identity' or 'covariance'")


@dataclass(kw_only=True, eq=False, repr=False)
class LSML(ConstraintMethod):
    """Least-squares metric learning from relative comparisons, close to a prior metric.

    Formula:
        min over A ≻ 0 of Σ w max(0, d_A(a, b) − d_A(c, d))² + D(A, A₀), with d_A the distance and D the LogDet
        divergence; the sum is divided by the number of comparisons.

    Args:
        prior: A₀: "identity" or "covariance" (the inverse covariance of the samples).
        max_iter: The largest number of iterations.
        tol: Iterations end when the objective improves by less than this share.

    Reference:
        Liu et al., "Metric learning from relative comparisons by minimizing squared residual", ICDM 2012.

    Example:
        >>> from sklearn.datasets import load_iris
        >>> LSML(random_state=0).fit_transform(*load_iris(return_X_y=True)).shape
        (150, 4)
    """

    prior: str = "identity"
    max_iter: int = 200
    tol: float = 1e-6

    def fit(
        self,
        X: ArrayLike,
        y: ArrayLike | None = None,
        *,
        quadruplets: ArrayLike | None = None,
        triplets: ArrayLike | None = None,
        weights: ArrayLike | None = None,
    ) -> Self:
        """Learn from labels, quadruplets or triplets.

        Args:
            X: Samples, of shape (n, features).
            y: Class labels, from which comparisons of a similar and a dissimilar pair are drawn; ignored where
                comparisons are given.
            quadruplets: Instead of ``y``: rows (a, b, c, d) where a and b are closer than c and d.
            triplets: Instead of ``y``: rows (anchor, nearer, farther).
            weights: The weight w of each given comparison, not negative; 1 by default.
        """
        if quadruplets is not None and triplets is not None:
            raise ValueError("both quadruplets and triplets are given; LSML learns from one of them")
        samples, labels = self._check(X, y if quadruplets is None and triplets is None else None)
        if quadruplets is not None:
            rows = check_tuples(quadruplets, 4, len(samples), "quadruplets")
        elif triplets is not None:
            rows = check_tuples(triplets, 3, len(samples), "triplets")[:, [0, 1, 0, 2]]
        elif labels is not None:
            similar, dissimilar = draw_pairs(labels, self.n_constraints, check_random_state(self.random_state))
            rows = np.column_stack([part[: min(len(similar), len(dissimilar))] for part in (similar, dissimilar)])
        else:
            raise ValueError("LSML requires y to be passed, but the target y is None; quadruplets are the alternative")
        if not len(rows):
            raise ValueError("no comparisons can be drawn from y: no class has two samples")
        data = centered(samples, self.device)
        closer, farther = data[rows[:, 0]] - data[rows[:, 1]], data[rows[:, 2]] - data[rows[:, 3]]
        weight = torch.ones(len(rows)).to(data) if weights is None else to_device(np.asarray(weights), self.device)
        if len(weight) != len(rows):
            raise ValueError(f"weights has {len(weight)} values; there are {len(rows)} comparisons")
        if not (weight >= 0).all():
            raise ValueError("weights holds a negative number or NaN")
        prior, inverse = prior_metric(self.prior, data)

        def cost(a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            first, second = (squared_distances(delta, a).clamp_min(1e-24).sqrt() for delta in (closer, farther))
            excess = (first - second).clamp_min(0)
            scaled = weight * excess / len(rows)
            slope = weighted_scatter(closer, scaled / first) - weighted_scatter(farther, scaled / second)
            return (scaled * excess).sum(), slope

        objective = over_factor(regularized(partial(logdet_divergence, inverse=inverse), cost))
        return self._set(*lbfgs(objective, factor(prior), max_iter=self.max_iter, tol=self.tol))


@dataclass(kw_only=True, eq=False, repr=False)
class POLA(_PairMethod):
    """Pseudo-metric online learning: one pair at a time, also by ``partial_fit``.

    Formula:
        Pair (x, y) with s = 1 (similar) or −1: loss max(0, s (d_A − b) + 1) of the squared distance. A and the
        threshold b move to the closest point with loss 0, then to the closest with A ⪰ 0 and b ≥ 1.

    Args:
        epochs: Passes over the pairs in ``fit``.

    Reference:
        Shalev-Shwartz et al., "Online and batch learning of pseudo-metrics", ICML 2004. Thesis 2.8.

    Example:
        >>> from sklearn.datasets import load_iris
        >>> model = POLA(random_state=0).fit(*load_iris(return_X_y=True))
        >>> model.threshold_ >= 1
        True
    """

    epochs: int = 1

    def _learn(self, data: torch.Tensor, similar: torch.Tensor, dissimilar: torch.Tensor) -> Self:
        d = data.shape[1]
        return self._update(torch.zeros(d, d).to(data), 1.0, similar, dissimilar, self.epochs)

    def partial_fit(self, X: ArrayLike, y: ArrayLike | None = None, *, pairs: Any = None) -> Self:
        """Learn from more labels or pairs, from the metric learned so far.

        Args:
            X: Samples, of shape (n, features).
            y: Class labels, from which pairs are drawn.
            pairs: Instead of ``y``, which is then ignored: rows (left, right, same).
        """
        if not hasattr(self, "matrix_"):
            return self._learn(*self._differences(X, y, pairs))
        validate_data(self, X, reset=False)
        _, similar, dissimilar = self._differences(X, y, pairs)
        return self._update(to_device(self.matrix_, self.device), self.threshold_, similar, dissimilar, 1)

    def _update(
        self, matrix: torch.Tensor, threshold: float, similar: torch.Tensor, dissimilar: torch.Tensor, epochs: int
    ) -> Self:
        """Move the metric by each pair, in random order."""
        delta = torch.cat([similar, dissimilar])
        sign = [1.0] * len(similar) + [-1.0] * len(dissimilar)
        random = check_random_state(self.random_state)
        for _ in range(epochs):
            for i in random.permutation(len(delta)):
                matrix, threshold = pola_update(matrix, threshold, delta[i], sign[i])
        self.matrix_: Array = np.asarray(matrix.cpu())
        self.threshold_ = threshold
        return self._set(factor(matrix))


def pola_update(matrix: torch.Tensor, threshold: float, delta: torch.Tensor, sign: float) -> tuple[torch.Tensor, float]:
    """Return metric and threshold after one pair."""
    loss = sign * (float(delta @ matrix @ delta) - threshold) + 1
    if loss <= 0:
        return matrix, threshold
    step = loss / (float(delta @ delta) ** 2 + 1)
    matrix = matrix - sign * step * torch.outer(delta, delta)
    return (project(matrix) if sign > 0 else matrix), max(1.0, threshold + sign * step)
