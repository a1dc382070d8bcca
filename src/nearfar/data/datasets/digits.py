"""The handwritten digits of scikit-learn."""

from __future__ import annotations

from typing import Any

import numpy as np

from nearfar.data.datasets.base import Dataset, register
from nearfar.data.store.sources import Arrays, Vectors

TRAINED = 5  # 0 to 4 are training classes
QUARTERS = ("", " left", " upside down", " right")  # direction of the top after 0, 1, 2 and 3 quarter turns

Array = np.ndarray[Any, np.dtype[Any]]


@register
def digits(*, vectors: bool = False, turned: bool = False) -> Dataset:
    """1,797 handwritten digits, 8 × 8, included in scikit-learn: no download.

    The digits 0 to 4 are for training (901 images), 5 to 9 for testing (896 images).

    Args:
        vectors: Return the 64 pixels, from 0 to 1, as vectors instead of images.
        turned: Add rotations by quarter turns and mirror images of the training digits, each as a class of its own:
            40 classes and 7,208 images instead of 5 classes. The test part does not change.

    Example:
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
    images = np.rint(scaled * 255).astype(np.uint8)
    return Dataset(
        "digits",
        Vectors(scaled.reshape(-1, 64)) if vectors else Arrays(images),
        labels,
        tuple(names),
        {"train": np.flatnonzero(trained), "test": np.flatnonzero(~trained)},
    )


def _turned(images: Array, labels: Array, trained: Array) -> tuple[Array, Array, Array]:
    """Replace each training class by eight; the original images come first, in their order."""
    more = [images], [np.where(trained, 8 * labels, labels + 7 * TRAINED)]
    for way in range(1, 8):
        seen = images[trained][:, :, ::-1] if way >= 4 else images[trained]
        more[0].append(np.rot90(seen, way % 4, axes=(1, 2)))
        more[1].append(8 * labels[trained] + way)
    numbers = np.concatenate(more[1])
    return np.concatenate(more[0]), numbers, numbers < 8 * TRAINED
