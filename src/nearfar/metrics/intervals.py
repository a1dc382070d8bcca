"""Bootstrap confidence intervals of metrics over queries."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, overload

import numpy as np
import torch
from torch import Tensor

from nearfar.utils.tensors import Array
from nearfar.utils.validation import number, whole

CHUNK = 1 << 21  # drawn indices held at a time


class Interval(NamedTuple):
    """A mean and its bootstrap confidence interval.

    Attributes:
        mean: Mean over the queries.
        low: Lower end of the interval.
        high: Upper end of the interval.
    """

    mean: float
    low: float
    high: float


@overload
def bootstrap(values: Array, *, samples: int = ..., confidence: float = ..., seed: int = ...) -> Interval: ...


@overload
def bootstrap(
    values: Mapping[str, Array], *, samples: int = ..., confidence: float = ..., seed: int = ...
) -> dict[str, Interval]: ...


@torch.no_grad()
def bootstrap(
    values: Array | Mapping[str, Array], *, samples: int = 1000, confidence: float = 0.95, seed: int = 0
) -> Interval | dict[str, Interval]:
    """Compute the percentile bootstrap interval of the mean over queries.

    The queries are resampled with replacement. The interval reflects the choice of queries only, not the choice of
    classes or the randomness of training.

    Args:
        values: [queries], one value per query, or a mapping of such arrays for the same queries, which share the
            resampling. NaN marks a query without a value; it is ignored.
        samples: Number of bootstrap samples.
        confidence: Fraction of the sample means inside the interval.
        seed: Seed of the resampling.

    Returns:
        An interval, or a dictionary of intervals for a mapping.

    Raises:
        ValueError: If an array has the wrong shape, contains infinity or only NaN.

    Example:
        >>> bootstrap(torch.tensor([1.0, 0.0, 1.0, 1.0, float("nan")]))
        Interval(mean=0.75, low=0.25, high=1.0)
    """
    named = values if isinstance(values, Mapping) else {"values": values}
    whole("samples", samples)
    number("confidence", confidence, low=0.0, high=1.0, open_low=True)
    generator = torch.Generator("cpu").manual_seed(whole("seed", seed, low=0, high=2**63 - 1))
    table = _table(named)
    answered = ~table.isnan()
    kept = answered.any(dim=1)
    table, answered = table[kept].nan_to_num(nan=0.0), answered[kept].double()
    means = _means(table, answered, samples, generator)
    tail = (1 - confidence) / 2
    quantiles = means.new_tensor([tail, 1 - tail])
    found = {}
    for column, name in enumerate(named):
        mean = table[:, column].sum() / answered[:, column].sum()
        low, high = means[:, column].nanquantile(quantiles).tolist()
        found[name] = Interval(mean.item(), low, high)
    return found if isinstance(values, Mapping) else found["values"]


def _table(named: Mapping[str, Array]) -> Tensor:
    """Return the values as columns, [queries, metrics], in float64."""
    columns: list[Tensor] = []
    for name, values in named.items():
        if not isinstance(values, (Tensor, np.ndarray)):
            raise TypeError(f"{name} is a {type(values).__name__}; a torch.Tensor or NumPy array is required")
        if isinstance(values, Tensor):
            column = values.detach().cpu().double()
        else:
            column = torch.from_numpy(np.array(values, dtype=np.float64))
        if column.ndim != 1 or len(column) != len(columns[0] if columns else column):
            needed = f"[{len(columns[0])}]" if columns else "[queries]"
            raise ValueError(f"{name} has shape {tuple(column.shape)}; {needed} is required")
        if column.isinf().any():
            raise ValueError(f"{name} contains infinity in {int(column.isinf().sum())} of {len(column)} entries")
        if column.isnan().all():
            raise ValueError(f"{name} has no query with a value: each of its {len(column)} entries is NaN")
        columns.append(column)
    if not columns:
        raise ValueError("values is empty; at least one array is required")
    return torch.stack(columns, dim=1)


def _means(table: Tensor, answered: Tensor, samples: int, generator: torch.Generator) -> Tensor:
    """Return the mean of each column in each sample, [samples, metrics]; NaN if no drawn query has a value."""
    queries = len(table)
    parts = []
    step = max(1, CHUNK // queries)
    for start in range(0, samples, step):
        height = min(step, samples - start)
        drawn = torch.randint(queries, (height, queries), generator=generator, device=table.device)
        drawn += torch.arange(height, device=table.device).unsqueeze(1) * queries
        times = torch.bincount(drawn.flatten(), minlength=height * queries).view(height, queries).double()
        parts.append((times @ table) / (times @ answered))
    return torch.cat(parts)
