"""Measures: how two vectors are compared, and the gradient from the compared values back to the vectors."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import lru_cache
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from nearfar.utils.tensors import readable
from nearfar.utils.validation import known

# Squared distances are kept above this: it is far below what float32 resolves between two vectors,
# so a pair at this value *is* a pair of equal vectors, and its direction (and gradient) is zero.
SMALLEST_SQUARE = 1e-30
# A CPU multiplies only the entries of a large matrix that are not zero, if at most one in SPARSE is; with vectors of
# fewer dimensions, finding the entries would take the time of the product.
SPARSE, SPARSE_FROM, SPARSE_DIM = 16, 1 << 13, 256


class PreparedVectors(NamedTuple):
    """Embeddings prepared for a measure: normalized, centered or with squared lengths, as the measure needs."""

    points: Tensor  # [m, d]
    inverse_norms: Tensor | None  # [m, 1], 0 for zero vectors; None if the points are not normalized
    squares: Tensor | None  # [m], squared lengths; None for dot products
    means: Tensor | None = None  # [m, 1], what was subtracted from the coordinates of each vector; None: nothing
    as_rows: bool = False  # prepared as rows, for measures that are not symmetric

    def take(self, rows: slice) -> PreparedVectors:
        """Return a slice of the vectors."""
        if rows == slice(0, self.points.shape[0]):
            return self
        return PreparedVectors._make(part[rows] if isinstance(part, Tensor) else part for part in self)

    def gather(self, index: Tensor) -> PreparedVectors:
        """Return the vectors of some numbers, [p]."""
        squares = None if self.squares is None else self.squares[index]
        return PreparedVectors(self.points[index], None, squares)


@dataclass(frozen=True)
class Measure:
    """A pairwise comparison and its derivative."""

    name: str
    normalize: bool  # scale vectors to length one first
    power: int  # 0 for dot products, 1 for Euclidean distances, 2 for squared distances
    is_symmetric: ClassVar[bool] = True  # rows and columns are prepared alike
    is_distance: bool = field(init=False)  # a small value means that two vectors are similar
    has_own_part: bool = field(init=False)  # the gradient by a row has a part along the row itself

    def __post_init__(self) -> None:
        object.__setattr__(self, "is_distance", self.power > 0 or not self.is_symmetric)
        object.__setattr__(self, "has_own_part", self.power > 0 and not self.normalize)

    def prepare(self, embeddings: Tensor, center: Tensor | None = None, *, as_rows: bool = False) -> PreparedVectors:
        """Normalize or center the embeddings; ``center`` must be the same for rows and columns."""
        inverse_norms = squares = None
        points = embeddings
        if self.normalize:
            inverse_norms = inverse(torch.linalg.vector_norm(embeddings, dim=1, keepdim=True))
            points = embeddings * inverse_norms
        elif self.power and center is not None:
            # A common offset does not change distances, but |a|² + |b|² − 2ab loses precision to it.
            points = embeddings - center
        if self.power:
            squares = torch.linalg.vecdot(points, points)
        return PreparedVectors(points, inverse_norms, squares)

    def pairwise(self, rows: PreparedVectors, columns: PreparedVectors) -> Tensor:
        """Return the values of every row against every column, [a, n]."""
        if rows.squares is None or columns.squares is None:
            return rows.points @ columns.points.T
        values = torch.addmm(columns.squares.unsqueeze(0), rows.points, columns.points.T, alpha=-2.0)
        return self._from_squares(values.add_(rows.squares.unsqueeze(1)))

    def listed(self, rows: PreparedVectors, columns: PreparedVectors) -> Tensor:
        """Return the values of every row against the column of the same number, [p]."""
        values: Tensor = torch.linalg.vecdot(rows.points, columns.points)
        if rows.squares is None or columns.squares is None:
            return values
        return self._from_squares(values.mul_(-2.0).add_(columns.squares).add_(rows.squares))

    def _from_squares(self, squares: Tensor) -> Tensor:
        squares.clamp_(min=SMALLEST_SQUARE)
        return squares.sqrt_() if self.power == 1 else squares

    def to_dot(self, weights: Tensor, values: Tensor) -> Tensor:
        """Convert derivatives by ``values`` to derivatives by the dot products, in place."""
        if self.power == 2:
            return weights.mul_(-2.0)
        if self.power == 1:
            equal = values <= (2.0 * SMALLEST_SQUARE) ** 0.5
            return weights.div_(values).neg_().masked_fill_(equal, 0.0)
        return weights

    def product(self, weights: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        """Return the gradient by the rows, given the derivatives by the dot products."""
        gradient = times(weights, columns)
        return self.plus_own(gradient, rows, weights.sum(dim=1)) if self.has_own_part else gradient

    def plus_own(self, gradient: Tensor, rows: Tensor, sums: Tensor) -> Tensor:
        """Add the part along the rows, if there is one, given the sums of their derivatives, [a]; in place."""
        return gradient.addcmul_(rows, sums.unsqueeze(1), value=-1.0) if self.has_own_part else gradient

    def to_embeddings(self, gradient: Tensor, vectors: PreparedVectors) -> Tensor:
        """Propagate a gradient by the prepared points back to the embeddings, in place."""
        if vectors.inverse_norms is None:
            return gradient
        radial = torch.linalg.vecdot(vectors.points, gradient).unsqueeze(1)
        return gradient.addcmul_(vectors.points, radial, value=-1.0).mul_(vectors.inverse_norms)


@dataclass(frozen=True)
class SignalToNoise(Measure):
    """The variance of the difference to an anchor, over the variance of the anchor: Var(a − b) / Var(a).

    It is not symmetric: rows are anchors. With ã = a − mean(a), it is a dot product of two vectors of d + 2 numbers,
    [−2ã / ‖ã‖², 1 / ‖ã‖², 1] of the row and [b̃, ‖b̃‖², 1] of the column. An anchor whose coordinates are all equal has
    no variance: its distances are 0, and there is no gradient by them.
    """

    is_symmetric: ClassVar[bool] = False

    def prepare(self, embeddings: Tensor, center: Tensor | None = None, *, as_rows: bool = False) -> PreparedVectors:
        """Normalize the embeddings and subtract the mean of their coordinates; return the factors of the product."""
        norms = torch.linalg.vector_norm(embeddings, dim=1, keepdim=True)
        inverse_norms = inverse(norms) if self.normalize else None
        points = embeddings if inverse_norms is None else embeddings * inverse_norms
        means = points.mean(dim=1, keepdim=True)
        points = points - means
        squares = torch.linalg.vecdot(points, points)
        if as_rows:
            lengths = squares.sqrt().unsqueeze(1)
            scale = norms if inverse_norms is None else norms * inverse_norms
            constant = lengths <= 8.0 * torch.finfo(norms.dtype).eps * scale  # but for rounding
            inverse_squares = inverse(lengths).square_().masked_fill_(constant, 0.0)
            parts = points * (-2.0 * inverse_squares), inverse_squares, (inverse_squares > 0).to(points.dtype)
        else:
            parts = points, squares.unsqueeze(1), torch.ones_like(means)
        return PreparedVectors(torch.cat(parts, dim=1), inverse_norms, squares, means, as_rows)

    def pairwise(self, rows: PreparedVectors, columns: PreparedVectors) -> Tensor:
        return (rows.points @ columns.points.T).clamp_(min=0.0)

    def listed(self, rows: PreparedVectors, columns: PreparedVectors) -> Tensor:
        values: Tensor = torch.linalg.vecdot(rows.points, columns.points)
        return values.clamp_(min=0.0)

    def to_embeddings(self, gradient: Tensor, vectors: PreparedVectors) -> Tensor:
        assert vectors.squares is not None
        assert vectors.means is not None
        by_points, by_squares = gradient[:, :-2], gradient[:, -2:-1]
        points, inverse_squares = vectors.points[:, :-2], vectors.points[:, -2:-1]
        if vectors.as_rows:
            along = torch.linalg.vecdot(points, by_points).unsqueeze(1).addcmul_(inverse_squares, by_squares)
            gradient = (points * along).addcmul_(by_points, inverse_squares, value=-2.0)
            points = points * vectors.squares.unsqueeze(1).mul(-0.5)
        else:
            gradient = torch.addcmul(by_points, points, by_squares, value=2.0)
        gradient -= gradient.mean(dim=1, keepdim=True)
        if vectors.inverse_norms is None:
            return gradient
        radial = torch.linalg.vecdot(points, gradient).unsqueeze(1)
        return gradient.addcmul_(points + vectors.means, radial, value=-1.0).mul_(vectors.inverse_norms)


# Up to this length vectors count as zero: beyond it, the square of 1 / length does not overflow.
ZERO_LENGTH = {dtype: float(1000.0 * torch.finfo(dtype).tiny ** 0.5) for dtype in (torch.float32, torch.float64)}


def inverse(norms: Tensor) -> Tensor:
    """Return 1 / length; 0 for zero vectors, NaN for lengths that are NaN or infinite (also by overflow)."""
    # 0 · ∞ is NaN. Without it, a vector whose length overflows would look like a zero vector and never learn.
    return norms.reciprocal().add_(norms, alpha=0.0).masked_fill_(norms <= ZERO_LENGTH[norms.dtype], 0.0)


def unit(vectors: Tensor) -> Tensor:
    """Scale vectors to length one along the last dimension, differentiable by autograd.

    Zero vectors stay zero and get no gradient. Vectors of infinite length (also by overflow) become NaN.

    Args:
        vectors: Vectors, [..., d].

    Example:
        >>> unit(torch.tensor([[3.0, 4.0], [0.0, 0.0]]))
        tensor([[0.6000, 0.8000],
                [0.0000, 0.0000]])
    """
    norms: Tensor = torch.linalg.vector_norm(vectors, dim=-1, keepdim=True)
    lengths = norms.masked_fill(norms <= ZERO_LENGTH[norms.dtype], math.inf)
    return vectors / lengths.add(norms.detach(), alpha=0.0)


def times(weights: Tensor, vectors: Tensor) -> Tensor:
    """Return the matrix product of pair weights and vectors.

    Hinges and minings leave most pairs without a weight. On a CPU such products skip them.
    """
    is_large = weights.numel() >= SPARSE_FROM and vectors.shape[1] >= SPARSE_DIM
    if weights.device.type != "cpu" or not is_large or SPARSE * int(weights.count_nonzero()) > weights.numel():
        return weights @ vectors
    weights = weights.contiguous()  # a transposed matrix is searched slowly
    row, column = weights.nonzero(as_tuple=True)
    starts = torch.searchsorted(row, torch.arange(len(weights)))
    return embedding_bag(column, vectors, starts, mode="sum", per_sample_weights=weights[row, column])


def propagate_nan(loss: Tensor, anchors: PreparedVectors, columns: PreparedVectors) -> Tensor:
    """Return the loss, or NaN if a vector holds NaN or infinity or is too long, even if mining left it out.

    On a CPU the input was checked for NaN and infinity before. On a GPU that check would make the host wait.
    """
    for vectors in (anchors,) if columns is anchors else (anchors, columns):
        lengths = vectors.inverse_norms if vectors.squares is None else vectors.squares
        if lengths is not None:
            loss = torch.add(loss, lengths.amax(), alpha=0.0)
        elif not readable(vectors.points):  # dot products need no lengths; on a CPU they were checked before
            loss = torch.add(loss, vectors.points.sum(), alpha=0.0)
    return loss


_POWERS = {"cosine": 0, "dot": 0, "euclidean": 1, "squared_euclidean": 2, "snr": 0}


def names() -> list[str]:
    """Return the names of all measures."""
    return list(_POWERS)


@lru_cache
def create(name: str, *, normalize: bool = True) -> Measure:
    """Create a measure by name."""
    power = known("measure", name, _POWERS)
    if name == "cosine" and not normalize:
        raise ValueError("measure 'cosine' normalizes by definition; use 'dot' for embeddings as they are")
    kind = SignalToNoise if name == "snr" else Measure
    return kind(name, normalize, power)
