"""Pictures for a report: what a query finds, and thumbnails of what that is."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nearfar.data import Dataset
from nearfar.data.store.sources import Arrays
from nearfar.utils.validation import one_of

THUMBNAIL = 128  # pixels of the longer side
SMALL = 48  # pictures up to this side are shown pixel by pixel
MOST_PLACED = 2000  # points of a map
METHODS = ("pca", "tsne", "umap")


@dataclass(frozen=True)
class Found:
    """A query and its nearest neighbours, nearest first: numbers of rows in queries and gallery."""

    query: int
    neighbours: list[int]
    values: list[float]  # cosines, or distances


def neighbours(
    queries: Tensor, chosen: Sequence[int], gallery: Tensor | None, *, count: int = 8, measure: str = "cosine"
) -> list[Found]:
    """The nearest rows to chosen queries, in the gallery or else among the other queries.

    >>> points = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0]])
    >>> neighbours(points, [0], None, count=2)[0].neighbours
    [1, 2]
    """
    columns = queries if gallery is None else gallery
    found = []
    for query in chosen:
        own = queries[query : query + 1]
        if measure == "cosine":
            values = torch.nn.functional.cosine_similarity(own, columns)
        else:
            values = torch.cdist(own, columns, compute_mode="donot_use_mm_for_euclid_dist")[0].neg()
        if gallery is None:
            values[query] = -math.inf
        best = values.topk(min(count, len(columns) - (gallery is None)))
        shown = best.values if measure == "cosine" else best.values.neg()
        found.append(Found(query, best.indices.tolist(), shown.tolist()))
    return found


def spread(labels: Tensor, count: int, seed: int = 0) -> list[int]:
    """Rows drawn at random, of as many different classes as there are.

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


def thumbnail(dataset: Dataset, index: int) -> str | None:
    """A picture of the data set as a data URI; a vector as a square of its numbers. None where it cannot be read."""
    from PIL import Image

    try:
        pixels = _pixels(dataset, index)
    except (OSError, ValueError):
        return None
    gray = pixels.ndim == 2 or pixels.shape[2] == 1
    image = Image.fromarray(pixels.reshape(pixels.shape[:2]) if gray else pixels)
    image.thumbnail((THUMBNAIL, THUMBNAIL))
    kind = "png" if max(image.size) <= SMALL else "jpeg"
    file = io.BytesIO()
    image.save(file, kind, **({"quality": 85} if kind == "jpeg" else {"optimize": True}))
    return f"data:image/{kind};base64,{base64.b64encode(file.getvalue()).decode()}"


def _pixels(dataset: Dataset, index: int) -> NDArray[np.uint8]:
    if dataset.is_vectors:
        return as_square(dataset.source.array[index])  # type: ignore[attr-defined]
    if isinstance(dataset.source, Arrays):
        array: NDArray[np.uint8] = np.ascontiguousarray(dataset.source.array[index])
        return array
    from nearfar.data.store.decode import decode

    return decode(dataset.source.read(index))


def as_square(vector: NDArray[Any]) -> NDArray[np.uint8]:
    """The numbers of a vector as shades of a square, row by row, from its smallest (dark) to its largest.

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
    """Embeddings as places on a plane, [n, 2].

    Args:
        method: "pca": the two directions with the most spread. "tsne" and "umap" keep neighbours together and tell
            little of distances; the latter needs the package umap-learn.
    """
    one_of("map", method, METHODS)
    values = points.double().cpu()
    if method == "pca":
        centred = values - values.mean(dim=0)
        # Of the d × d matrix: quick, however many points there are.
        axes = torch.linalg.eigh(centred.T @ centred).eigenvectors.flip(1)[:, :2]
        # Eigenvectors have no sign; the largest part of each points up, so that pages stay the same.
        largest = axes.gather(0, axes.abs().argmax(dim=0, keepdim=True))
        placed = centred @ (axes * largest.sign())
        if placed.shape[1] < 2:
            placed = torch.cat([placed, torch.zeros_like(placed)], dim=1)
        flat: NDArray[np.float64] = placed.numpy()
        return flat
    if method == "tsne":
        from sklearn.manifold import TSNE

        perplexity = min(30.0, max(1.0, (len(values) - 1) / 3))
        moved = TSNE(perplexity=perplexity, init="pca", random_state=seed).fit_transform(values.numpy())
        return np.asarray(moved, dtype=np.float64)
    try:
        from umap import UMAP  # type: ignore[import-not-found, unused-ignore]
    except ImportError as error:
        raise ImportError("map 'umap' needs umap-learn; install it with: pip install umap-learn") from error
    return np.asarray(UMAP(random_state=seed).fit_transform(values.numpy()), dtype=np.float64)
