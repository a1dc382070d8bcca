"""Plans carried out on a CPU, a picture at a time: cut, resize, cut, mirror.

Resizing is bilinear and antialiased: each new pixel is a mean of those under a triangle that reaches one pixel of the
coarser grid to either side. Pillow's ``resize(…, BILINEAR)`` does the same; they differ by a level of 255 at most. It
is slower, but leaves out what the window does not show: very long pictures go that way, or they would take gigabytes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import interpolate

from nearfar.data.transforms.view import Plan

LARGE = 1 << 24  # pixels of a resized piece from which on only the window is computed

Pixels = NDArray[np.uint8]


def render(pictures: Sequence[Pixels], plan: Plan) -> Tensor:
    """What a plan shows of pictures [height, width, channels]: uint8 [b, channels, *size].

    >>> from nearfar.data.transforms.view import View
    >>> picture = np.arange(24, dtype=np.uint8).reshape(4, 6, 1)
    >>> view = View(size=2, crop="center", resize=None, flip=False)
    >>> render([picture], view.plan(np.array([[4, 6]]))).tolist()
    [[[[8, 9], [14, 15]]]]
    """
    if len(pictures) != len(plan):
        raise ValueError(f"{len(pictures)} pictures and a plan for {len(plan)}")
    return torch.stack([torch.from_numpy(planar(window(picture, plan, i))) for i, picture in enumerate(pictures)])


def window(picture: Pixels, plan: Plan, i: int) -> Pixels:
    """What a plan shows of its picture i, [*size, channels]; where nothing is resized, a view of it."""
    top, left, height, width = plan.pieces[i].tolist()
    piece = picture[top : top + height, left : left + width]
    tall, wide = plan.resized[i].tolist()
    resizes = (tall, wide) != (height, width)
    if resizes and tall * wide > LARGE:
        shown = _resize_window(piece, plan.boxes[i] - [top, left, 0, 0], plan.size)
    else:
        piece = _resize(piece, tall, wide) if resizes else piece
        top, left = plan.corners[i].tolist()
        shown = piece[top : top + plan.size[0], left : left + plan.size[1]]
    return shown[:, ::-1] if plan.flips[i] else shown


def planar(shown: Pixels) -> Pixels:
    """[h, w, channels] as [channels, h, w], in memory of its own."""
    return np.array(shown.transpose(2, 0, 1), order="C")


def _resize(piece: Pixels, height: int, width: int) -> Pixels:
    # PyTorch has no tensors of memory that cannot be written to. It is fastest with the channels of a pixel next to
    # each other, and knows them by their strides: those that NumPy gives a new axis would deceive it.
    pixels = torch.from_numpy(np.array(piece, order="C")).unsqueeze(0).permute(0, 3, 1, 2)
    resized = interpolate(pixels, size=(height, width), mode="bilinear", antialias=True)
    return resized[0].permute(1, 2, 0).numpy()


def _resize_window(piece: Pixels, box: NDArray[np.float64], size: tuple[int, int]) -> Pixels:
    """What lies in a box (top, left, height, width) of a piece, resized to ``size``."""
    from PIL import Image

    height, width, channels = piece.shape
    top, left, tall, wide = box.tolist()
    image = Image.fromarray(piece[:, :, 0] if channels == 1 else piece)
    edges = (left, top, min(left + wide, width), min(top + tall, height))  # not beyond it by a rounding
    shown = image.resize((size[1], size[0]), Image.Resampling.BILINEAR, box=edges)
    return np.asarray(shown).reshape(*size, channels)
