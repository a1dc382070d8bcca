"""Executes plans on a CPU, one image at a time: crop, resize, cut the window, mirror.

Resizing is bilinear and antialiased: each new pixel is an average under a triangle that reaches one pixel of the
coarser grid to either side. Pillow's ``resize(…, BILINEAR)`` does the same, up to one level of 255. Pillow is slower
but computes only the window, so it is used for very long images, which would otherwise take gigabytes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import interpolate

from nearfar.data.transforms.view import Plan

LARGE = 1 << 24  # pixels of a resized crop above which only the window is computed

Pixels = NDArray[np.uint8]


def render(images: Sequence[Pixels], plan: Plan) -> Tensor:
    """Return the windows of a plan, uint8 [b, channels, *size].

    Args:
        images: Images [height, width, channels].
        plan: Plan of these images.

    Example:
        >>> from nearfar.data.transforms.view import View
        >>> image = np.arange(24, dtype=np.uint8).reshape(4, 6, 1)
        >>> view = View(size=2, crop="center", resize=None, flip=False)
        >>> render([image], view.plan(np.array([[4, 6]]))).tolist()
        [[[[8, 9], [14, 15]]]]
    """
    if len(images) != len(plan):
        raise ValueError(f"{len(images)} images and a plan for {len(plan)}")
    return torch.stack([torch.from_numpy(planar(window(image, plan, i))) for i, image in enumerate(images)])


def window(image: Pixels, plan: Plan, i: int) -> Pixels:
    """Return the window of one image, [*size, channels]; a view of the image if it is not resized.

    Args:
        image: Image [height, width, channels].
        plan: Plan of a batch.
        i: Position of the image in the batch.
    """
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
    """Copy an image [h, w, channels] to [channels, h, w].

    Args:
        shown: The image.
    """
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
