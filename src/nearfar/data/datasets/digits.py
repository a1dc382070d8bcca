"""scikit-learn's handwritten digits."""

from __future__ import annotations

from typing import Any

import numpy as np

from nearfar.data.datasets.base import Dataset
from nearfar.data.datasets.registry import register
from nearfar.data.store.sources import Arrays, Vectors

TRAINED = 5  # 0 to 4 are for training
QUARTERS = ("", " left", " upside down", " right")  # where its head points after none, one, two and three quarter turns

Array = np.ndarray[Any, np.dtype[Any]]


@register
def digits(*, vectors: bool = False, turned: bool = False) -> Dataset:
    """1,797 handwritten digits, 8 × 8, that come with scikit-learn: nothing to fetch.

    The digits 0 to 4 are for training (901 pictures), 5 to 9 for the test (896).

    Args:
        vectors: Hand out the 64 pixels, from 0 to 1, as vectors instead of pictures.
        turned: Five classes say little about digits: show each one for training also turned by quarters and
            mirrored, every way a class of its own. That makes 40 classes and 7,208 pictures; the test stays.

    >>> digits(vectors=True).source.array.shape
    (1797, 64)
    >>> digits(turned=True).classes[:5]
    ('0', '0 left', '0 upside down', '0 right', '0 mirrored')
    """
    from sklearn.datasets import load_digits

    pixels, targets = load_digits(return_X_y=True)
    labels = np.asarray(targets, dtype=np.int64)
    scaled = np.asarray(pixels, dtype=np.float32).reshape(-1, 8, 8) / 16
    names = [str(digit) for digit in range(10)]
    trained = labels < TRAINED
    if turned:
        scaled, labels, trained = _turned(scaled, labels, trained)
        ways = [mirrored + quarter for mirrored in ("", " mirrored") for quarter in QUARTERS]
        names = [digit + way for digit in names[:TRAINED] for way in ways] + names[TRAINED:]
    pictures = np.rint(scaled * 255).astype(np.uint8)
    return Dataset(
        "digits",
        Vectors(scaled.reshape(-1, 64)) if vectors else Arrays(pictures),
        labels,
        tuple(names),
        {"train": np.flatnonzero(trained), "test": np.flatnonzero(~trained)},
    )


def _turned(pictures: Array, labels: Array, trained: Array) -> tuple[Array, Array, Array]:
    """Eight classes instead of each one for training; pictures as they are come first, at the place they had."""
    more = [pictures], [np.where(trained, 8 * labels, labels + 7 * TRAINED)]
    for way in range(1, 8):
        seen = pictures[trained][:, :, ::-1] if way >= 4 else pictures[trained]
        more[0].append(np.rot90(seen, way % 4, axes=(1, 2)))
        more[1].append(8 * labels[trained] + way)
    numbers = np.concatenate(more[1])
    return np.concatenate(more[0]), numbers, numbers < 8 * TRAINED
