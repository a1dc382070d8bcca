"""How two vectors are compared: the values of a tile and the way back to the vectors."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from nearfar.utils.inputs import readable

# Squared distances are kept above this: it is far below what float32 resolves between two vectors,
# so a pair at this value *is* a pair of equal vectors, and its direction (and gradient) is zero.
SMALLEST_SQUARE = 1e-30


class Vectors(NamedTuple):
    """Embeddings made ready for a measure: unit length where it asks for it, squares where it needs them."""

    points: Tensor  # [m, d]
    inverse_norms: Tensor | None  # [m, 1], 0 for zero vectors; None when the points are raw
    squares: Tensor | None  # [m], squared lengths; None for dot products

    def take(self, rows: slice) -> Vectors:
        """Some of them."""
        if rows == slice(0, self.points.shape[0]):
            return self
        squares = None if self.squares is None else self.squares[rows]
        inverse_norms = None if self.inverse_norms is None else self.inverse_norms[rows]
        return Vectors(self.points[rows], inverse_norms, squares)

    def witness(self) -> Tensor | None:
        """A number that is not finite where a vector holds NaN or infinity, or is too long for its square to be finite.

        None for raw dot products of vectors that were looked at before: nothing is asked of their lengths.
        """
        if self.squares is not None:
            return self.squares.amax()
        if self.inverse_norms is not None:
            return self.inverse_norms.amax()
        return None if readable(self.points) else self.points.sum()


@dataclass(frozen=True)
class Measure:
    """A pairwise comparison and its derivative.

    ``unit`` normalises the vectors first; ``power`` is 0 for dot products, 1 for Euclidean distances
    and 2 for squared ones.
    """

    name: str
    unit: bool
    power: int

    @property
    def is_distance(self) -> bool:
        """Whether small values mean near."""
        return self.power > 0

    def prepare(self, embeddings: Tensor, center: Tensor | None = None) -> Vectors:
        """Normalise or centre the embeddings; ``center`` is shared by rows and columns."""
        inverse_norms = squares = None
        points = embeddings
        if self.unit:
            inverse_norms = inverse(torch.linalg.vector_norm(embeddings, dim=1, keepdim=True))
            points = embeddings * inverse_norms
        elif self.power and center is not None:
            # Distances do not see a common offset, but |a|² + |b|² - 2ab loses its digits to one.
            points = embeddings - center
        if self.power:
            squares = torch.linalg.vecdot(points, points)
        return Vectors(points, inverse_norms, squares)

    def center(self, columns: Tensor) -> Tensor | None:
        """The offset that raw distances are computed relative to."""
        return columns.mean(dim=0) if self.power and not self.unit else None

    def pairwise(self, rows: Vectors, columns: Vectors) -> Tensor:
        """The [a, n] values of every row against every column."""
        if rows.squares is None or columns.squares is None:
            return rows.points @ columns.points.T
        values = torch.addmm(columns.squares.unsqueeze(0), rows.points, columns.points.T, alpha=-2.0)
        values.add_(rows.squares.unsqueeze(1)).clamp_(min=SMALLEST_SQUARE)
        return values.sqrt_() if self.power == 1 else values

    def to_dot(self, weights: Tensor, values: Tensor) -> Tensor:
        """Turn derivatives by ``values`` into derivatives by the dot products (in place)."""
        if self.power == 2:
            return weights.mul_(-2.0)
        if self.power == 1:
            equal = values <= (2.0 * SMALLEST_SQUARE) ** 0.5
            return weights.div_(values).neg_().masked_fill_(equal, 0.0)
        return weights

    def product(self, weights: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        """Gradient by the rows, from derivatives by the dot products."""
        gradient = weights @ columns
        if self.power and not self.unit:
            # ∂d²/∂a = 2(a − b): the part along a. Normalising would remove it, so unit vectors skip it.
            gradient.addcmul_(rows, weights.sum(dim=1, keepdim=True), value=-1.0)
        return gradient

    def to_embeddings(self, gradient: Tensor, vectors: Vectors) -> Tensor:
        """Carry a gradient by the prepared points back to the embeddings (in place)."""
        if vectors.inverse_norms is None:
            return gradient
        radial = torch.linalg.vecdot(vectors.points, gradient).unsqueeze(1)
        return gradient.addcmul_(vectors.points, radial, value=-1.0).mul_(vectors.inverse_norms)


def shortest(dtype: torch.dtype) -> float:
    """Vectors up to this length count as zero: the square of 1 / length would leave the numbers there are."""
    return float(1000.0 * torch.finfo(dtype).tiny ** 0.5)


def inverse(norms: Tensor) -> Tensor:
    """1 / length; 0 for zero vectors, NaN for NaN and for lengths that are infinite, also by overflow."""
    # 0 · ∞ is NaN. Without it a vector that grew beyond all numbers would pass for a zero vector, and learn nothing.
    return norms.reciprocal().add_(norms, alpha=0.0).masked_fill_(norms <= shortest(norms.dtype), 0.0)


def unit(vectors: Tensor) -> Tensor:
    """Vectors of length one along the last dimension, for autograd.

    Zero vectors become zero, without a gradient; vectors of infinite length, also by overflow, become NaN.
    """
    norms: Tensor = torch.linalg.vector_norm(vectors, dim=-1, keepdim=True)
    lengths = norms.masked_fill(norms <= shortest(norms.dtype), math.inf)
    return vectors / lengths.add(norms.detach(), alpha=0.0)


def show_nan(loss: Tensor, anchors: Vectors, columns: Vectors) -> Tensor:
    """The loss; NaN where a vector holds NaN or infinity or is too long, even if mining passed over it.

    NaN and infinity are looked for on a CPU before. On a GPU that would stop the host.
    """
    for vectors in (anchors,) if columns is anchors else (anchors, columns):
        witness = vectors.witness()
        if witness is not None:
            loss = torch.add(loss, witness, alpha=0.0)
    return loss


_POWERS = {"cosine": 0, "dot": 0, "euclidean": 1, "squared_euclidean": 2}


def names() -> list[str]:
    """The measures there are."""
    return list(_POWERS)


@lru_cache
def create(name: str, *, raw: bool = False) -> Measure:
    """A measure by name. ``raw=True`` leaves the embeddings as they are; ``cosine`` never does.

    >>> create("euclidean").unit, create("euclidean", raw=True).unit
    (True, False)
    """
    if name not in _POWERS:
        raise ValueError(f"measure is {name!r}; allowed are {', '.join(_POWERS)}")
    if name == "cosine" and raw:
        raise ValueError("measure 'cosine' normalises by definition; use 'dot' for raw embeddings")
    return Measure(name, unit=not raw, power=_POWERS[name])
