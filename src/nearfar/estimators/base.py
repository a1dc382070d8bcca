"""What all linear estimators share: checked input, the learned transformation, distances and scores."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.utils import Tags
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, column_or_1d, validate_data

from nearfar.utils.tensors import as_device
from nearfar.utils.validation import non_negative, whole

Array = NDArray[Any]
COUNTS = ("n_components", "n_constraints", "neighbors", "rounds", "max_iter", "epochs")  # parameters of any estimator


class MetricLearner(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """Base class of all estimators: the learned distance is the Euclidean distance after ``transform``."""

    def transform(self, X: ArrayLike) -> Array:
        """Map samples to the space in which the Euclidean distance is the learned distance.

        Args:
            X: Samples, of shape (n, features).

        Returns:
            An array with one row for each sample.
        """
        raise NotImplementedError

    def pair_distance(self, left: ArrayLike, right: ArrayLike) -> Array:
        """Return the learned distances of given pairs.

        Args:
            left: The first sample of each pair, of shape (pairs, features).
            right: The second sample of each pair.

        Returns:
            One distance for each pair.
        """
        first, second = np.asarray(self.transform(left)), np.asarray(self.transform(right))
        if len(first) != len(second):
            raise ValueError(f"left has {len(first)} samples and right {len(second)}; both need one for each pair")
        return np.asarray(np.linalg.norm(first - second, axis=1))

    @property
    def metric_(self) -> Callable[[ArrayLike, ArrayLike], float]:
        """The learned distance of two samples, as a function; it fits ``KNeighborsClassifier(metric=...)``."""
        check_is_fitted(self)

        def distance(x: ArrayLike, y: ArrayLike) -> float:
            return float(self.pair_distance(np.asarray(x)[None], np.asarray(y)[None])[0])

        return distance


@dataclass(kw_only=True, eq=False, repr=False)
class LinearTransformer(MetricLearner):
    """Base class of estimators that learn a linear transformation G and with it the metric A = GᵀG.

    A subclass implements ``fit`` and sets ``components_`` (G, one row per output dimension).

    Args:
        device: A PyTorch device.
    """

    _requires_y = False

    device: str = "cpu"

    def __sklearn_tags__(self) -> Tags:
        """Return scikit-learn's tags: whether ``y`` is required."""
        tags = super().__sklearn_tags__()
        tags.target_tags.required = self._requires_y
        return tags

    def transform(self, X: ArrayLike) -> Array:
        check_is_fitted(self)
        return np.asarray(validate_data(self, X, reset=False, dtype=np.float64)) @ self.components_.T

    def get_mahalanobis_matrix(self) -> Array:
        """Return A = GᵀG, the positive semi-definite matrix of the learned metric."""
        check_is_fitted(self)
        return self.components_.T @ self.components_

    @property
    def metric_(self) -> Callable[[ArrayLike, ArrayLike], float]:
        """The learned distance of two samples, as a function; it fits ``KNeighborsClassifier(metric=...)``."""
        check_is_fitted(self)
        components = self.components_

        def distance(x: ArrayLike, y: ArrayLike) -> float:
            return float(np.linalg.norm(components @ (np.asarray(x) - np.asarray(y))))

        return distance

    @property
    def _n_features_out(self) -> int:
        return int(self.components_.shape[0])

    def _check(self, X: ArrayLike, y: ArrayLike | None = None) -> tuple[Array, Array | None]:
        """Return the samples as float64 and the labels, if there are any, as integers."""
        if y is not None:
            return self._check_labels(X, y)
        check_numbers(self)
        return np.asarray(validate_data(self, X, dtype=np.float64, ensure_min_samples=2)), None

    def _check_labels(self, X: ArrayLike, y: ArrayLike, *, numeric: bool = False) -> tuple[Array, Array]:
        """Return the samples as float64 and the labels, which must be there, as integers or float64 numbers."""
        check_numbers(self)
        X, y = validate_data(self, X, y, dtype=np.float64, ensure_min_samples=2, y_numeric=numeric)
        if numeric:
            try:
                numbers = np.asarray(column_or_1d(y, warn=True), dtype=np.float64)
            except ValueError:
                kind = type(self).__name__
                raise ValueError(f"y holds text; {kind} needs numbers, as it learns for regression") from None
            return np.asarray(X), numbers
        return np.asarray(X), class_numbers(y, self)[1]

    def _set(self, components: torch.Tensor | Array, objective: list[float] | None = None) -> Self:
        """Store the learned transformation, and the value of the objective after each iteration."""
        self.components_: Array = np.asarray(
            components.cpu() if isinstance(components, torch.Tensor) else components, dtype=np.float64
        )
        if objective is not None:
            self.objective_ = np.asarray(objective)
            self.n_iter_ = max(1, len(objective) - 1)
        return self


class LabelMethod(LinearTransformer):
    """Base class of the methods that learn from class labels alone; a subclass implements ``_learn``."""

    _requires_y = True

    def fit(self, X: ArrayLike, y: ArrayLike) -> Self:
        """Learn from labels.

        Args:
            X: Samples, of shape (n, features).
            y: Class labels.
        """
        samples, codes = self._check_labels(X, y)
        check_class_sizes(codes, self)
        return self._learn(samples, codes)

    def _learn(self, samples: Array, codes: Array) -> Self:
        """Learn from checked samples and class numbers."""
        raise NotImplementedError


def check_numbers(estimator: BaseEstimator) -> None:
    """Check the parameters that are whole numbers, and the tolerance, of any estimator."""
    for name, value in estimator.get_params(deep=False).items():
        if name in COUNTS and value is not None:
            whole(name, value)
        elif name == "tol":
            non_negative(name, value)


def class_numbers(y: ArrayLike, estimator: BaseEstimator) -> tuple[Array, Array]:
    """Return the classes, at least two, and the number of each sample's class."""
    labels = column_or_1d(y, warn=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # many classes of few samples are usual here
        check_classification_targets(labels)
    classes, codes = np.unique(labels, return_inverse=True)
    if len(classes) < 2:
        raise ValueError(f"y has one class, {classes[0]}; {type(estimator).__name__} needs at least two")
    return classes, codes


def check_class_sizes(labels: Array, estimator: BaseEstimator) -> None:
    """Check that there are two samples of one class."""
    if np.bincount(labels).max() < 2:
        raise ValueError(f"y has {len(labels)} classes of one sample; {type(estimator).__name__} needs two of a class")


def check_components(n_components: int | None, features: int) -> int:
    """Return the number of output dimensions: that of the input if none is given."""
    if n_components is None:
        return features
    if not 1 <= n_components <= features:
        raise ValueError(f"n_components is {n_components}; it must be from 1 to the number of features, {features}")
    return int(n_components)


def principal_directions(data: torch.Tensor, n_components: int | None) -> torch.Tensor:
    """Return the first transformation of an iterative method, with orthonormal rows."""
    kept = check_components(n_components, data.shape[1])
    if kept == data.shape[1]:
        return torch.eye(kept).to(data)
    directions: torch.Tensor = torch.linalg.eigh(data.T @ data).eigenvectors.flip(1)[:, :kept].T.contiguous()
    return directions


def centered(samples: Array, device: str | torch.device, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Copy samples to a device, without their mean."""
    return to_device(samples - samples.mean(axis=0), device, dtype)


def to_device(array: Array, device: str | torch.device, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Copy an array to a device."""
    return torch.as_tensor(array, dtype=dtype, device=as_device("device", str(device)))


def factor(matrix: torch.Tensor) -> torch.Tensor:
    """Return G with GᵀG = A for a positive semi-definite A, without the directions in which A is zero."""
    values, vectors = torch.linalg.eigh(matrix)
    kept = values > values[-1].clamp_min(0) * 1e-12
    if not kept.any():  # the zero metric still has one direction
        return torch.zeros_like(matrix[:1])
    root: torch.Tensor = (vectors[:, kept] * values[kept].sqrt()).T.flip(0)
    return root
