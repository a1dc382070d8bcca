"""Generated characters: any number of fine-grained classes."""

from __future__ import annotations

from typing import Any

import numpy as np

from nearfar.data.datasets.base import Dataset, register
from nearfar.data.store.sources import Arrays
from nearfar.utils.validation import number, one_of, whole

POINTS = 6  # of the line that makes a character
TOGETHER = 64  # images drawn at once; they fit into the processor's cache
TURN, ZOOM, SHIFT = 0.2, 0.15, 0.07  # radians, share of the size, share of the image

Floats = np.ndarray[Any, np.dtype[np.float32]]
Bytes = np.ndarray[Any, np.dtype[np.uint8]]


@register
def glyphs(
    *,
    classes: int = 100,
    per_class: int = 20,
    side: int = 32,
    color: str = "gray",
    siblings: int = 4,
    difference: float = 0.15,
    seed: int = 0,
) -> Dataset:
    """Generated characters: any number of classes and images, the same for the same seed; no download.

    A character is a line through six points. Sibling classes share all points but one, so they differ in one corner.
    Images of a class differ in rotation, size, position, thickness, ink, paper and noise. The first half of the classes
    is for training, the second for testing; only siblings in the middle may be in both halves.

    Args:
        classes: Number of classes.
        per_class: Images per class.
        side: Height and width in pixels.
        color: "gray" or "rgb".
        siblings: Number of classes that share all points but one.
        difference: Distance of that point from its common position, as a share of the side.
        seed: Seed of characters and images.

    Example:
        >>> glyphs(classes=6, per_class=3)
        Dataset('glyphs': 18 of 6 classes; train 9, test 9; 0 notes)
    """
    whole("classes", classes, low=2)
    whole("per_class", per_class)
    whole("side", side, low=8, high=1024)
    whole("siblings", siblings, high=26)
    number("difference", difference, low=0.0, high=0.5, open_low=True)
    whole("seed", seed, low=0)
    channels = 1 if one_of("color", color, ("gray", "rgb")) == "gray" else 3
    shapes = _characters(classes, siblings, difference, seed)
    images = np.empty((classes * per_class, side, side, channels), dtype=np.uint8)
    for chunk, start in enumerate(range(0, len(images), TOGETHER)):
        rows = np.arange(start, min(start + TOGETHER, len(images)))
        _draw(shapes[rows // per_class], images[rows[0] : rows[-1] + 1], np.random.default_rng([seed, 1, chunk]))
    labels = np.repeat(np.arange(classes), per_class)
    width = len(str((classes - 1) // siblings))
    trained = labels < (classes + 1) // 2
    return Dataset(
        "glyphs",
        Arrays(images[..., 0] if channels == 1 else images),
        labels,
        tuple(f"{at // siblings:0{width}d}{chr(ord('a') + at % siblings)}" for at in range(classes)),
        {"train": np.flatnonzero(trained), "test": np.flatnonzero(~trained)},
    )


def _characters(classes: int, siblings: int, difference: float, seed: int) -> Floats:
    """Return points [classes, POINTS, 2] from −1/2 to 1/2; the first classes do not depend on the number of classes."""
    families = -(-classes // siblings)
    drawn = np.random.default_rng([seed, 0]).random((families, 9 + 2 * POINTS + 2))
    # Each point is in another ninth of the image, so that no two coincide.
    ninth = drawn[:, :9].argsort(axis=1)[:, :POINTS]
    inside = 0.5 * drawn[:, 9:-2].reshape(-1, POINTS, 2) - 0.25
    spread = 0.25 * (np.stack([ninth // 3 - 1, ninth % 3 - 1], axis=2) + inside)
    points = np.repeat(spread, siblings, axis=0)[:classes]
    member = np.arange(classes)
    angle = 2 * np.pi * (drawn[member // siblings, -1] + member % siblings / siblings)
    # Not an end point: moving it along its segment changes little.
    corner = 1 + (drawn[member // siblings, -2] * (POINTS - 2)).astype(np.int64)
    points[member, corner] += difference * np.stack([np.cos(angle), np.sin(angle)], axis=1)
    return points.astype(np.float32)


def _draw(points: Floats, images: Bytes, rng: np.random.Generator) -> None:
    count, side, channels = len(points), images.shape[1], images.shape[3]
    # Draw for a full chunk, so that a shorter last chunk gets the same numbers.
    turn, zoom, thick = (2 * rng.random((3, TOGETHER), dtype=np.float32) - 1)[:, :count]
    shift = SHIFT * (2 * rng.random((TOGETHER, 1, 2), dtype=np.float32) - 1)[:count]
    ink, paper = 255 * rng.random((2, TOGETHER, 1, 1, channels), dtype=np.float32)[:, :count]
    # Ink and paper differ by at least 96 levels in every channel.
    paper = np.where(np.abs(ink - paper) < 96, (ink + 128) % 256, paper)
    sine, cosine = np.sin(TURN * turn), np.cos(TURN * turn)
    turned = np.stack([cosine, -sine, sine, cosine], axis=1).reshape(-1, 2, 2) * (1 + ZOOM * zoom)[:, None, None]
    cover = _cover(points @ turned + shift, side, 0.03 * (1 + 0.4 * thick))[..., None]
    grain = rng.integers(0, 25, (count, side, side, 1), dtype=np.uint8)
    images[:] = np.clip(paper + (ink - paper) * cover + grain - 12, 0, 255)


def _cover(points: Floats, side: int, thickness: Floats) -> Floats:
    """Return the share of each pixel that the line covers, [count, side, side], by the distance to the line."""
    at = (np.arange(side, dtype=np.float32) + 0.5) / side - 0.5
    nearest = np.full((len(points), side, side), np.inf, dtype=np.float32)
    for segment in range(POINTS - 1):
        start, way = points[:, segment], points[:, segment + 1] - points[:, segment]
        length = np.maximum(np.hypot(way[:, 0], way[:, 1]), 1e-6)
        # Distances along and across the segment; both are sums of a row term and a column term.
        unit, middle = way / length[:, None], start + way / 2
        rows, columns = at - middle[:, :1], at - middle[:, 1:]
        along = (rows * unit[:, :1])[:, :, None] + (columns * unit[:, 1:])[:, None, :]
        across = (rows * -unit[:, 1:])[:, :, None] + (columns * unit[:, :1])[:, None, :]
        np.abs(along, out=along)
        along -= length[:, None, None] / 2
        np.maximum(along, 0, out=along)
        along *= along
        across *= across
        along += across
        np.minimum(nearest, along, out=nearest)
    np.sqrt(nearest, out=nearest)
    cover: Floats = np.clip((thickness[:, None, None] - nearest) * side + 0.5, 0, 1)
    return cover
