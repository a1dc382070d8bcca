"""Where the pair weights of the tiles go: kept whole, or carried on to the embeddings tile by tile."""

from __future__ import annotations

from typing import Protocol, Self

import torch
from torch import Tensor

from nearfar.engine.batch import Problem, Tile


class Sink(Protocol):
    """Takes W = ∂loss/∂values tile by tile; it may destroy what it is given."""

    def __init__(self, problem: Problem) -> None: ...

    def add(self, weights: Tensor, tile: Tile) -> None:
        """The weights of a tile of anchors."""

    def add_columns(self, weights: Tensor, tile: Tile) -> None:
        """The weights of a tile whose rows are columns of the problem."""

    def scale(self, factor: Tensor) -> None:
        """Multiply all that was added."""

    def merge(self, other: Self) -> None:
        """Add all that another sink was given."""


class Weights:
    """Keeps the whole of W, [m, n]."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.shape = problem.height, problem.width
        self._matrix: Tensor | None = None

    @property
    def matrix(self) -> Tensor:
        """W, [m, n]."""
        if self._matrix is None:
            self._matrix = self.problem.embeddings.new_zeros(self.shape)
        return self._matrix

    def add(self, weights: Tensor, tile: Tile) -> None:
        if weights.shape == self.shape and self._matrix is None:
            self._matrix = weights
        else:
            self.matrix[tile.rows] = weights

    def add_columns(self, weights: Tensor, tile: Tile) -> None:
        self.matrix[:, tile.rows] += weights.T

    def scale(self, factor: Tensor) -> None:
        self.matrix.mul_(factor)

    def merge(self, other: Self) -> None:
        self.matrix.add_(other.matrix)


class KeptGradient(Weights):
    """Keeps the derivatives by all dot products and carries them on in the end.

    Without a gallery W E + Wᵀ E is then a single product.
    """

    def add(self, weights: Tensor, tile: Tile) -> None:
        super().add(tile.measure.to_dot(weights, tile.values.detach()), tile)

    def add_columns(self, weights: Tensor, tile: Tile) -> None:
        super().add_columns(tile.measure.to_dot(weights, tile.values.detach()), tile)

    def gradients(self) -> tuple[Tensor, Tensor | None]:
        """By the prepared anchors and the prepared gallery."""
        problem = self.problem
        product, weights = problem.loss.comparison.product, self.matrix
        anchors, columns = problem.anchors.points, problem.columns.points
        if problem.gallery is None and problem.columns_move:
            return product(plus_transposed(weights), anchors, columns), None
        by_columns = None if not problem.columns_move else product(weights.T, columns, anchors)
        return product(weights, anchors, columns), by_columns


def plus_transposed(matrix: Tensor, block: int = 512) -> Tensor:
    """matrix + matrixᵀ; what is given may be destroyed.

    Reading a large matrix across its rows is slow on a CPU, so there it is done block by block.
    """
    size = matrix.shape[0]
    if matrix.device.type != "cpu" or size <= 2 * block:
        return matrix.T.clone(memory_format=torch.contiguous_format).add_(matrix)
    for top in range(0, size, block):
        for left in range(top, size, block):
            upper = matrix[top : top + block, left : left + block]
            lower = matrix[left : left + block, top : top + block]
            both = lower.T.clone(memory_format=torch.contiguous_format).add_(upper)
            upper.copy_(both)
            lower.copy_(both.T)
    return matrix


class StreamedGradient:
    """Carries each tile on at once and keeps no pair."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.by_anchors = torch.zeros_like(problem.anchors.points)
        self.by_gallery: Tensor | None = None
        if problem.gallery is not None and problem.columns_move:
            self.by_gallery = torch.zeros_like(problem.columns.points)
        # Without a gallery both ends of a pair are the same embeddings.
        self.by_columns = self.by_anchors if self.by_gallery is None else self.by_gallery

    def add(self, weights: Tensor, tile: Tile) -> None:
        problem, measure = self.problem, tile.measure
        weights = measure.to_dot(weights, tile.values.detach())
        columns, some = problem.columns.points, problem.anchors.points[tile.rows]
        self.by_anchors[tile.rows] += measure.product(weights, some, columns)
        if problem.columns_move:
            self.by_columns += measure.product(weights.T, columns, some)

    def add_columns(self, weights: Tensor, tile: Tile) -> None:
        measure = tile.measure
        weights = measure.to_dot(weights, tile.values.detach())
        anchors, some = self.problem.anchors.points, self.problem.columns.points[tile.rows]
        if self.problem.columns_move:
            self.by_columns[tile.rows] += measure.product(weights, some, anchors)
        self.by_anchors += measure.product(weights.T, anchors, some)

    def scale(self, factor: Tensor) -> None:
        self.by_anchors.mul_(factor)
        if self.by_gallery is not None:
            self.by_gallery.mul_(factor)

    def merge(self, other: Self) -> None:
        self.by_anchors.add_(other.by_anchors)
        if self.by_gallery is not None and other.by_gallery is not None:
            self.by_gallery.add_(other.by_gallery)

    def gradients(self) -> tuple[Tensor, Tensor | None]:
        """By the prepared anchors and the prepared gallery."""
        return self.by_anchors, self.by_gallery
