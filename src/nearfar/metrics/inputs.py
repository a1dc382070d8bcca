"""Input of the metrics: checked embeddings on one device, and their exact and approximate similarities."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from nearfar.utils.tensors import ArrayInput, as_label_pair, as_labels, as_vectors, check_finite, unit_rows
from nearfar.utils.validation import one_of, whole

MEASURES = ("cosine", "euclidean")
CPU_BUDGET, GPU_BUDGET = 256 * 1024 * 1024, 2 * 1024 * 1024 * 1024
SAME = 2.0**-40  # similarities closer than this in float64 are equal


@dataclass
class Points:
    """Embeddings that are compared by cosine or by negative squared distance."""

    array: Tensor  # [n, d], of any floating-point type, on any device; possibly a memory map
    unit: bool  # whether they are compared by cosine similarity
    scale: float  # a power of two that keeps squared distances within the range of floating point
    center: Tensor  # [d], float64; distances do not depend on it, but their precision in float32 does

    def float64(self, index: Tensor) -> Tensor:
        """Return some of the points in float64."""
        points = self.array[index].double()
        if not self.unit:
            return points.mul_(self.scale)
        return unit_rows(points)

    def float32(self, index: Tensor) -> Tensor:
        """Return some of the points in float32, relative to the center."""
        return (self.float64(index) - self.center).float()

    def similarity(self, left: Tensor, right: Tensor) -> Tensor:
        """Return the similarity of exact points, pair by pair along the last dimension."""
        return (left * right).sum(dim=-1) if self.unit else -(left - right).square_().sum(dim=-1)

    def pairwise(self, rows: Tensor, columns: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the similarities of all rows with all columns, in their precision."""
        if self.unit:
            return torch.mm(rows, columns.T, out=out)
        squares = [points.square().sum(dim=1) for points in (rows, columns)]
        return torch.addmm(squares[1].neg(), rows, columns.T, alpha=2.0, out=out).sub_(squares[0].unsqueeze(1))

    def float32_error(self, rows: Tensor, columns: Tensor) -> float:
        """Return a bound on the error of a similarity computed in float32."""
        share = 1e-6 + 4e-8 * math.sqrt(rows.shape[1])
        if self.unit:
            return share
        longest = [float(points.square().sum(dim=1).max()) ** 0.5 for points in (rows, columns)]
        return max(float(share * sum(longest) ** 2), 1e-38)


def prepare(arrays: Sequence[Tensor], measure: str, rows: int = 65_536) -> list[Points]:
    """Prepare arrays of embeddings for comparison with each other."""
    if measure == "cosine":
        origin = torch.zeros(arrays[0].shape[1], dtype=torch.float64, device=arrays[0].device)
        return [Points(array, True, 1.0, origin) for array in arrays]
    blocks = [array[start : start + rows] for array in arrays for start in range(0, len(array), rows)]
    largest = max(float(block.abs().max()) for block in blocks)
    scale = 2.0 ** -math.frexp(largest)[1] if largest else 1.0
    # The median is not moved by outliers.
    sample = torch.cat([array[:: len(array) // 1024 + 1].double() for array in arrays])
    center = (sample * scale).median(dim=0).values
    return [Points(array, False, scale, center) for array in arrays]


class QueryGallery(NamedTuple):
    """Queries and the gallery they are compared with."""

    queries: Points  # m
    query_classes: Tensor  # [m], numbers from 0
    gallery: Points | None  # n; None if the queries are compared with each other
    gallery_classes: Tensor  # [n]
    budget: int  # working memory in bytes, in addition to the input


def as_query_gallery(
    embeddings: ArrayInput,
    labels: ArrayInput,
    gallery: ArrayInput | None,
    gallery_labels: ArrayInput | None,
    *,
    measure: str,
    memory_budget: int | None,
) -> QueryGallery:
    """Check the arguments of a metric and move them to the device of the embeddings."""
    if (gallery is None) != (gallery_labels is None):
        raise ValueError("gallery and gallery_labels must be given together; only one of them was given")
    queries, items, budget = as_points(embeddings, gallery, measure=measure, memory_budget=memory_budget)
    count, device = len(queries.array), queries.array.device
    if items is None or gallery_labels is None:
        classes = _codes(as_labels("labels", labels, count).to(device))
        return QueryGallery(queries, classes, None, classes, budget)
    pair = as_label_pair("labels", labels, count, "gallery_labels", gallery_labels, len(items.array))
    classes = _codes(torch.cat([part.to(device) for part in pair]))
    return QueryGallery(queries, classes[:count], items, classes[count:], budget)


def as_points(
    embeddings: ArrayInput, gallery: ArrayInput | None, *, measure: str, memory_budget: int | None
) -> tuple[Points, Points | None, int]:
    """Check embeddings and gallery, move both to the device of the embeddings; also return the working memory."""
    one_of("measure", measure, MEASURES)
    if memory_budget is not None:
        whole("memory_budget", memory_budget)
    queries = _vectors("embeddings", embeddings)
    budget = CPU_BUDGET if memory_budget is None else memory_budget
    if memory_budget is None and queries.is_cuda:
        budget = max(CPU_BUDGET, min(GPU_BUDGET, torch.cuda.mem_get_info(queries.device)[0] // 4))
    if gallery is None:
        return prepare([queries], measure)[0], None, budget
    items = _vectors("gallery", gallery)
    if items.shape[1] != queries.shape[1]:
        raise ValueError(f"gallery has {items.shape[1]} dimensions and embeddings {queries.shape[1]}")
    query_points, gallery_points = prepare([queries, items.to(queries.device)], measure)
    return query_points, gallery_points, budget


def _vectors(name: str, array: ArrayInput) -> Tensor:
    vectors = as_vectors(name, array)
    check_finite(name, vectors)
    return vectors


def _codes(labels: Tensor) -> Tensor:
    codes: Tensor = torch.unique(labels, return_inverse=True)[1]
    return codes
