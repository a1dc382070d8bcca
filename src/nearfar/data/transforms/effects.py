"""Rotation, color changes and erasing of windows.

Random numbers are drawn on the host for a whole batch and sent to the device with the rest of its table. There each
effect is a few kernels for all images at once, without synchronization. On a CPU effects are applied to one image at a
time with NumPy: one image is too little work for PyTorch's threads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import grid_sample

ROWS = 10  # of the table of numbers, see Effects.table
LUMA = (0.299, 0.587, 0.114)  # weights of red, green and blue in gray: ITU-R BT.601, as in Pillow
ERASED_AREA, ERASED_RATIO = (0.02, 0.33), (0.3, 3.3)  # share of the window, width / height

Floats = NDArray[np.float64]
IntArray = NDArray[np.int64]


@dataclass(frozen=True)
class Effects:
    """Effects on each of b windows, in the order in which they are applied; None is no effect."""

    angles: Floats | None = None  # counterclockwise rotation in degrees, [b]
    factors: Floats | None = None  # factors of brightness, contrast and saturation, [b, 3]
    greys: NDArray[np.bool_] | None = None  # whether the window becomes gray, [b]
    # Top, left, height and width of the erased rectangle, [b, 4]; zero height if there is none.
    erased: IntArray | None = None

    def table(self, count: int) -> Floats:
        """Return all numbers as one table [ROWS, count]: cosine, sine, three factors, gray, erased rectangle."""
        table = np.zeros((ROWS, count))
        if self.angles is not None:
            table[:2] = np.cos(np.deg2rad(self.angles)), np.sin(np.deg2rad(self.angles))
        if self.factors is not None:
            table[2:5] = self.factors.T
        if self.greys is not None:
            table[5] = self.greys
        if self.erased is not None:
            table[6:] = self.erased.T
        return table

    def recolor(self, pixels: Tensor, table: Tensor, *, reverse: bool = False) -> Tensor:
        """Rotate windows [b, channels, h, w] and change their colors; the table is on their device, as float32."""
        with torch.no_grad():
            if self.angles is not None:
                pixels = _rotate(pixels, table[0], table[1])
            if self.factors is not None:
                pixels = _jitter(pixels, table[2:5, :, None, None, None], reverse)
            if self.greys is not None and pixels.shape[1] == 3:
                pixels = torch.where(table[5, :, None, None, None] > 0, _grey(pixels, reverse), pixels)
        return pixels

    def erase(self, images: Tensor, table: Tensor) -> Tensor:
        """Set the erased rectangles of normalized images to zero, in place."""
        if self.erased is not None:
            top, left, height, width = table[6:, :, None]
            down, across = (torch.arange(side, device=images.device) for side in images.shape[2:])
            rows, columns = (down >= top) & (down < top + height), (across >= left) & (across < left + width)
            images.masked_fill_(rows[:, None, :, None] & columns[:, None, None, :], 0)
        return images

    def recolor_one(self, window: NDArray[Any], i: int, *, reverse: bool = False) -> NDArray[Any]:
        """Rotate window ``i`` [channels, h, w] on the CPU and change its colors; itself if it has no effect."""
        if self.angles is None and self.factors is None and (self.greys is None or not self.greys[i]):
            return window
        pixels: NDArray[np.float32] = window.astype(np.float32)[None]
        if self.angles is not None:
            pixels = _rotate_one(pixels, self.angles[i])
        if self.factors is not None:
            factors = self.factors[i].astype(np.float32)[:, None, None, None, None]
            pixels = _jitter(pixels, factors, reverse)
        if self.greys is not None and self.greys[i]:
            pixels = np.broadcast_to(_grey(pixels, reverse), pixels.shape)
        return pixels.reshape(window.shape)

    def erase_one(self, image: NDArray[Any], i: int) -> None:
        """Set the erased rectangle of one image on the CPU to zero, in place."""
        if self.erased is not None:
            top, left, height, width = self.erased[i].tolist()
            image[:, top : top + height, left : left + width] = 0


def _rotate(pixels: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotate about the center, bilinear; outside of the window is its mirror image."""
    height, width = pixels.shape[2:]
    down = torch.arange(height, device=pixels.device, dtype=torch.float32)[:, None] - (height - 1) / 2
    across = torch.arange(width, device=pixels.device, dtype=torch.float32) - (width - 1) / 2
    cosine, sine = cosine[:, None, None], sine[:, None, None]
    # Source of each new pixel; -1 and 1 are the outer edges of the window.
    x, y = cosine * across - sine * down, sine * across + cosine * down
    return _sample(pixels, torch.stack([x * (2 / width), y * (2 / height)], dim=-1))


def _rotate_one(pixels: NDArray[np.float32], angle: float) -> NDArray[np.float32]:
    """Rotate one window [1, channels, h, w]."""
    height, width = pixels.shape[2:]
    down, across = np.arange(height)[:, None] - (height - 1) / 2, np.arange(width) - (width - 1) / 2
    cosine, sine = np.cos(np.deg2rad(angle)), np.sin(np.deg2rad(angle))
    x, y = cosine * across - sine * down, sine * across + cosine * down
    places = np.stack([x * (2 / width), y * (2 / height)], axis=-1).astype(np.float32)
    rotated: NDArray[np.float32] = _sample(torch.from_numpy(pixels), torch.from_numpy(places[None])).numpy()
    return rotated


def _sample(pixels: Tensor, places: Tensor) -> Tensor:
    return grid_sample(pixels, places, mode="bilinear", padding_mode="reflection", align_corners=False)


# Tensors or arrays [b, channels, h, w], and what can be multiplied with them.
Pixels = TypeVar("Pixels", Tensor, NDArray[np.float32])


def _jitter(pixels: Pixels, factors: Pixels, reverse: bool) -> Pixels:
    """Change brightness, contrast and saturation by ``factors`` [3, b, 1, 1, 1]."""
    brightness, contrast, saturation = factors
    pixels = _clip(pixels * brightness)
    mean = _grey(pixels, reverse).sum(3).sum(2)[:, :, None, None] / (pixels.shape[2] * pixels.shape[3])
    pixels = _scale_from(mean, pixels, contrast)
    # Grayscale images have no saturation.
    return pixels if pixels.shape[1] == 1 else _scale_from(_grey(pixels, reverse), pixels, saturation)


def _scale_from(middle: Pixels, pixels: Pixels, factor: Pixels) -> Pixels:
    """Scale the distance from ``middle``, in place: new memory would cost a CPU more than the computation."""
    pixels -= middle
    pixels *= factor
    pixels += middle
    return _clip(pixels)


def _clip(pixels: Pixels) -> Pixels:
    """Clip to [0, 255] in place."""
    if isinstance(pixels, Tensor):
        return pixels.clamp_(0.0, 255.0)
    return np.clip(pixels, 0.0, 255.0, out=pixels)


def _grey(pixels: Pixels, reverse: bool) -> Pixels:
    """Return the gray value [b, 1, h, w]; grayscale pixels are returned as they are."""
    if pixels.shape[1] == 1:
        return pixels
    red, green, blue = (pixels[:, i, None] for i in ((2, 1, 0) if reverse else (0, 1, 2)))
    grey: Pixels = LUMA[0] * red
    grey += LUMA[1] * green
    grey += LUMA[2] * blue
    return grey
