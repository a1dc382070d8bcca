"""Nonlinear metrics: any linear method in the feature space of a kernel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.base import clone
from sklearn.decomposition import KernelPCA
from sklearn.utils import Tags
from sklearn.utils.validation import check_is_fitted, validate_data

from nearfar.estimators.base import LinearTransformer, MetricLearner, check_numbers
from nearfar.utils.validation import one_of

Array = NDArray[Any]
KERNELS = ("rbf", "polynomial", "linear", "sigmoid", "cosine")


@dataclass(eq=False, repr=False)
class KernelMetric(MetricLearner):
    """Learns a linear metric in the feature space of a kernel.

    Formula:
        d(x, y) = |Gφ(x) − Gφ(y)| with κ(x, y) = φ(x)ᵀφ(y). By kernel PCA the training samples get coordinates with the
        same inner products, and any linear method learns G on these. Without a method,
        d(x, y)² = κ(x, x) − 2κ(x, y) + κ(y, y).

    Args:
        base: A linear estimator, such as ``LMNN()``; by default none, which gives the distance of the kernel itself.
        kernel: "rbf", "polynomial", "linear", "sigmoid", "cosine", or a function of two samples.
        gamma: Width of "rbf" (1/(2σ²)) and factor of "polynomial"; 1 / features by default.
        degree: Degree of "polynomial".
        coef0: Constant of "polynomial".
        n_components: The number of kernel PCA coordinates; all with a positive eigenvalue by default.

    Differences:
        "polynomial" is (γ xᵀy + c)^d; the document has γ = 1. New samples are projected on the span of the training
        samples, as kernel PCA does.

    Reference:
        Thesis 2.1.2. Chatpatanasiri et al., "A new kernelization framework for Mahalanobis distance learning
        algorithms", Neurocomputing 2010.

    Example:
        >>> from nearfar.estimators import LMNN
        >>> from sklearn.datasets import make_circles
        >>> X, y = make_circles(100, factor=0.5, random_state=0)
        >>> KernelMetric(LMNN(n_components=2), kernel="rbf").fit_transform(X, y).shape
        (100, 2)
    """

    base: LinearTransformer | None = None
    _: KW_ONLY
    kernel: str | Callable[[Array, Array], float] = "rbf"
    gamma: float | None = None
    degree: float = 3
    coef0: float = 1.0
    n_components: int | None = None

    def __sklearn_tags__(self) -> Tags:
        """Return scikit-learn's tags: ``y`` is required if the linear method requires it."""
        tags = super().__sklearn_tags__()
        if isinstance(self.base, LinearTransformer):
            tags.target_tags.required = self.base.__sklearn_tags__().target_tags.required
        return tags

    def fit(self, X: ArrayLike, y: ArrayLike | None = None, *, pairs: Any = None, triplets: Any = None) -> Self:
        """Learn from the supervision that the linear method takes.

        Args:
            X: Samples, of shape (n, features).
            y: Class labels, or numbers for ``MLKR``.
            pairs: Instead of ``y``, which is then ignored: rows (left, right, same).
            triplets: Instead of ``y``, which is then ignored: rows (anchor, nearer, farther).
        """
        check_numbers(self)
        given = {"pairs": pairs, "triplets": triplets}
        given = {key: value for key, value in given.items() if value is not None}
        if self.base is None and given:
            raise ValueError(f"{' and '.join(given)} given without base; the distance of a kernel is not learned")
        if self.base is not None and not isinstance(self.base, LinearTransformer):
            raise TypeError(f"base is {self.base!r}; it must be a linear estimator of nearfar, such as LMNN()")
        if isinstance(self.kernel, str):
            one_of("kernel", self.kernel, KERNELS)
        samples = validate_data(self, X, dtype=np.float64, ensure_min_samples=2)
        name = {"polynomial": "poly"}.get(self.kernel, self.kernel) if isinstance(self.kernel, str) else self.kernel
        self.coordinates_ = KernelPCA(
            n_components=self.n_components,
            kernel=name,
            gamma=self.gamma,
            degree=self.degree,
            coef0=self.coef0,
            remove_zero_eig=True,
        ).fit(samples)
        if not len(self.coordinates_.eigenvalues_):
            raise ValueError("all samples of X are the same for the kernel; there is no distance to learn")
        self.base_ = None
        if self.base is not None:
            self.base_ = clone(self.base).fit(self.coordinates_.transform(samples), y, **given)
        return self

    def transform(self, X: ArrayLike) -> Array:
        check_is_fitted(self)
        mapped = np.asarray(self.coordinates_.transform(validate_data(self, X, reset=False, dtype=np.float64)))
        return mapped if self.base_ is None else self.base_.transform(mapped)

    @property
    def _n_features_out(self) -> int:
        return int(self.base_.components_.shape[0] if self.base_ is not None else len(self.coordinates_.eigenvalues_))
