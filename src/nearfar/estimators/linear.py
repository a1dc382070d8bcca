"""The general model of linear metric learning: a regularizer and a sum of losses over positive semi-definite A."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.utils import check_random_state

from nearfar.estimators.base import centered, factor, principal_directions, to_device
from nearfar.estimators.pairs import ConstraintMethod, check_pairs, check_tuples, draw_pairs, draw_triplets
from nearfar.estimators.solvers import (
    Objective,
    descend,
    lbfgs,
    logdet_divergence,
    over_factor,
    pair_bounds,
    regularized,
    squared_distances,
    weighted_scatter,
)
from nearfar.utils.validation import positive

Array = NDArray[Any]


@dataclass(kw_only=True, eq=False, repr=False)
class LinearMetric(ConstraintMethod):
    """Learns a metric by minimizing a regularizer plus a weighted sum of losses.

    Formula:
        min over A ⪰ 0 of r(A) + λ Σ c(d_A), with d_A(x, y) = (x − y)ᵀA(x − y).

        r: "frobenius" ½‖A‖², "trace" tr(AC), "logdet" tr(A) − log det A − d.

        c: "hinge" max(0, d − u) for similar and max(0, l − d) for dissimilar pairs; "relative"
        max(0, d(i, j) − d(i, k) + m) for triplets; "squared" (d − t)² for pairs with target t.

    Args:
        regularizer: "frobenius", "trace" or "logdet".
        loss: "hinge", "relative" or "squared".
        trade_off: λ.
        reference: C of the trace: "similar" for the sum of (x − y)(x − y)ᵀ over similar pairs, divided by their
            number, or "identity".
        upper: u; by default the 5th percentile of the squared distances of the drawn pairs.
        lower: l; by default their 95th percentile.
        margin: m of the relative loss.
        n_components: The rank of A = GᵀG. Without it A has full rank and the problem is convex.
        max_iter: The largest number of iterations.
        tol: Iterations end when the objective improves by less than this share.

    Differences:
        "squared" uses u and l as targets of similar and dissimilar pairs if no targets are given.

    Reference:
        Kulis, "Metric learning: a survey", 2013. Thesis 2.1 to 2.9.

    Example:
        >>> from sklearn.datasets import load_iris
        >>> X, y = load_iris(return_X_y=True)
        >>> model = LinearMetric(regularizer="logdet", loss="relative", random_state=0).fit(X, y)
        >>> model.transform(X).shape
        (150, 4)
    """

    regularizer: Literal["frobenius", "trace", "logdet"] = "frobenius"
    loss: Literal["hinge", "relative", "squared"] = "hinge"
    trade_off: float = 1.0
    reference: Literal["similar", "identity"] = "similar"
    upper: float | None = None
    lower: float | None = None
    margin: float = 1.0
    n_components: int | None = None
    max_iter: int = 200
    tol: float = 1e-6

    def fit(
        self,
        X: ArrayLike,
        y: ArrayLike | None = None,
        *,
        pairs: Any = None,
        triplets: ArrayLike | None = None,
        targets: ArrayLike | None = None,
    ) -> Self:
        """Learn from labels, pairs or triplets.

        Args:
            X: Samples, of shape (n, features).
            y: Class labels, from which constraints are drawn.
            pairs: Instead of ``y``, which is then ignored: rows (left, right, same) for "hinge" and "squared".
            triplets: Instead of ``y``, which is then ignored: rows (anchor, nearer, farther) for "relative".
            targets: The wanted squared distance of each row of ``pairs``, for "squared".
        """
        self._check_settings()
        samples, labels = self._check(X, y if pairs is None and triplets is None else None)
        data = centered(samples, self.device)
        similar, dissimilar, tuples = self._constraints(labels, pairs, triplets, len(samples))
        pulled, pushed = (data[rows[:, 0]] - data[rows[:, 1]] for rows in (similar, dissimilar))
        if self.loss == "relative":
            pulled, pushed = data[tuples[:, 0]] - data[tuples[:, 1]], data[tuples[:, 0]] - data[tuples[:, 2]]
            if not len(pulled):
                raise ValueError("no triplets can be drawn from y: no class has two samples")
        cost = self._loss(pulled, pushed, pairs, targets)
        objective = regularized(self._regularizer(pulled), cost, self.trade_off)
        if self.n_components is None:
            start = torch.eye(data.shape[1]).to(data)
            matrix, history = descend(objective, start, max_iter=self.max_iter, tol=self.tol)
            return self._set(factor(matrix), history)
        start = principal_directions(data, self.n_components)
        return self._set(*lbfgs(over_factor(objective), start, max_iter=self.max_iter, tol=self.tol))

    def _check_settings(self) -> None:
        for name, allowed in (
            ("regularizer", ("frobenius", "trace", "logdet")),
            ("loss", ("hinge", "relative", "squared")),
            ("reference", ("similar", "identity")),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be one of {', '.join(allowed)}")
        positive("trade_off", self.trade_off)
        if self.regularizer == "logdet" and self.n_components is not None:
            raise ValueError("regularizer 'logdet' is infinite for A of low rank; remove n_components")

    def _constraints(self, labels: Array | None, pairs: Any, triplets: ArrayLike | None, n: int) -> tuple[Array, ...]:
        empty = np.empty((0, 2), dtype=np.int64)
        random = check_random_state(self.random_state)
        if self.loss == "relative":
            if pairs is not None:
                raise ValueError("loss 'relative' learns from labels or triplets, not from pairs")
            if triplets is not None:
                return empty, empty, check_tuples(triplets, 3, n, "triplets")
            if labels is not None:
                return empty, empty, draw_triplets(labels, self.n_constraints, random)
        elif triplets is not None:
            raise ValueError(f"loss {self.loss!r} learns from labels or pairs, not from triplets")
        elif pairs is not None:
            return *check_pairs(pairs, n), empty
        elif labels is not None:
            return *draw_pairs(labels, self.n_constraints, random), empty
        raise ValueError(
            "LinearMetric requires y to be passed, but the target y is None; the alternative is "
            + ("triplets" if self.loss == "relative" else "pairs")
        )

    def _regularizer(self, pulled: torch.Tensor) -> Objective:
        d = pulled.shape[1]
        identity = torch.eye(d).to(pulled)
        if self.regularizer == "frobenius":
            return lambda a: (a.square().sum() / 2, a)
        if self.regularizer == "trace":
            c = identity if self.reference == "identity" or not len(pulled) else pulled.T @ pulled / len(pulled)
            return lambda a: ((a * c).sum(), c)

        return lambda a: logdet_divergence(a, identity)

    def _loss(self, pulled: torch.Tensor, pushed: torch.Tensor, pairs: Any, targets: ArrayLike | None) -> Objective:
        if self.loss == "relative":

            def relative(a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
                excess = squared_distances(pulled, a) - squared_distances(pushed, a) + self.margin
                active = (excess > 0).to(a)
                return (excess * active).sum(), weighted_scatter(pulled, active) - weighted_scatter(pushed, active)

            return relative
        wanted = pair_bounds(pulled, pushed, self.upper, self.lower)
        if self.loss == "hinge":
            upper, lower = wanted[: len(pulled)], wanted[len(pulled) :]

            def hinge(a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
                above, below = squared_distances(pulled, a) - upper, lower - squared_distances(pushed, a)
                value = above.clamp_min(0).sum() + below.clamp_min(0).sum()
                return value, weighted_scatter(pulled, (above > 0).to(a)) - weighted_scatter(pushed, (below > 0).to(a))

            return hinge
        delta = torch.cat([pulled, pushed])
        if targets is not None:
            if pairs is None:
                raise ValueError("targets are given without pairs; each row of pairs needs its target")
            given = to_device(np.asarray(targets, dtype=np.float64).ravel(), self.device)
            if len(given) != len(delta):
                raise ValueError(f"targets has {len(given)} values; pairs has {len(delta)} rows")
            same = torch.as_tensor(
                np.asarray(getattr(pairs, "same", None) if hasattr(pairs, "same") else np.asarray(pairs)[:, 2]) == 1
            )
            wanted = torch.cat([given[same], given[~same]])

        def squared(a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            error = squared_distances(delta, a) - wanted
            return error.square().sum(), weighted_scatter(delta, 2 * error)

        return squared
