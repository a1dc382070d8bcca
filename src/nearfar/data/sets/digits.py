"""scikit-learn's handwritten digits."""

from __future__ import annotations

import numpy as np

from nearfar.data.dataset import DataSet
from nearfar.data.registry import register
from nearfar.data.sources import Arrays, Vectors

TRAINED = 5  # 0 to 4 are for training


@register
def digits(*, vectors: bool = False) -> DataSet:
    """1,797 handwritten digits, 8 × 8, that come with scikit-learn: nothing to fetch.

    The digits 0 to 4 are for training (901 pictures), 5 to 9 for the test (896).

    Settings
        vectors    hand out the 64 pixels, from 0 to 1, as vectors instead of pictures.

    >>> digits(vectors=True).source.array.shape
    (1797, 64)
    """
    from sklearn.datasets import load_digits

    pixels, targets = load_digits(return_X_y=True)
    labels = np.asarray(targets, dtype=np.int64)
    scaled = np.asarray(pixels, dtype=np.float32) / 16
    pictures = np.rint(scaled * 255).astype(np.uint8).reshape(-1, 8, 8)
    trained = labels < TRAINED
    return DataSet(
        "digits",
        Vectors(scaled) if vectors else Arrays(pictures),
        labels,
        tuple(str(digit) for digit in range(10)),
        {"train": np.flatnonzero(trained), "test": np.flatnonzero(~trained)},
    )
