"""What is done to a window beside cutting it out: it is turned, its colours change, a part of it is wiped out.

Numbers are drawn on the host for a whole batch and travel to the device with the rest of its table; there each effect
is a few kernels for all pictures at once, without a word to the host. On a CPU it is a picture at a time and NumPy: one
picture is too little for PyTorch's threads, which would wait for each other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import grid_sample

from nearfar.data.transforms.pieces import Whole, fitting_pieces

ROWS = 10  # of the table of numbers, see :meth:`Effects.table`
LUMA = (0.299, 0.587, 0.114)  # parts of red, green and blue in grey: ITU-R BT.601, as in Pillow
AREA, SHAPE = (0.02, 0.33), (0.3, 3.3)  # of what is wiped out: share of the window, width / height

Floats = NDArray[np.float64]
Draw = Callable[[str], np.random.Generator]


@dataclass(frozen=True)
class Effects:
    """What happens to each of b windows, in this order; None is nothing to any of them.

    Args:
        angles: [b], degrees by which it is turned, against the clock.
        factors: [b, 3], of brightness, contrast and saturation.
        greys: [b], whether it becomes grey.
        erased: [b, 4], top, left, height and width of what is wiped out; no height where nothing is.
    """

    angles: Floats | None = None
    factors: Floats | None = None
    greys: NDArray[np.bool_] | None = None
    erased: Whole | None = None

    def table(self, count: int) -> Floats:
        """[ROWS, count]: cosine and sine of the angle, factors, whether to make grey, what is wiped out."""
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

    def recoloured(self, pixels: Tensor, table: Tensor, *, reverse: bool = False) -> Tensor:
        """Windows [b, channels, h, w], float32 from 0 to 255, turned and in other colours.

        ``table`` is this one's as float32 on their device; ``reverse`` says that blue is the first channel.
        """
        with torch.no_grad():
            if self.angles is not None:
                pixels = _turned(pixels, table[0], table[1])
            if self.factors is not None:
                pixels = _in_other_colors(pixels, table[2:5, :, None, None, None], reverse)
            if self.greys is not None and pixels.shape[1] == 3:
                pixels = torch.where(table[5, :, None, None, None] > 0, _grey(pixels, reverse), pixels)
        return pixels

    def wiped(self, images: Tensor, table: Tensor) -> Tensor:
        """The same images [b, channels, h, w] with zeros where something is wiped out; they are changed in place."""
        if self.erased is not None:
            top, left, height, width = table[6:, :, None]
            down, across = (torch.arange(side, device=images.device) for side in images.shape[2:])
            rows, columns = (down >= top) & (down < top + height), (across >= left) & (across < left + width)
            images.masked_fill_(rows[:, None, :, None] & columns[:, None, None, :], 0)
        return images

    def recoloured_one(self, window: NDArray[Any], i: int, *, reverse: bool = False) -> NDArray[Any]:
        """Window i, uint8 [channels, h, w], on the host: float32, or as it is where nothing happens to it."""
        if self.angles is None and self.factors is None and (self.greys is None or not self.greys[i]):
            return window
        pixels: NDArray[np.float32] = window.astype(np.float32)[None]
        if self.angles is not None:
            pixels = _turned_one(pixels, self.angles[i])
        if self.factors is not None:
            factors = self.factors[i].astype(np.float32)[:, None, None, None, None]
            pixels = _in_other_colors(pixels, factors, reverse)
        if self.greys is not None and self.greys[i]:
            pixels = np.broadcast_to(_grey(pixels, reverse), pixels.shape)
        return pixels.reshape(window.shape)

    def wipe_one(self, image: NDArray[Any], i: int) -> None:
        """The same for image i, [channels, h, w], on the host."""
        if self.erased is not None:
            top, left, height, width = self.erased[i].tolist()
            image[:, top : top + height, left : left + width] = 0


def draw_effects(
    draw: Draw,
    count: int,
    size: tuple[int, int],
    *,
    color: float | None,
    grey: float | None,
    erase: float | None,
    rotate: float | None,
    rank: int = 0,
    ranks: int = 1,
) -> Effects | None:
    """Effects for ``count`` windows of a size; the settings are those of a view, None where all of them are.

    ``draw`` gives the random numbers of an effect by its name. They are drawn for the shares of all ranks, one after
    the other, so that a picture's do not depend on how many ranks there are.
    """
    if color is None and grey is None and erase is None and rotate is None:
        return None
    every, own = count * ranks, slice(rank * count, (rank + 1) * count)
    angles, factors, greys, erased = None, None, None, None
    if rotate is not None:
        angles = draw("rotate").uniform(-rotate, rotate, every)[own]
    if color is not None:
        factors = draw("color").uniform(1 - color, 1 + color, (every, 3))[own]
    if grey is not None:
        greys = draw("grey").random(every)[own] < grey
    if erase is not None:
        rng = draw("erase")
        chosen = rng.random(every) < erase
        pieces, found = fitting_pieces(np.tile(np.array(size), (every, 1)), AREA, SHAPE, rng)
        erased = np.where((chosen & found)[:, None], pieces, 0)[own]
    return Effects(angles, factors, greys, erased)


def _turned(pixels: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Turned about the middle, bilinear; what lies outside the window is its mirror image."""
    height, width = pixels.shape[2:]
    down = torch.arange(height, device=pixels.device, dtype=torch.float32)[:, None] - (height - 1) / 2
    across = torch.arange(width, device=pixels.device, dtype=torch.float32) - (width - 1) / 2
    cosine, sine = cosine[:, None, None], sine[:, None, None]
    # Where each new pixel comes from; -1 and 1 are the outer edges of the window.
    x, y = cosine * across - sine * down, sine * across + cosine * down
    return _looked_up(pixels, torch.stack([x * (2 / width), y * (2 / height)], dim=-1))


def _turned_one(pixels: NDArray[np.float32], angle: float) -> NDArray[np.float32]:
    """The same for one window, [1, channels, h, w]."""
    height, width = pixels.shape[2:]
    down, across = np.arange(height)[:, None] - (height - 1) / 2, np.arange(width) - (width - 1) / 2
    cosine, sine = np.cos(np.deg2rad(angle)), np.sin(np.deg2rad(angle))
    x, y = cosine * across - sine * down, sine * across + cosine * down
    places = np.stack([x * (2 / width), y * (2 / height)], axis=-1).astype(np.float32)
    found: NDArray[np.float32] = _looked_up(torch.from_numpy(pixels), torch.from_numpy(places[None])).numpy()
    return found


def _looked_up(pixels: Tensor, places: Tensor) -> Tensor:
    return grid_sample(pixels, places, mode="bilinear", padding_mode="reflection", align_corners=False)


# Of tensors and of arrays alike, [b, channels, h, w] and what can be multiplied with that.
Pixels = TypeVar("Pixels", Tensor, NDArray[np.float32])


def _in_other_colors(pixels: Pixels, factors: Pixels, reverse: bool) -> Pixels:
    """Brighter or darker, nearer to the mean or farther from it, paler or more colourful: factors [3, b, 1, 1, 1]."""
    brightness, contrast, saturation = factors
    pixels = _clip(pixels * brightness)
    mean = _grey(pixels, reverse).sum(3).sum(2)[:, :, None, None] / (pixels.shape[2] * pixels.shape[3])
    pixels = _away_from(mean, pixels, contrast)
    # Grey has no saturation.
    return pixels if pixels.shape[1] == 1 else _away_from(_grey(pixels, reverse), pixels, saturation)


def _away_from(middle: Pixels, pixels: Pixels, factor: Pixels) -> Pixels:
    """So many times as far away, in place: new memory would cost a CPU more than the rest."""
    pixels -= middle
    pixels *= factor
    pixels += middle
    return _clip(pixels)


def _clip(pixels: Pixels) -> Pixels:
    """In place."""
    if isinstance(pixels, Tensor):
        return pixels.clamp_(0.0, 255.0)
    return np.clip(pixels, 0.0, 255.0, out=pixels)


def _grey(pixels: Pixels, reverse: bool) -> Pixels:
    """[b, 1, h, w]; of one channel, the pixels themselves."""
    if pixels.shape[1] == 1:
        return pixels
    red, green, blue = (pixels[:, i, None] for i in ((2, 1, 0) if reverse else (0, 1, 2)))
    grey: Pixels = LUMA[0] * red
    grey += LUMA[1] * green
    grey += LUMA[2] * blue
    return grey
