"""Metrics in closed form: Mahalanobis, relevant component analysis, local Fisher discriminant analysis."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from nearfar.estimators.base import LabelMethod, LinearTransformer, centered, check_class_sizes, check_components
from nearfar.estimators.pairs import check_pairs, chunks_of

Array = NDArray[Any]


@dataclass(kw_only=True, eq=False, repr=False)
class Mahalanobis(LinearTransformer):
    """The Mahalanobis distance: Euclidean distance after whitening the data. No labels are needed.

    Formula:
        A = Σ⁻¹, with the covariance (1 − s) Σ + s · tr(Σ)/d · I.

    Args:
        shrinkage: s, from 0 to 1, or "auto" for the value of Ledoit and Wolf.
        n_components: Keep only the directions of largest variance; all by default.

    Reference:
        Mahalanobis, "On the generalized distance in statistics", 1936. Thesis 2.1.1.

    Example:
        >>> import numpy as np
        >>> X = np.random.default_rng(0).normal(size=(500, 2)) * [1, 10]
        >>> whitened = Mahalanobis().fit_transform(X)
        >>> bool(np.allclose(np.cov(whitened.T), np.eye(2)))
        True
    """

    shrinkage: float | str = 0.0
    n_components: int | None = None

    def fit(self, X: ArrayLike, y: ArrayLike | None = None) -> Self:
        """Estimate the covariance.

        Args:
            X: Samples, of shape (n, features).
            y: Ignored.
        """
        samples, _ = self._check(X)
        data = centered(samples, self.device)
        covariance = data.T @ data / (len(data) - 1)
        share = self.shrinkage
        if share == "auto":
            from sklearn.covariance import ledoit_wolf_shrinkage

            share = float(ledoit_wolf_shrinkage(samples))
        if isinstance(share, str) or not 0 <= share <= 1:
            raise ValueError(f"shrinkage is {self.shrinkage!r}; it must be from 0 to 1 or 'auto'")
        d = covariance.shape[0]
        covariance = (1 - share) * covariance + share * covariance.trace() / d * torch.eye(d).to(covariance)
        return self._set(whitening(covariance, check_components(self.n_components, d)))


@dataclass(kw_only=True, eq=False, repr=False)
class RCA(LinearTransformer):
    """Relevant component analysis: whitens the variation inside chunks of similar samples.

    Formula:
        A = C⁻¹ with C the mean of (x − m)(x − m)ᵀ over all samples of chunks, m the mean of the sample's chunk.

    Args:
        n_components: First reduce to this many directions by Fisher's criterion; all by default.

    Reference:
        Bar-Hillel et al., "Learning a Mahalanobis metric from equivalence constraints", JMLR 2005.

    Example:
        >>> from sklearn.datasets import load_iris
        >>> RCA().fit_transform(*load_iris(return_X_y=True)).shape
        (150, 4)
    """

    n_components: int | None = None

    def fit(self, X: ArrayLike, y: ArrayLike | None = None, *, pairs: Any = None) -> Self:
        """Learn from labels, each class a chunk, or from similar pairs, whose linked samples are chunks.

        Args:
            X: Samples, of shape (n, features).
            y: Class labels.
            pairs: Instead of ``y``, which is then ignored: rows (left, right, 1); so are pairs marked as different.
        """
        samples, codes = self._check(X, y if pairs is None else None)
        if pairs is not None:
            chunks = chunks_of(check_pairs(pairs, len(samples))[0], len(samples))
        elif codes is not None:
            check_class_sizes(codes, self)
            chunks = codes
        else:
            raise ValueError("RCA requires y to be passed, but the target y is None; pairs are the alternative")
        used = chunks >= 0
        if not used.any():
            raise ValueError("pairs holds no similar pair; RCA needs at least one")
        data = centered(samples[used], self.device)
        chunks = np.unique(chunks[used], return_inverse=True)[1]
        within, total = scatters(data, torch.as_tensor(chunks, device=data.device))
        kept = check_components(self.n_components, data.shape[1])
        if kept == data.shape[1]:
            return self._set(whitening(within, kept))
        directions = generalized_eigenvectors(total, within)[0][:, :kept].T
        return self._set(whitening(directions @ within @ directions.T, kept) @ directions)


@dataclass(kw_only=True, eq=False, repr=False)
class LFDA(LabelMethod):
    """Local Fisher discriminant analysis: separates classes but keeps the local structure inside a class.

    Formula:
        Eigenvectors of the largest eigenvalues of S_b v = λ S_w v, with scatter matrices weighted by the affinity
        exp(−|x − y|² / (σ_x σ_y)) of samples of one class; σ is the distance to the k-th neighbor in the class.

    Args:
        n_components: The number of output dimensions; that of the input by default.
        neighbors: k of the local scale.
        embedding: "weighted" multiplies each direction by the root of its eigenvalue, "orthonormalized" makes the
            directions orthonormal, "plain" leaves them as they are.

    Reference:
        Sugiyama, "Dimensionality reduction of multimodal labeled data by local Fisher discriminant analysis",
        JMLR 2007.

    Example:
        >>> from sklearn.datasets import load_wine
        >>> LFDA(n_components=2).fit_transform(*load_wine(return_X_y=True)).shape
        (178, 2)
    """

    n_components: int | None = None
    neighbors: int = 7
    embedding: str = "weighted"

    def _learn(self, samples: Array, codes: Array) -> Self:
        if self.embedding not in ("weighted", "orthonormalized", "plain"):
            raise ValueError(f"embedding is {self.embedding!r}; it must be 'weighted', 'orthonormalized' or 'plain'")
        data = centered(samples, self.device)
        n, d = data.shape
        within = torch.zeros(d, d).to(data)
        between = torch.zeros_like(within)
        for code in range(codes.max() + 1):
            part = data[torch.as_tensor(codes == code, device=data.device)]
            size = len(part)
            distances = torch.cdist(part, part)
            place = min(self.neighbors, size - 1)
            scale = distances.kthvalue(place + 1, dim=1).values
            product = scale[:, None] * scale
            affinity = torch.where(product > 0, torch.exp(-(distances**2) / product.clamp_min(1e-300)), 0.0)
            local = part.T @ (affinity.sum(dim=1)[:, None] * part) - part.T @ affinity @ part
            sums = part.sum(dim=0)
            within += local / size
            between += local * (1 / n - 1 / size)  # pairs of one class
            between += part.T @ part * (1 - size / n) + torch.outer(sums, sums) / n  # pairs with other classes
        vectors, values = generalized_eigenvectors(between, within)
        directions = vectors[:, : check_components(self.n_components, d)]
        if self.embedding == "weighted":
            directions = directions * values[: directions.shape[1]].clamp_min(0).sqrt()
        elif self.embedding == "orthonormalized":
            directions = torch.linalg.qr(directions).Q
        return self._set(directions.T)


def whitening(covariance: torch.Tensor, kept: int) -> torch.Tensor:
    """Return the transformation that makes a covariance the identity, by its ``kept`` largest directions.

    Directions without variance are mapped to zero.
    """
    values, vectors = torch.linalg.eigh(covariance)
    values, vectors = values.flip(0), vectors.flip(1)
    least = values[0].clamp_min(0) * 1e-12
    scale = torch.where(values > least, values.clamp_min(1e-300).rsqrt(), 0.0)
    root: torch.Tensor = (vectors[:, :kept] * scale[:kept]).T
    return root


def scatters(data: torch.Tensor, chunks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the covariance within chunks and the covariance of all samples."""
    count = torch.bincount(chunks).to(data.dtype)
    means = torch.zeros(len(count), data.shape[1]).to(data).index_add_(0, chunks, data) / count[:, None]
    residuals = data - means[chunks]
    return residuals.T @ residuals / len(data), data.T @ data / len(data)


def generalized_eigenvectors(matrix: torch.Tensor, metric: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Solve ``matrix v = λ metric v`` for symmetric matrices, by decreasing λ."""
    d = metric.shape[0]
    ridge = 1e-9 * metric.trace() / d + 1e-300
    root = torch.linalg.cholesky(metric + ridge * torch.eye(d).to(metric))
    inner = torch.linalg.solve_triangular(root, matrix, upper=False)
    inner = torch.linalg.solve_triangular(root, inner.T, upper=False)
    values, vectors = torch.linalg.eigh((inner + inner.T) / 2)
    return torch.linalg.solve_triangular(root.T, vectors.flip(1), upper=True), values.flip(0)
