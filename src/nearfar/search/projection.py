"""The whole index on a plane, kept beside it."""

from __future__ import annotations

import threading
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from nearfar.search.storage.shelf import Shelf
from nearfar.search.storage.table import Ids
from nearfar.utils.atomic import whole_file
from nearfar.utils.validation import one_of

KEPT = {"pca": ("ids", "places", "fitted", "mean", "axes", "scale"), "tsne": ("ids", "places")}
METHODS = tuple(KEPT)
STALE = 0.1  # share of items that may come and go before directions are computed anew
MOST_TSNE = 20_000  # items; beyond that it takes too long
BLOCK = 16_384

Places = NDArray[np.float32]
_computing = threading.Lock()


def places(shelf: Shelf, method: str = "pca") -> tuple[Ids, Places]:
    """Ids [n] of all items, rising, and their places [n, 2].

    When a plane is made, all lie within −1 and 1; what comes later may lie a little beyond.
    """
    one_of("method", method, METHODS)
    ids, vectors = shelf.table.everything()
    if method == "tsne" and len(ids) > MOST_TSNE:
        raise ValueError(
            f"method is 'tsne'; it places at most {MOST_TSNE:,} items, and there are {len(ids):,}: take 'pca'"
        )
    file = shelf.place / f"map-{method}.npz"
    with _computing:
        kept = _read(file, KEPT[method])
        if kept is not None and np.array_equal(kept["ids"], ids):
            return ids, kept["places"]
        if method == "tsne":
            kept = {"places": _tsne(vectors)}
        else:
            if kept is None or vectors.shape[1] != len(kept["mean"]) or _stale(kept["fitted"], ids):
                kept = {"fitted": ids, **_directions(vectors)}
            kept["places"] = _project(vectors, kept)
        kept["ids"] = ids
        if not shelf.read_only:
            with whole_file(file) as draft, open(draft, "wb") as out:
                np.savez(out, **kept)
        return ids, kept["places"]


def _read(file: Path, names: Sequence[str]) -> dict[str, Any] | None:
    """What was kept; None where there is nothing, or not all of it."""
    try:
        with np.load(file, allow_pickle=False) as kept:
            return {name: kept[name] for name in names}
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile):
        return None


def _stale(fitted: NDArray[np.int64], ids: NDArray[np.int64]) -> bool:
    common = len(np.intersect1d(fitted, ids, assume_unique=True))
    return len(fitted) + len(ids) - 2 * common > STALE * max(1, len(fitted))


def _directions(vectors: NDArray[np.float32]) -> dict[str, Any]:
    """The mean, the two directions with the most spread, and the scale that brings all within −1 and 1."""
    count, dim = vectors.shape
    total, products = (torch.zeros(*shape, dtype=torch.float64, device="cpu") for shape in ((dim,), (dim, dim)))
    for start in range(0, count, BLOCK):
        block = torch.from_numpy(np.array(vectors[start : start + BLOCK]))
        total += block.sum(dim=0, dtype=torch.float64)
        products += (block.T @ block).double()
    mean = total / max(1, count)
    axes = torch.linalg.eigh(products / max(1, count) - torch.outer(mean, mean)).eigenvectors.flip(1)[:, :2]
    # Eigenvectors have no sign; the largest part of each points up, so that maps stay the same.
    axes = axes * axes.gather(0, axes.abs().argmax(dim=0, keepdim=True)).sign()
    if axes.shape[1] < 2:
        axes = torch.cat([axes, torch.zeros_like(axes)], dim=1)
    found = {"mean": mean.numpy(), "axes": axes.numpy(), "scale": np.array(1.0)}
    reach = np.abs(_project(vectors, found)).max(initial=0.0)
    return {**found, "scale": np.array(1.0 / reach if reach > 0 else 1.0)}


def _project(vectors: NDArray[np.float32], kept: dict[str, Any]) -> Places:
    axes = kept["axes"] * kept["scale"]
    shift = kept["mean"] @ axes
    found = np.empty((len(vectors), 2), dtype=np.float32)
    for start in range(0, len(vectors), BLOCK):
        found[start : start + BLOCK] = vectors[start : start + BLOCK] @ axes.astype(np.float32) - shift
    return found


def _tsne(vectors: NDArray[np.float32]) -> Places:
    from sklearn.manifold import TSNE

    if len(vectors) < 4:
        return _project(vectors, _directions(vectors))
    perplexity = min(30.0, max(1.0, (len(vectors) - 1) / 3))
    moved = TSNE(perplexity=perplexity, init="pca", random_state=0).fit_transform(np.asarray(vectors))
    moved -= (moved.max(axis=0) + moved.min(axis=0)) / 2
    placed: Places = (moved / max(float(np.abs(moved).max()), 1e-12)).astype(np.float32)
    return placed
