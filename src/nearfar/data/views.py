"""How a picture is looked at: which part of it, how large, and from which side.

Every view is four steps with whole numbers: cut a piece out of the picture, resize the piece, cut a window out of that,
and perhaps mirror it. Plans are made for a whole batch at once; ``nearfar.data.render`` carries them out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearfar.settings import number, one_of, positive, whole

CROPS = ("random", "center", "random_resized", "none")
ASPECTS = ("keep", "squash", "shrink")
TRIES = 10  # of a random piece to lie within the picture, before its middle is taken

Whole = NDArray[np.int64]


@dataclass(frozen=True)
class Plan:
    """What to do with each of b pictures.

    Parameters
        pieces   [b, 4], top, left, height and width of the piece that is cut out of the picture.
        resized  [b, 2], height and width it is resized to.
        corners  [b, 2], top and left of the window in the resized piece.
        flips    [b], whether the window is mirrored.
        size     height and width of the window, the same for all.
    """

    pieces: Whole
    resized: Whole
    corners: Whole
    flips: NDArray[np.bool_]
    size: tuple[int, int]

    def __len__(self) -> int:
        return len(self.flips)

    @property
    def boxes(self) -> NDArray[np.float64]:
        """[b, 4], top, left, height and width of what the windows show, in pixels of the pictures."""
        scale = self.pieces[:, 2:] / self.resized
        return np.concatenate([self.pieces[:, :2] + self.corners * scale, self.size * scale], axis=1)

    def touched(self) -> Whole:
        """[b, 4], top, left, height and width of the pixels that have any part in the windows."""
        scale = self.pieces[:, 2:] / self.resized
        reach = np.maximum(scale, 1.0)  # of the triangle filter, see render
        first = np.floor((self.corners + 0.5) * scale - reach - 0.5).astype(np.int64) + 1
        last = np.ceil((self.corners + np.array(self.size) - 0.5) * scale + reach - 0.5).astype(np.int64) - 1
        first, last = np.maximum(first, 0), np.minimum(last, self.pieces[:, 2:] - 1)
        return np.concatenate([self.pieces[:, :2] + first, last - first + 1], axis=1)


@dataclass(frozen=True, kw_only=True)
class View:
    """What becomes of a picture before a network sees it.

    Parameters
        size    of what the network sees, one number or (height, width).
        crop    "random": anywhere in the resized picture; "center": its middle; "random_resized": a piece of random
                area and shape, resized to ``size``; "none": the whole picture, squashed to ``size``.
        resize  before "random" and "center": the shorter side (aspect "keep") or both ("squash"). None leaves pictures
                as they are; only those too small for the window grow to fit it.
        aspect  "keep" or "squash", where ``resize`` is used; or "shrink": as "keep" for pictures that are larger, as
                without ``resize`` for others.
        scale   of "random_resized": smallest and largest share of the picture's area.
        ratio   of "random_resized": smallest and largest width / height.
        flip    mirror every other picture, at random.

    >>> view = View(size=224, crop="center", resize=256, flip=False)
    >>> view.plan(np.array([[512, 1024]])).boxes.tolist()
    [[32.0, 288.0, 448.0, 448.0]]
    """

    size: int | tuple[int, int] = 224
    crop: str = "random"
    resize: int | None = 256
    aspect: str = "keep"
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    flip: bool = True

    def __post_init__(self) -> None:
        one_of("crop", self.crop, CROPS)
        one_of("aspect", self.aspect, ASPECTS)
        for side in self.window:
            whole("size", side)
        if self.resize is not None and whole("resize", self.resize) < max(self.window) and self.crop in CROPS[:2]:
            raise ValueError(f"resize is {self.resize}; a window of size {self.size} needs at least {max(self.window)}")
        for name, (low, high) in (("scale", self.scale), ("ratio", self.ratio)):
            if positive(name, low) > number(name, high):
                raise ValueError(f"{name} is {(low, high)}; the first must not be larger than the second")
        number("scale", self.scale[1], high=1.0)

    @property
    def window(self) -> tuple[int, int]:
        """Height and width of what the network sees."""
        return self.size if isinstance(self.size, tuple) else (self.size, self.size)

    @property
    def random(self) -> bool:
        """Whether two plans for one picture can differ."""
        return self.flip or self.crop in ("random", "random_resized")

    def plan(self, sizes: NDArray[Any], rng: np.random.Generator | None = None) -> Plan:
        """A plan for pictures of these heights and widths, [b, 2]; a view with nothing random needs no generator."""
        sizes = np.asarray(sizes, dtype=np.int64)
        if sizes.ndim != 2 or sizes.shape[1] != 2 or (sizes < 1).any():
            raise ValueError(f"sizes has shape {sizes.shape}; needed is [b, 2] of numbers ≥ 1")
        if rng is None and self.random:
            raise ValueError("rng is None; a view with a random crop or flip needs a numpy.random.Generator")
        window = np.array(self.window)
        pieces = np.concatenate([np.zeros_like(sizes), sizes], axis=1)
        resized = np.broadcast_to(window, sizes.shape)
        corners = np.zeros_like(sizes)
        if self.crop == "random_resized":
            assert rng is not None
            pieces = _random_pieces(sizes, self.scale, self.ratio, rng)
        elif self.crop != "none":
            resized = self._resized(sizes)
            room = resized - window
            if self.crop == "random":
                assert rng is not None
                corners = rng.integers(0, room + 1)
            else:
                corners = np.rint(room / 2).astype(np.int64)
        flips = rng.random(len(sizes)) < 0.5 if self.flip and rng is not None else np.zeros(len(sizes), dtype=bool)
        return Plan(pieces, resized, corners, flips, self.window)

    def _resized(self, sizes: Whole) -> Whole:
        """[b, 2], how large whole pictures become before the window is cut out of them."""
        if self.resize is not None:
            if self.aspect == "squash":
                return np.full_like(sizes, self.resize)
            shorter = sizes.min(axis=1, keepdims=True)
            kept: Whole = self.resize * sizes // shorter
            if self.aspect == "keep":
                return kept
            sizes = np.where(shorter > self.resize, kept, sizes)
        # Exactly as they are, or as little larger as they have to be.
        growth = np.maximum((np.array(self.window) / sizes).max(axis=1, keepdims=True), 1.0)
        grown: Whole = np.maximum(np.rint(sizes * growth).astype(np.int64), self.window)
        return grown


def _random_pieces(
    sizes: Whole, scale: tuple[float, float], ratio: tuple[float, float], rng: np.random.Generator
) -> Whole:
    """[b, 4], pieces of random area and, on a logarithmic scale, random shape.

    Some tries for each picture are drawn together; the first that fits is taken. Where none does, it is the middle of
    the picture, as much of it as the limits of the shape allow.
    """
    height, width = sizes[:, 0, None], sizes[:, 1, None]
    area = height * width * rng.uniform(*scale, size=(len(sizes), TRIES))
    shape = np.exp(rng.uniform(math.log(ratio[0]), math.log(ratio[1]), size=area.shape))
    tall = np.rint(np.sqrt(area / shape)).astype(np.int64)
    wide = np.rint(np.sqrt(area * shape)).astype(np.int64)
    fits = (tall > 0) & (tall <= height) & (wide > 0) & (wide <= width)
    found, first = fits.any(axis=1, keepdims=True), fits.argmax(axis=1)
    each = np.arange(len(sizes))
    piece = np.stack([tall[each, first], wide[each, first]], axis=1)
    corner = rng.integers(0, np.maximum(sizes - piece, 0) + 1)
    limits = np.concatenate([width / ratio[0], height * ratio[1]], axis=1)
    middle = np.rint(np.minimum(sizes, limits)).astype(np.int64).clip(min=1)
    piece = np.where(found, piece, middle)
    corner = np.where(found, corner, (sizes - middle) // 2)
    return np.concatenate([corner, piece], axis=1)
