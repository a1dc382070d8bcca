"""Views of images: which part is shown, how large, and whether it is mirrored.

A view is four steps with whole numbers: crop the image, resize the crop, cut a window out of it, and optionally mirror
it. A :class:`Plan` holds these numbers for a batch; :func:`window` executes it on a CPU and ``gpu`` on a GPU. Rotation,
color changes and erasing are in ``nearfar.data.transforms.effects``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import interpolate

from nearfar.data.transforms.effects import ERASED_AREA, ERASED_RATIO, Effects, IntArray
from nearfar.utils.validation import number, one_of, positive, whole

CROPS = ("random", "center", "random_resized", "none")
ASPECTS = ("keep", "squash", "shrink")
LIMITS = {"color": 1.0, "grey": 1.0, "erase": 1.0, "rotate": 180.0}  # largest value of each effect
TRIES = 10  # random boxes per image, of which the first that fits is used

Limits = tuple[float, float]
Draw = Callable[[str], np.random.Generator]


@dataclass(frozen=True)
class Plan:
    """What to do with each of b images."""

    crops: IntArray  # top, left, height and width of the part that is cut out of the image, [b, 4]
    resized: IntArray  # height and width the crop is resized to, [b, 2]
    corners: IntArray  # top and left of the window in the resized crop, [b, 2]
    flips: NDArray[np.bool_]  # whether the window is mirrored, [b]
    size: tuple[int, int]  # height and width of the windows

    @property
    def boxes(self) -> NDArray[np.float64]:
        """Top, left, height and width of the windows in pixels of the images, [b, 4]."""
        scale = self.crops[:, 2:] / self.resized
        return np.concatenate([self.crops[:, :2] + self.corners * scale, self.size * scale], axis=1)

    def touched(self) -> IntArray:
        """Return top, left, height and width of the pixels that contribute to the windows, [b, 4]."""
        scale = self.crops[:, 2:] / self.resized
        reach = np.maximum(scale, 1.0)  # of the triangle filter, see gpu._weights
        first = np.floor((self.corners + 0.5) * scale - reach - 0.5).astype(np.int64) + 1
        last = np.ceil((self.corners + np.array(self.size) - 0.5) * scale + reach - 0.5).astype(np.int64) - 1
        first, last = np.maximum(first, 0), np.minimum(last, self.crops[:, 2:] - 1)
        return np.concatenate([self.crops[:, :2] + first, last - first + 1], axis=1)


@dataclass(frozen=True, kw_only=True)
class View:
    """How images are cropped, resized and augmented before a network reads them.

    The effects ``color``, ``grey``, ``erase`` and ``rotate`` are off if None. Each has its own random numbers: turning
    one on does not change the crops, the flips or the other effects.

    Args:
        size: Size of the network's input: one number or (height, width).
        crop: "random": a window anywhere in the resized image; "center": its center; "random_resized": a box of random
            area and shape, resized to ``size``; "none": the whole image, squashed to ``size``.
        resize: Size before "random" and "center": the shorter side (aspect "keep") or both sides ("squash"). None
            leaves images as they are; only those smaller than the window are enlarged to fit it.
        aspect: "keep" or "squash", see ``resize``; or "shrink": like "keep" for images that are larger than
            ``resize``, and like ``resize=None`` for others.
        scale: Smallest and largest share of the image's area, for "random_resized".
        ratio: Smallest and largest width / height, for "random_resized".
        flip: Mirror images at random, with probability 1/2.
        color: Up to 1. Brightness, contrast and saturation are multiplied, in this order, by random factors from
            1 − ``color`` to 1 + ``color``. Grayscale images have no saturation.
        grey: Share of images that become gray.
        erase: Share of images in which a random rectangle is erased: 2 to 33 % of the window, 0.3 to 3.3 times as wide
            as high. It is set to zero after the normalization, which is the mean color; without one, to black.
        rotate: Largest angle in degrees, in either direction, by which windows are rotated about their center. What
            comes in from outside is the mirror image of the window.

    Differences:
        Colors change as in torchvision's ColorJitter, but always in the same order, and the hue does not change. Random
        erasing draws the shape on a logarithmic scale, as random crops do; the paper draws it uniformly and fills with
        random values by default.

    Reference:
        Zhong et al., "Random Erasing Data Augmentation", AAAI 2020.

    Example:
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
    color: float | None = None
    grey: float | None = None
    erase: float | None = None
    rotate: float | None = None

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
        for name, most in LIMITS.items():
            if getattr(self, name) is not None:
                number(name, getattr(self, name), low=0.0, high=most, open_low=True)

    @property
    def window(self) -> tuple[int, int]:
        """Height and width of the network's input."""
        return self.size if isinstance(self.size, tuple) else (self.size, self.size)

    @property
    def random(self) -> bool:
        """Whether crops or flips are random."""
        return self.flip or self.crop in ("random", "random_resized")

    def plan(self, sizes: NDArray[Any], rng: np.random.Generator | None = None) -> Plan:
        """Return the crops and flips of a batch.

        Args:
            sizes: Heights and widths of the images, [b, 2].
            rng: Random generator; only needed if crops or flips are random.
        """
        sizes = np.asarray(sizes, dtype=np.int64)
        if sizes.ndim != 2 or sizes.shape[1] != 2 or (sizes < 1).any():
            raise ValueError(f"sizes has shape {sizes.shape}; needed is [b, 2] of numbers ≥ 1")
        if rng is None and self.random:
            raise ValueError("rng is None; a view with a random crop or flip needs a numpy.random.Generator")
        window = np.array(self.window)
        crops = np.concatenate([np.zeros_like(sizes), sizes], axis=1)
        resized = np.broadcast_to(window, sizes.shape)
        corners = np.zeros_like(sizes)
        if self.crop == "random_resized":
            assert rng is not None
            crops = random_crops(sizes, self.scale, self.ratio, rng)
        elif self.crop != "none":
            resized = self._resized(sizes)
            room = resized - window
            if self.crop == "random":
                assert rng is not None
                corners = rng.integers(0, room + 1)
            else:
                corners = np.rint(room / 2).astype(np.int64)
        flips = rng.random(len(sizes)) < 0.5 if self.flip and rng is not None else np.zeros(len(sizes), dtype=bool)
        return Plan(crops, resized, corners, flips, self.window)

    def effects(self, count: int, draw: Draw, *, rank: int = 0, ranks: int = 1) -> Effects | None:
        """Return the effects on the windows of a batch, or None if all effects are off.

        Random numbers are drawn for the shares of all ranks, one after the other, so that those of an image do not
        depend on the number of ranks.

        Args:
            count: Images in this rank's share of the batch.
            draw: Returns the generator of an effect by its name: "color", "grey", "erase" or "rotate".
            rank: Which share of the batch this is.
            ranks: Number of shares, all of the same size.

        Example:
            >>> view = View(grey=0.5)
            >>> view.effects(4, lambda name: np.random.default_rng(0)).greys.tolist()
            [False, True, True, True]
        """
        if all(getattr(self, name) is None for name in LIMITS):
            return None
        every, share = count * ranks, slice(rank * count, (rank + 1) * count)
        angles, factors, greys, erased = None, None, None, None
        if self.rotate is not None:
            angles = draw("rotate").uniform(-self.rotate, self.rotate, every)[share]
        if self.color is not None:
            factors = draw("color").uniform(1 - self.color, 1 + self.color, (every, 3))[share]
        if self.grey is not None:
            greys = draw("grey").random(every)[share] < self.grey
        if self.erase is not None:
            rng = draw("erase")
            chosen = rng.random(every) < self.erase
            boxes, fits = random_boxes(np.tile(np.array(self.window), (every, 1)), ERASED_AREA, ERASED_RATIO, rng)
            erased = np.where((chosen & fits)[:, None], boxes, 0)[share]
        return Effects(angles, factors, greys, erased)

    def _resized(self, sizes: IntArray) -> IntArray:
        """Return the sizes of the images before the window is cut out of them, [b, 2]."""
        if self.resize is not None:
            if self.aspect == "squash":
                return np.full_like(sizes, self.resize)
            shorter = sizes.min(axis=1, keepdims=True)
            kept: IntArray = self.resize * sizes // shorter
            if self.aspect == "keep":
                return kept
            sizes = np.where(shorter > self.resize, kept, sizes)
        # Unchanged, or enlarged as little as necessary.
        growth = np.maximum((np.array(self.window) / sizes).max(axis=1, keepdims=True), 1.0)
        grown: IntArray = np.maximum(np.rint(sizes * growth).astype(np.int64), self.window)
        return grown


def random_crops(sizes: IntArray, scale: Limits, ratio: Limits, rng: np.random.Generator) -> IntArray:
    """Return boxes of random area and shape, [b, 4]: top, left, height and width.

    If no random box fits into an image, its box is the largest centered one with an allowed shape.
    """
    boxes, fits = random_boxes(sizes, scale, ratio, rng)
    limits = np.stack([sizes[:, 1] / ratio[0], sizes[:, 0] * ratio[1]], axis=1)
    center = np.rint(np.minimum(sizes, limits)).astype(np.int64).clip(min=1)
    return np.where(fits[:, None], boxes, np.concatenate([(sizes - center) // 2, center], axis=1))


def random_boxes(
    sizes: IntArray, scale: Limits, ratio: Limits, rng: np.random.Generator
) -> tuple[IntArray, NDArray[np.bool_]]:
    """Return boxes of random area and, on a logarithmic scale, random shape, and whether each fits into its image.

    Several boxes are drawn for each image at once; the first that fits is used. Arguments as for :func:`random_crops`.
    """
    height, width = sizes[:, 0, None], sizes[:, 1, None]
    area = height * width * rng.uniform(*scale, size=(len(sizes), TRIES))
    shape = np.exp(rng.uniform(math.log(ratio[0]), math.log(ratio[1]), size=area.shape))
    tall = np.rint(np.sqrt(area / shape)).astype(np.int64)
    wide = np.rint(np.sqrt(area * shape)).astype(np.int64)
    fits = (tall > 0) & (tall <= height) & (wide > 0) & (wide <= width)
    rows, first = np.arange(len(sizes)), fits.argmax(axis=1)
    box = np.stack([tall[rows, first], wide[rows, first]], axis=1)
    corner = rng.integers(0, np.maximum(sizes - box, 0) + 1)
    return np.concatenate([corner, box], axis=1), fits[rows, first]


LARGE = 1 << 24  # pixels of a resized crop above which only the window is computed

Pixels = NDArray[np.uint8]


def window(image: Pixels, plan: Plan, i: int) -> Pixels:
    """Return the window of one image, [*size, channels]; a view of the image if it is not resized."""
    top, left, height, width = plan.crops[i].tolist()
    crop = image[top : top + height, left : left + width]
    tall, wide = plan.resized[i].tolist()
    resizes = (tall, wide) != (height, width)
    if resizes and tall * wide > LARGE:
        shown = _resize_window(crop, plan.boxes[i] - [top, left, 0, 0], plan.size)
    else:
        crop = _resize(crop, tall, wide) if resizes else crop
        top, left = plan.corners[i].tolist()
        shown = crop[top : top + plan.size[0], left : left + plan.size[1]]
    return shown[:, ::-1] if plan.flips[i] else shown


def planar(shown: Pixels) -> Pixels:
    """Copy an image [h, w, channels] to [channels, h, w]."""
    return np.array(shown.transpose(2, 0, 1), order="C")


def _resize(crop: Pixels, height: int, width: int) -> Pixels:
    # Copied, as PyTorch does not support read-only memory. Interpolation is fastest with channels last, which PyTorch
    # recognizes by the strides: the batch axis must be added in PyTorch, as NumPy gives a new axis other strides.
    pixels = torch.from_numpy(np.array(crop, order="C")).unsqueeze(0).permute(0, 3, 1, 2)
    resized = interpolate(pixels, size=(height, width), mode="bilinear", antialias=True)
    return resized[0].permute(1, 2, 0).numpy()


def _resize_window(crop: Pixels, box: NDArray[np.float64], size: tuple[int, int]) -> Pixels:
    """Resize a box (top, left, height, width) of a crop to ``size``."""
    from PIL import Image

    height, width, channels = crop.shape
    top, left, tall, wide = box.tolist()
    image = Image.fromarray(crop[:, :, 0] if channels == 1 else crop)
    edges = (left, top, min(left + wide, width), min(top + tall, height))  # rounding must not go beyond the edge
    shown = image.resize((size[1], size[0]), Image.Resampling.BILINEAR, box=edges)
    return np.asarray(shown).reshape(*size, channels)
