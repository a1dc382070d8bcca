"""Numbers for each anchor that know their derivative by the anchor's row: closed-form pair weights.

A loss is built from a few sums over a row, followed by arithmetic on one number per anchor. ``Row``
carries both: the numbers, and the matrices of derivatives with one factor per anchor, so that the chain
rule costs nothing until the weights are asked for.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from nearfar.engine.masks import FLOOR, masked

Factor = Tensor | float


class Row:
    """A number for each anchor, [a], and its derivative by the row of values, Σ factor · matrix.

    The matrices are the row's own: they are written to in the end, so no two rows may share one.
    """

    __slots__ = ("by_anchor_values", "parts", "value")

    def __init__(
        self, value: Tensor, parts: Sequence[tuple[Factor, Tensor]], by_anchor_values: Tensor | None = None
    ) -> None:
        self.value = value
        self.parts = list(parts)
        self.by_anchor_values = by_anchor_values  # [a], derivative by what the loss learns of an anchor

    def chain(self, value: Tensor, slope: Factor) -> Row:
        """f(self), given f's value and its slope for each anchor."""
        by_anchor_values = None if self.by_anchor_values is None else self.by_anchor_values * slope
        return Row(value, [(_times(factor, slope), matrix) for factor, matrix in self.parts], by_anchor_values)

    def __add__(self, other: Row | Factor) -> Row:
        if isinstance(other, Row):
            learned = [part for part in (self.by_anchor_values, other.by_anchor_values) if part is not None]
            by_anchor_values = learned[0] + learned[1] if len(learned) == 2 else next(iter(learned), None)
            return Row(self.value + other.value, self.parts + other.parts, by_anchor_values)
        return Row(self.value + other, self.parts, self.by_anchor_values)

    def __sub__(self, other: Factor) -> Row:
        return self + -other

    def __mul__(self, factor: Factor) -> Row:
        """Times a constant, for all anchors or for each."""
        return self.chain(self.value * factor, factor)

    def __truediv__(self, factor: Factor) -> Row:
        return self * (factor.reciprocal() if isinstance(factor, Tensor) else 1.0 / factor)

    def relu(self) -> Row:
        """[x]+ for each anchor."""
        value = self.value.relu()
        return self.chain(value, value.sign())

    def softplus(self) -> Row:
        """log(1 + e^x) for each anchor."""
        return self.chain(functional.softplus(self.value), self.value.sigmoid())

    def weights(self) -> Tensor:
        """The derivative as one matrix, [a, n]. It is summed up in place: ask once."""
        (first, total), *others = self.parts
        if any(matrix is total for _, matrix in others):
            total = total.clone()
        if isinstance(first, Tensor):
            total.mul_(_column(first))
        elif first != 1.0:
            total.mul_(first)
        for factor, matrix in others:
            if isinstance(factor, Tensor):
                total.addcmul_(matrix, _column(factor))
            else:
                total.add_(matrix, alpha=factor)
        return total


def _times(left: Factor, right: Factor) -> Factor:
    if isinstance(left, float) and left == 1.0:
        return right
    return left * right


def _column(factor: Tensor) -> Tensor:
    return factor.unsqueeze(1) if factor.ndim == 1 else factor


def row_sum(terms: Tensor, slopes: Tensor, factor: float = 1.0) -> Row:
    """Σ of the terms of each row; ``factor · slopes`` are their derivatives."""
    return Row(terms.sum(dim=1), [(factor, slopes)])


def row_hinge(terms: Tensor) -> tuple[Row, Tensor]:
    """Σ of terms that are [x]+ for each row, by x, and how many are active. The terms become their slopes."""
    total, slopes = terms.sum(dim=1), terms.sign_()
    return Row(total, [(1.0, slopes)]), slopes.sum(dim=1)


def row_logsumexp(values: Tensor, mask: Tensor, scale: float = 1.0) -> Row:
    """log Σ exp(scale · values) over the mask; about ``FLOOR`` where it is empty."""
    values = masked(values, mask, FLOOR / scale)
    if scale != 1.0:
        values.mul_(scale)
    probabilities = torch.softmax(values, dim=1)
    # max softmax = exp(max) / Σ exp, so the sum needs no second exponential.
    value = values.amax(dim=1).sub_(probabilities.amax(dim=1).log_())
    return Row(value, [(scale, probabilities)])


def count_nonzero(terms: Tensor) -> Tensor:
    """How many terms of each row are not zero, [a], in their dtype."""
    return terms.sign().abs_().sum(dim=1)
