"""Who is whose positive, and sums over them."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

# Stands for "not in the set" in a log-sum-exp: finite, so that an empty set has a gradient (zero).
FLOOR = -1e30
CPU_CHUNK = 1 << 20  # numbers that stay in the cache


def masks(row_labels: Tensor, column_labels: Tensor, own_columns: Tensor | int | None) -> tuple[Tensor, Tensor]:
    """Positives and negatives of each row, [a, n] each.

    ``own_columns`` says where a row's own embedding stands among the columns: an int for "row 0 is
    column ``own_columns``, and so on down the diagonal", a tensor of column numbers (−1: nowhere), or
    None where rows and columns share no embedding. A row is never its own positive.
    """
    same = row_labels.unsqueeze(1) == column_labels.unsqueeze(0)
    negatives = ~same
    if isinstance(own_columns, int):
        same.diagonal(own_columns).fill_(False)
    elif own_columns is not None:
        columns = torch.arange(column_labels.shape[0], device=column_labels.device)
        same &= own_columns.unsqueeze(1) != columns
    return same, negatives


@lru_cache(maxsize=256)
def _constant(value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.full((), value, dtype=dtype, device=device)


def masked(values: Tensor, mask: Tensor, otherwise: float = 0.0) -> Tensor:
    """The values within the mask, ``otherwise`` outside.

    torch.where with a Python number builds a tensor of it on every call; this keeps them.
    """
    return torch.where(mask, values, _constant(otherwise, values.dtype, values.device))


def masked_sum(values: Tensor, mask: Tensor) -> Tensor:
    """Sum of each row over its mask, [a]."""
    return masked(values, mask).sum(dim=1)


def count(mask: Tensor, like: Tensor) -> Tensor:
    """How many of each row are in the mask, [a], in the dtype of ``like``."""
    return mask.sum(dim=1, dtype=like.dtype)


def masked_logsumexp(values: Tensor, mask: Tensor) -> Tensor:
    """log Σ exp of each row over its mask; about ``FLOOR`` where the mask is empty."""
    return masked(values, mask, FLOOR).logsumexp(dim=1)


def positive_columns(mask: Tensor) -> tuple[Tensor, Tensor]:
    """The column numbers of each row's members, [a, k], and which of the k slots are filled.

    On a CPU k is the largest number of members. Elsewhere that number would cost a synchronisation,
    so every column keeps its slot and k = n.
    """
    if mask.device.type != "cpu":
        return torch.arange(mask.shape[1], device=mask.device).expand(mask.shape), mask
    columns = mask.nonzero()[:, 1]
    counts = mask.sum(dim=1)
    width = max(1, int(counts.max()))
    filled = torch.arange(width, device=mask.device) < counts.unsqueeze(1)
    slots = torch.zeros(filled.shape, dtype=torch.long, device=mask.device)
    return slots.masked_scatter_(filled, columns), filled


def slot_chunks(count: int, pairs: Tensor, budget: int) -> list[slice]:
    """``count`` slots, cut so that slots × pairs keep to an eighth of the budget."""
    most = budget // (8 * pairs.element_size())
    if pairs.device.type == "cpu":
        most = min(most, CPU_CHUNK)
    step = max(1, most // pairs.numel())
    return [slice(start, start + step) for start in range(0, count, step)]


def scatter_mask(index: Tensor, filled: Tensor, width: int) -> Tensor:
    """The [a, width] mask of the columns named by the filled slots of ``index``."""
    spare = torch.where(filled, index, width)  # empty slots write to a column that is cut off
    mask = torch.zeros(index.shape[0], width + 1, dtype=torch.bool, device=index.device)
    return mask.scatter_(1, spare, True)[:, :width]
