"""Projection of all items to a plane, cached in the index folder."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from nearfar.search.storage import Ids
from nearfar.utils.atomic import whole_file
from nearfar.utils.tensors import check_finite
from nearfar.utils.validation import one_of

KEPT = {"pca": ("ids", "places", "fitted", "mean", "axes", "scale"), "tsne": ("ids", "places")}
METHODS = tuple(KEPT)
STALE = 0.1  # share of items that may change before the axes are recomputed
MOST_TSNE = 20_000  # items; more would take too long
BLOCK = 16_384
LARGEST = 1e15  # absolute value of a coordinate; sums of squares of larger ones overflow float32

Places = NDArray[np.float32]
_computing = threading.Lock()


def project(
    folder: Path, ids: Ids, vectors: NDArray[np.float32], method: str = "pca", *, write: bool = True
) -> tuple[Ids, Places]:
    """Project vectors to a plane, or return the cached projection of the same items.

    All coordinates of a new projection lie within −1 and 1; items that are added later may lie slightly outside.
    """
    one_of("method", method, METHODS)
    if method == "tsne" and len(ids) > MOST_TSNE:
        raise ValueError(
            f"method is 'tsne'; at most {MOST_TSNE:,} items are allowed, and there are {len(ids):,}: use 'pca'"
        )
    file = folder / f"map-{method}.npz"
    with _computing:
        kept = _read(file, KEPT[method])
        if kept is not None and np.array_equal(kept["ids"], ids):
            return ids, kept["places"]
        check_finite(f"vectors.npy of {folder}", torch.from_numpy(vectors))
        if (largest := max(vectors.max(initial=0.0), -vectors.min(initial=0.0))) > LARGEST:
            raise ValueError(
                f"vectors.npy of {folder} contains a value of {largest:.2g}; a map needs values up to {LARGEST:g}"
            )
        if method == "tsne":
            moved = tsne(vectors)
            moved = moved - (moved.max(axis=0, initial=0.0) + moved.min(axis=0, initial=0.0)) / 2
            kept = {"places": (moved / max(float(np.abs(moved).max(initial=0.0)), 1e-12)).astype(np.float32)}
        else:
            if kept is None or vectors.shape[1] != len(kept["mean"]) or _stale(kept["fitted"], ids):
                kept = {"fitted": ids, **_fit(vectors)}
            kept["places"] = _project(vectors, kept)
        kept["ids"] = ids
        if write:
            with suppress(OSError), whole_file(file) as draft, open(draft, "wb") as out:
                np.savez(out, **kept)
        return ids, kept["places"]


def _read(file: Path, names: Sequence[str]) -> dict[str, Any] | None:
    """The cached arrays; None if there is no complete cache."""
    try:
        with np.load(file, allow_pickle=False) as kept:
            return {name: kept[name] for name in names}
    except Exception:  # a damaged archive raises errors of many kinds
        return None


def _stale(fitted: NDArray[np.int64], ids: NDArray[np.int64]) -> bool:
    common = len(np.intersect1d(fitted, ids, assume_unique=True))
    return len(fitted) + len(ids) - 2 * common > STALE * max(1, len(fitted))


def principal_axes(vectors: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the mean [d] and the two directions of largest variance [d, 2]; a missing one is zero."""
    from sklearn.decomposition import PCA

    axes = np.zeros((vectors.shape[1], 2))
    if len(vectors) < 2:
        return vectors.sum(axis=0), axes
    fitted = PCA(min(2, *vectors.shape), svd_solver="covariance_eigh").fit(vectors)
    axes[:, : len(fitted.components_)] = fitted.components_.T
    return fitted.mean_, axes


def tsne(vectors: NDArray[Any], seed: int = 0) -> NDArray[Any]:
    """Return t-SNE coordinates [n, 2]; those of PCA for fewer than four vectors."""
    from sklearn.manifold import TSNE

    if len(vectors) < 4:
        mean, axes = principal_axes(vectors)
        return np.asarray((vectors - mean) @ axes)
    perplexity = min(30.0, max(1.0, (len(vectors) - 1) / 3))
    places = TSNE(perplexity=perplexity, init="pca", random_state=seed).fit_transform(np.asarray(vectors))
    return np.asarray(places)


def _fit(vectors: NDArray[np.float32]) -> dict[str, Any]:
    """Mean, two principal axes, and the scale that maps all coordinates to −1 … 1."""
    mean, axes = principal_axes(vectors)
    fitted = {"mean": mean, "axes": axes, "scale": np.array(1.0)}
    reach = np.abs(_project(vectors, fitted)).max(initial=0.0)
    return {**fitted, "scale": np.array(1.0 / reach if reach > 0 else 1.0)}


def _project(vectors: NDArray[np.float32], kept: dict[str, Any]) -> Places:
    axes = kept["axes"] * kept["scale"]
    shift = kept["mean"] @ axes
    places = np.empty((len(vectors), 2), dtype=np.float32)
    for start in range(0, len(vectors), BLOCK):
        places[start : start + BLOCK] = vectors[start : start + BLOCK] @ axes.astype(np.float32) - shift
    return places
