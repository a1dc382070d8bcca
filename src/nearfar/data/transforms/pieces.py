"""Pieces of random area and shape: what random crops show, and what random erasing hides."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

TRIES = 10  # of a random piece to lie within the picture

Whole = NDArray[np.int64]
Limits = tuple[float, float]


def random_pieces(sizes: Whole, scale: Limits, ratio: Limits, rng: np.random.Generator) -> Whole:
    """[b, 4], pieces of random area and, on a logarithmic scale, random shape: top, left, height and width.

    Where none of the tries fits, it is the middle of the picture, as much of it as the limits of the shape allow.
    """
    pieces, found = fitting_pieces(sizes, scale, ratio, rng)
    limits = np.stack([sizes[:, 1] / ratio[0], sizes[:, 0] * ratio[1]], axis=1)
    middle = np.rint(np.minimum(sizes, limits)).astype(np.int64).clip(min=1)
    return np.where(found[:, None], pieces, np.concatenate([(sizes - middle) // 2, middle], axis=1))


def fitting_pieces(
    sizes: Whole, scale: Limits, ratio: Limits, rng: np.random.Generator
) -> tuple[Whole, NDArray[np.bool_]]:
    """Such pieces, and [b], whether there is one: without, what stands for it is no piece of the picture.

    Some tries for each picture are drawn together; the first that fits is taken.

    Args:
        sizes: [b, 2], heights and widths of the pictures.
        scale: Smallest and largest share of the area.
        ratio: Smallest and largest width / height.
        rng: Of all randomness.
    """
    height, width = sizes[:, 0, None], sizes[:, 1, None]
    area = height * width * rng.uniform(*scale, size=(len(sizes), TRIES))
    shape = np.exp(rng.uniform(math.log(ratio[0]), math.log(ratio[1]), size=area.shape))
    tall = np.rint(np.sqrt(area / shape)).astype(np.int64)
    wide = np.rint(np.sqrt(area * shape)).astype(np.int64)
    fits = (tall > 0) & (tall <= height) & (wide > 0) & (wide <= width)
    each, first = np.arange(len(sizes)), fits.argmax(axis=1)
    piece = np.stack([tall[each, first], wide[each, first]], axis=1)
    corner = rng.integers(0, np.maximum(sizes - piece, 0) + 1)
    return np.concatenate([corner, piece], axis=1), fits[each, first]
