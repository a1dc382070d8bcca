"""Examples for a run report: nearest neighbors of queries, thumbnails, and projections of embeddings."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nearfar.data import Dataset
from nearfar.data.store.sources import Arrays
from nearfar.search.projection import principal_axes, tsne
from nearfar.utils.system import require
from nearfar.utils.validation import one_of

THUMBNAIL = 128  # pixels of the longer side
SMALL = 48  # images up to this side are shown pixel by pixel
MAX_POINTS = 2000  # of a map
METHODS = ("pca", "tsne", "umap")


def neighbors(
    queries: Tensor, chosen: Sequence[int], gallery: Tensor | None, *, count: int = 8, measure: str = "cosine"
) -> list[list[tuple[int, float]]]:
    """The nearest neighbors of chosen queries, in the gallery or among the other queries: rows with their values.

    >>> points = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0]])
    >>> [row for row, _ in neighbors(points, [0], None, count=2)[0]]
    [1, 2]
    """
    columns = queries if gallery is None else gallery
    asked = queries[chosen]
    if measure == "cosine":
        values = torch.nn.functional.normalize(asked) @ torch.nn.functional.normalize(columns).T
    else:
        values = torch.cdist(asked, columns, compute_mode="donot_use_mm_for_euclid_dist").neg()
    if gallery is None:
        values[range(len(asked)), chosen] = -math.inf
    best = values.topk(min(count, len(columns) - (gallery is None)))
    shown = best.values if measure == "cosine" else best.values.neg()
    return [list(zip(*pair, strict=True)) for pair in zip(best.indices.tolist(), shown.tolist(), strict=True)]


def spread(labels: Tensor, count: int, seed: int = 0) -> list[int]:
    """Random rows of as many different classes as possible.

    >>> rows = spread(torch.tensor([0, 0, 0, 0, 1, 2]), 3)
    >>> sorted(torch.tensor([0, 0, 0, 0, 1, 2])[rows].tolist())
    [0, 1, 2]
    """
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed)).tolist()
    seen: dict[int, int] = {}
    ranked = []
    for place, row in enumerate(order):
        label = int(labels[row])
        ranked.append((seen.get(label, 0), place, row))
        seen[label] = seen.get(label, 0) + 1
    return [row for _, _, row in sorted(ranked)[:count]]


def thumbnail(dataset: Dataset, index: int) -> tuple[str, bool] | None:
    """A data URI of an image, or of a vector drawn as a square of its values, and whether its pixels are shown sharply.

    None if the image cannot be read.
    """
    from PIL import Image

    try:
        pixels = _pixels(dataset, index)
    except (OSError, ValueError):
        return None
    gray = pixels.ndim == 2 or pixels.shape[2] == 1
    image = Image.fromarray(pixels.reshape(pixels.shape[:2]) if gray else pixels)
    image.thumbnail((THUMBNAIL, THUMBNAIL))
    is_small = max(image.size) <= SMALL
    kind = "png" if is_small else "jpeg"
    file = io.BytesIO()
    image.save(file, kind, **({"quality": 85} if kind == "jpeg" else {"optimize": True}))
    return f"data:image/{kind};base64,{base64.b64encode(file.getvalue()).decode()}", is_small


def _pixels(dataset: Dataset, index: int) -> NDArray[np.uint8]:
    if dataset.is_vectors:
        return as_square(dataset.source.array[index])  # type: ignore[attr-defined]
    if isinstance(dataset.source, Arrays):
        array: NDArray[np.uint8] = np.ascontiguousarray(dataset.source.array[index])
        return array
    return dataset.source.pixels(index)


def as_square(vector: NDArray[Any]) -> NDArray[np.uint8]:
    """The values of a vector as shades of a square, row by row; the smallest is dark.

    >>> as_square(np.array([0.0, 1.0, 0.5])).tolist()
    [[0, 255], [128, 255]]
    """
    values = np.nan_to_num(np.asarray(vector, dtype=np.float64))
    low, high = float(values.min()), float(values.max())
    shades = np.rint((values - low) / ((high - low) or 1.0) * 255)
    side = math.ceil(math.sqrt(len(values)))
    square = np.full(side * side, 255, dtype=np.uint8)
    square[: len(values)] = shades
    return square.reshape(side, side)


def flatten(points: Tensor, method: str = "pca", seed: int = 0) -> NDArray[np.float64]:
    """Project embeddings to a plane."""
    one_of("map", method, METHODS)
    values = points.double().cpu().numpy()
    if method == "pca":
        mean, axes = principal_axes(values)
        return np.asarray((values - mean) @ axes, dtype=np.float64)
    if method == "tsne":
        return np.asarray(tsne(values, seed), dtype=np.float64)
    umap = require("map 'umap'", "umap", "umap-learn", "umap-learn")
    return np.asarray(umap.UMAP(random_state=seed).fit_transform(values), dtype=np.float64)
