"""The row of one anchor: masks of its positives and negatives, and numbers with their derivative by the row.

A loss is built from a few sums over a row, followed by arithmetic on one number per anchor. ``Row`` carries both: the
numbers, and the matrices of derivatives with one factor per anchor. The chain rule acts on the factors, so it costs no
pass over a matrix until the weights are computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional

# Stands for "not in the set" in a log-sum-exp: finite, so that an empty set has a gradient (zero).
FLOOR = -1e30
CPU_CHUNK = 1 << 20  # numbers that stay in the cache

Factor = Tensor | float


def masks(row_labels: Tensor, column_labels: Tensor, own_columns: Tensor | int | None) -> tuple[Tensor, Tensor]:
    """Return the positives and negatives of each row, [a, n] each. A row is never its own positive.

    ``own_columns`` says where each row's own embedding is among the columns: an int for "row 0 is that column, and so
    on down the diagonal", column numbers (−1: not among them), or None if they share no embedding.
    """
    same = row_labels.unsqueeze(1) == column_labels.unsqueeze(0)
    negatives = ~same
    if isinstance(own_columns, int):
        same.diagonal(own_columns).fill_(False)
    elif own_columns is not None:
        same = exclude_own(same, own_columns)
    return same, negatives


def exclude_own(mask: Tensor, own_columns: Tensor | int | None) -> Tensor:
    """Remove the pair of each row with itself from a mask, in place."""
    if isinstance(own_columns, int):
        mask.diagonal(own_columns).fill_(False)
    elif own_columns is not None:
        mask &= own_columns.unsqueeze(1) != torch.arange(mask.shape[1], device=mask.device)
    return mask


def ordinals(labels: Tensor) -> Tensor:
    """Return how many earlier elements have the same label, [n]."""
    ordered, order = labels.sort(stable=True)
    places = torch.arange(len(labels), device=labels.device)
    return torch.empty_like(order).scatter_(0, order, places - torch.searchsorted(ordered, ordered))


@lru_cache(maxsize=256)
def constant(value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a number as a tensor that is shared by all callers."""
    return torch.full((), value, dtype=dtype, device=device)


def masked(values: Tensor, mask: Tensor, otherwise: float = 0.0) -> Tensor:
    """Return the values inside the mask and a constant outside.

    ``torch.where`` with a Python number creates a tensor from it on every call; this function caches them.

    Args:
        values: Values of any shape.
        mask: Boolean tensor that broadcasts with the values.
        otherwise: The constant outside the mask.
    """
    return torch.where(mask, values, constant(otherwise, values.dtype, values.device))


def masked_sum(values: Tensor, mask: Tensor) -> Tensor:
    """Sum each row over its mask, [a]."""
    return masked(values, mask).sum(dim=1)


def count(mask: Tensor, like: Tensor) -> Tensor:
    """Count the members of each row's mask, [a]."""
    return mask.sum(dim=1, dtype=like.dtype)


def positive_columns(mask: Tensor, width: int | None = None) -> tuple[Tensor, Tensor]:
    """Return the column numbers of each row's members, [a, k], and which of the k slots are filled, [a, k].

    On a CPU, k is the largest number of members. On a GPU that number would need a synchronization, so every column
    keeps its own slot and k = n, unless a width is given.
    """
    if width is not None:
        count = mask.shape[1]
        numbers = torch.arange(count, dtype=torch.int32, device=mask.device)
        # The members have the lowest numbers, all different: the order is the same on every device.
        columns = torch.where(mask, numbers, count).topk(width, dim=1, largest=False).values
        return columns.clamp(max=count - 1).long(), columns < count
    if mask.device.type != "cpu":
        return torch.arange(mask.shape[1], device=mask.device).expand(mask.shape), mask
    columns = mask.nonzero()[:, 1]
    counts = mask.sum(dim=1)
    width = max(1, int(counts.max()))
    filled = torch.arange(width, device=mask.device) < counts.unsqueeze(1)
    slots = torch.zeros(filled.shape, dtype=torch.long, device=mask.device)
    return slots.masked_scatter_(filled, columns), filled


def slot_chunks(count: int, pairs: Tensor, budget: int) -> list[slice]:
    """Split slots into chunks such that slots × pairs fit into an eighth of the memory budget."""
    most = budget // (8 * pairs.element_size())
    if pairs.device.type == "cpu":
        most = min(most, CPU_CHUNK)
    step = max(1, most // pairs.numel())
    return [slice(start, start + step) for start in range(0, count, step)]


def scatter_mask(index: Tensor, filled: Tensor, width: int) -> Tensor:
    """Return the mask, [a, width], of the columns that the filled slots name."""
    spare = torch.where(filled, index, width)  # empty slots write to an extra column, which is cut off
    mask = torch.zeros(index.shape[0], width + 1, dtype=torch.bool, device=index.device)
    return mask.scatter_(1, spare, True)[:, :width]


class Row:
    """A number for each anchor and its derivative by the anchor's row of values, Σ factor · matrix.

    The matrices belong to the row: ``weights`` writes to them, so no two rows may share one.

    Args:
        value: The number of each anchor, [a].
        parts: Pairs of a factor (a float, or a tensor [a]) and a matrix, [a, n].
        by_anchor_values: Derivative by the learned number of each anchor, [a].
        by_column_values: Derivative of the sum over the anchors by the number of each column, [n].

    Example:
        >>> row = row_logsumexp(torch.zeros(1, 2), torch.tensor([[True, True]])).softplus()
        >>> row.weights()
        tensor([[0.3333, 0.3333]])
    """

    __slots__ = ("by_anchor_values", "by_column_values", "parts", "value")

    def __init__(
        self,
        value: Tensor,
        parts: Sequence[tuple[Factor, Tensor]],
        by_anchor_values: Tensor | None = None,
        by_column_values: Tensor | None = None,
    ) -> None:
        self.value = value
        self.parts = list(parts)
        self.by_anchor_values = by_anchor_values
        self.by_column_values = by_column_values

    def chain(self, value: Tensor, slope: Factor) -> Row:
        """Return f(self), given the value of f and its slope for each anchor."""
        row = Row(value, self.parts, self.by_anchor_values, self.by_column_values)
        for place, (factor, matrix) in enumerate(self.parts):
            row.parts[place] = (slope if isinstance(factor, float) and factor == 1.0 else factor * slope), matrix
        if self.by_anchor_values is not None:
            row.by_anchor_values = self.by_anchor_values * slope
        if self.by_column_values is not None:
            assert not (isinstance(slope, Tensor) and slope.ndim), "column values need the same slope for all anchors"
            row.by_column_values = self.by_column_values * slope
        return row

    def __add__(self, other: Row | Factor) -> Row:
        if not isinstance(other, Row):
            return Row(self.value + other, self.parts, self.by_anchor_values, self.by_column_values)
        row = Row(self.value + other.value, [*self.parts, *other.parts], self.by_anchor_values, self.by_column_values)
        if other.by_anchor_values is not None:
            before = row.by_anchor_values
            row.by_anchor_values = other.by_anchor_values if before is None else before + other.by_anchor_values
        if other.by_column_values is not None:
            before = row.by_column_values
            row.by_column_values = other.by_column_values if before is None else before + other.by_column_values
        return row

    def __sub__(self, other: Factor) -> Row:
        return self + -other

    def __mul__(self, factor: Factor) -> Row:
        """Multiply by a constant, one for all anchors or one for each."""
        return self.chain(self.value * factor, factor)

    def __truediv__(self, factor: Factor) -> Row:
        return self * (factor.reciprocal() if isinstance(factor, Tensor) else 1.0 / factor)

    def relu(self) -> Row:
        """Return [x]+ for each anchor."""
        value = self.value.relu()
        return self.chain(value, value.sign())

    def softplus(self) -> Row:
        """Return log(1 + e^x) for each anchor."""
        return self.chain(functional.softplus(self.value), self.value.sigmoid())

    def weights(self) -> Tensor:
        """Return the derivative as one matrix, [a, n]. It is computed in place, so call this once."""
        (_, total), *others = self.parts
        for _, matrix in others:
            if matrix is total:
                total = total.clone()
                break
        for place, (factor, matrix) in enumerate(self.parts):
            if isinstance(factor, Tensor) and factor.ndim == 1:
                factor = factor.unsqueeze(1)
            if place == 0:
                total = total if isinstance(factor, float) and factor == 1.0 else total.mul_(factor)
            elif isinstance(factor, Tensor):
                total.addcmul_(matrix, factor)
            else:
                total.add_(matrix, alpha=factor)
        return total


def row_sum(terms: Tensor, slopes: Tensor, factor: float = 1.0) -> Row:
    """Sum the terms of each row.

    Args:
        terms: Terms, [a, n].
        slopes: Derivatives of the terms by the values of the row, [a, n], up to ``factor``.
        factor: Constant that the slopes are multiplied by.
    """
    return Row(terms.sum(dim=1), [(factor, slopes)])


def row_hinge(terms: Tensor) -> tuple[Row, Tensor]:
    """Sum the terms [x]+ of each row; return the sum with its derivative by x, and the number of active terms."""
    total, slopes = terms.sum(dim=1), terms.sign_()
    return Row(total, [(1.0, slopes)]), slopes.sum(dim=1)


def row_logsumexp(values: Tensor, mask: Tensor, scale: float = 1.0) -> Row:
    """Compute log Σ exp(scale · values) over the mask; about ``FLOOR`` if it is empty.

    Args:
        values: Values, [a, n].
        mask: Boolean mask, [a, n].
        scale: Constant that the values are multiplied by.
    """
    values = masked(values, mask, FLOOR / scale)
    if scale != 1.0:
        values.mul_(scale)
    probabilities = torch.softmax(values, dim=1)
    # max softmax = exp(max) / Σ exp, so the sum needs no second exponential.
    value = values.amax(dim=1).sub_(probabilities.amax(dim=1).log_())
    return Row(value, [(scale, probabilities)])


def count_nonzero(terms: Tensor) -> Tensor:
    """Count the terms of each row that are not zero, [a], in their dtype."""
    return terms.sign().abs_().sum(dim=1)
