"""Duplicates within a dataset or between its parts: the same pixels, or pixels that look the same.

Each image is reduced to a hash of its pixels and a gray thumbnail of 8 × 9 pixels. Near duplicates differ in at most
three of the 64 comparisons of neighboring pixels of the thumbnail (dHash), and their thumbnails correlate.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from PIL.Image import Resampling

from nearfar.data.store.store import Store
from nearfar.utils.atomic import whole_file
from nearfar.utils.progress import Progress

SIGNATURES = "signatures.npy"  # file in the folder of a store
HEIGHT, WIDTH = 8, 9  # of a thumbnail: 8 × 8 comparisons of neighbors
BITS = 3  # of 64 that may differ between near duplicates
CORRELATION = 0.98  # of the thumbnails of near duplicates, at least
CONTRAST = 2.0  # standard deviation of a thumbnail; flatter ones look like too many others
BUDGET = 1 << 24  # pairs that are compared for each 16 bits; the most frequent patterns are left out
KIND = np.dtype([("pixels", "<u8"), ("thumbnail", "u1", (HEIGHT, WIDTH))])

Rows = NDArray[np.int64]
Signatures = NDArray[Any]  # of KIND, [n]


@dataclass(frozen=True)
class Duplicate:
    """Two images that are the same."""

    first: int  # row of the first image
    second: int  # row of the second image
    exact: bool  # whether all pixels are equal


def signature(image: NDArray[np.uint8]) -> Signatures:
    """Reduce an image to the hash of its pixels and its thumbnail."""
    reduced = np.zeros((), dtype=KIND)
    reduced["pixels"] = _digest(f"{image.shape}".encode(), image)
    small = Image.fromarray(image[:, :, 0] if image.shape[2] == 1 else image).resize((WIDTH, HEIGHT), Resampling.BOX)
    reduced["thumbnail"] = np.asarray(small.convert("L"))
    return reduced


def signatures(store: Store | NDArray[np.float32], *, progress: Progress | None = None) -> Signatures:
    """Return the signatures of all images of a store; they are kept in its folder. Vectors have no thumbnail."""
    reduced = np.zeros(len(store), dtype=KIND)
    if not isinstance(store, Store):
        reduced["pixels"] = [_digest(b"", vector) for vector in store]
        return reduced
    file = None if store.folder is None else store.folder / SIGNATURES
    if file is not None and (kept := _kept(file, len(store))) is not None:
        return kept
    with ThreadPoolExecutor(thread_name_prefix="signature") as pool:
        for place, reduced_image in enumerate(pool.map(lambda place: signature(store.image(place)), range(len(store)))):
            reduced[place] = reduced_image
            if progress is not None:
                progress(place + 1, len(store))
    if file is not None:
        with suppress(OSError), whole_file(file) as draft, open(draft, "wb") as content:
            np.save(content, reduced)
    return reduced


def between(every: Signatures, first: Rows, second: Rows) -> list[Duplicate]:
    """Find the images of one part that have a duplicate in another, each with one of its duplicates."""
    left, right = every[first], every[second]
    near = _near(left["thumbnail"], right["thumbnail"])
    pairs = {int(second[j]): Duplicate(int(first[i]), int(second[j]), False) for i, j in near}
    _, at, other = np.intersect1d(left["pixels"], right["pixels"], return_indices=True)
    known = dict(zip(right["pixels"][other].tolist(), first[at].tolist(), strict=True))
    for row, pixels in zip(second.tolist(), right["pixels"].tolist(), strict=True):
        if pixels in known:
            pairs[row] = Duplicate(known[pixels], row, True)
    return [pairs[row] for row in sorted(pairs)]


def within(every: Signatures) -> list[Duplicate]:
    """Find the images that are the same as an earlier one, each with one of these."""
    near = _near(every["thumbnail"], every["thumbnail"])
    pairs = {later: Duplicate(earlier, later, False) for earlier, later in reversed(near) if earlier < later}
    _, first, group = np.unique(every["pixels"], return_index=True, return_inverse=True)
    for row, earlier in enumerate(first[group].tolist()):
        if earlier < row:
            pairs[row] = Duplicate(earlier, row, True)
    return [pairs[row] for row in sorted(pairs)]


def _near(left: NDArray[np.uint8], right: NDArray[np.uint8]) -> list[tuple[int, int]]:
    """Pairs of thumbnails [n, 8, 9] that look the same, as positions in both."""
    flat = [_normalized(values) for values in (left, right)]
    textured = [np.flatnonzero(values.any(axis=1)) for values in flat]
    a, b = (_comparisons(values[rows]) for values, rows in zip((left, right), textured, strict=True))
    pairs: set[tuple[int, int]] = set()
    for shift in range(0, 64, 16):  # two hashes that differ in 3 bits have one of four parts in common
        at, other = _equal((a >> np.uint64(shift)) & np.uint64(0xFFFF), (b >> np.uint64(shift)) & np.uint64(0xFFFF))
        differing = np.unpackbits((a[at] ^ b[other]).view(np.uint8).reshape(-1, 8), axis=1).sum(axis=1)
        i, j = textured[0][at[differing <= BITS]], textured[1][other[differing <= BITS]]
        alike = (flat[0][i] * flat[1][j]).sum(axis=1) >= CORRELATION
        pairs.update(zip(i[alike].tolist(), j[alike].tolist(), strict=True))
    return sorted(pairs)


def _equal(left: NDArray[np.uint64], right: NDArray[np.uint64]) -> tuple[Rows, Rows]:
    """Positions of all pairs of equal values below 2¹⁶; the most frequent values are left out beyond ``BUDGET``."""
    counts = [np.bincount(values.astype(np.int64), minlength=1 << 16) for values in (left, right)]
    products = counts[0] * counts[1]
    keys = np.flatnonzero(products)
    keys = keys[np.argsort(products[keys], kind="stable")]
    keys = keys[np.cumsum(products[keys]) <= BUDGET]
    of = np.repeat(keys, products[keys])
    place = np.arange(len(of)) - np.repeat(np.cumsum(products[keys]) - products[keys], products[keys])
    starts = [np.cumsum(count) - count for count in counts]
    orders = [np.argsort(values, kind="stable") for values in (left, right)]
    return orders[0][starts[0][of] + place // counts[1][of]], orders[1][starts[1][of] + place % counts[1][of]]


def _comparisons(thumbnails: NDArray[np.uint8]) -> NDArray[np.uint64]:
    """The 64 comparisons of neighboring pixels as one number each."""
    bits = np.packbits((thumbnails[:, :, 1:] > thumbnails[:, :, :-1]).reshape(len(thumbnails), 64), axis=1)
    numbers: NDArray[np.uint64] = np.ascontiguousarray(bits).view(np.uint64).reshape(-1)
    return numbers


def _normalized(thumbnails: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Thumbnails with mean 0 and norm 1, so that products are correlations; flat ones are zero."""
    values = thumbnails.reshape(len(thumbnails), -1).astype(np.float32)
    values -= values.mean(axis=1, keepdims=True)
    deviation = values.std(axis=1, keepdims=True)
    values /= np.maximum(np.sqrt(values.shape[1]) * deviation, 1e-9)
    values[deviation[:, 0] < CONTRAST] = 0
    return values


def _digest(start: bytes, values: NDArray[Any]) -> int:
    digest = hashlib.blake2b(start, digest_size=8)
    digest.update(np.ascontiguousarray(values).data)
    return int.from_bytes(digest.digest(), "little")


def _kept(file: Path, count: int) -> Signatures | None:
    """Signatures of an earlier call; None if there are none."""
    try:
        kept: Signatures = np.load(file, allow_pickle=False)
    except (OSError, EOFError, ValueError):
        return None
    return kept if kept.dtype == KIND and kept.shape == (count,) else None


def told(duplicates: Sequence[Duplicate], names: Sequence[str] | Mapping[int, str]) -> list[str]:
    """Describe duplicates, a line for each."""
    words = {True: "has the pixels of", False: "looks like"}
    return [f"{names[pair.second]} {words[pair.exact]} {names[pair.first]}" for pair in duplicates]
