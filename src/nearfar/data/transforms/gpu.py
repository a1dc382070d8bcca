"""Executes plans on a device, one batch at a time and without synchronization with the host.

The pixels of a batch are anywhere in one flat tensor. Those that a plan needs are gathered into a padded block; then
resizing along each side is one batched matrix product with the weights of a triangle filter, zero for padding.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nearfar.data.transforms.view import Plan
from nearfar.utils.tensors import full_precision

LIMIT = 1 << 25  # values in a padded block; a larger batch is split


@dataclass(frozen=True)
class Layout:
    """Positions of the pixels of a batch in a flat tensor, and how they are resized."""

    # int64 [13, b]: position of the first pixel and distance of rows; height and width of the pixels that are needed;
    # the arguments of :func:`_weights` for each of the two sides; whether to mirror.
    table: NDArray[np.int64]
    channels: int
    size: tuple[int, int]  # height and width of the windows
    resizes: bool  # whether any image is resized

    @classmethod
    def of(
        cls, plan: Plan, touched: NDArray[np.int64], starts: NDArray[np.int64], pitch: NDArray[np.int64], channels: int
    ) -> Layout:
        """Create the layout of a plan; the touched pixels begin at ``starts``, in rows of distance ``pitch``."""
        before = touched[:, :2] - plan.crops[:, :2]
        columns = [starts, pitch, *touched[:, 2:].T]
        for side in (0, 1):
            columns += [before[:, side], plan.crops[:, 2 + side], plan.resized[:, side], plan.corners[:, side]]
        columns.append(plan.flips)
        table = np.stack(columns).astype(np.int64)
        return cls(table, channels, plan.size, bool((plan.crops[:, 2:] != plan.resized).any()))

    def render(self, packed: Tensor, table: Tensor, *, reverse: bool = False) -> Tensor:
        """Return the windows, float32 [b, channels, *size] from 0 to 255."""
        channels = torch.arange(self.channels, device=packed.device)
        if reverse:
            channels = channels.flip(0)
        if not self.resizes:
            return self._cut(packed, table, channels).float()
        with full_precision(packed.device), torch.no_grad():
            return torch.cat([self._resize(packed, table[:, rows], channels, *block) for rows, block in self._parts()])

    def _parts(self) -> Iterator[tuple[slice, tuple[int, int]]]:
        """Yield slices of the batch with the height and width of their padded blocks."""
        count = self.table.shape[1]
        values = int(self.table[2].max() * self.table[3].max()) * self.channels
        step = max(1, LIMIT // values)
        step = math.ceil(count / math.ceil(count / step))  # parts of equal size
        for start in range(0, count, step):
            rows = slice(start, min(start + step, count))
            yield rows, (int(self.table[2, rows].max()), int(self.table[3, rows].max()))

    def _cut(self, packed: Tensor, table: Tensor, channels: Tensor) -> Tensor:
        """Return windows that are not resized: uint8 [b, channels, *size]."""
        height, width = (torch.arange(side, device=packed.device) for side in self.size)
        across = torch.where(table[-1, :, None] > 0, self.size[1] - 1 - width, width)
        rows = table[0, :, None] + height * table[1, :, None]
        places = rows[:, None, :, None] + (across * self.channels)[:, None, None, :] + channels[:, None, None]
        return packed[places]

    def _resize(self, packed: Tensor, table: Tensor, channels: Tensor, height: int, width: int) -> Tensor:
        """Return windows of resized crops: float32 [b, channels, *size]."""
        start, pitch, heights, widths = table[:4, :, None]
        down = torch.arange(height, device=packed.device).minimum(heights - 1)  # padding repeats the last row
        across = torch.arange(width, device=packed.device).minimum(widths - 1)
        rows = (start + down * pitch)[:, :, None] + channels
        places = rows[..., None] + (across * self.channels)[:, None, None, :]
        block = packed[places].float()  # [b, height, channels, width]
        count, (out_height, out_width) = len(block), self.size
        # Channels are rows of the first product and columns of the second, so neither product needs a copy.
        narrow = block.flatten(1, 2) @ _weights(table[3], table[8:12], width, out_width, table[12]).mT
        low = _weights(table[2], table[4:8], height, out_height) @ narrow.view(count, height, -1)
        return low.view(count, out_height, self.channels, out_width).transpose(1, 2)


def _weights(extent: Tensor, side: Tensor, padded: int, size: int, flips: Tensor | None = None) -> Tensor:
    """Return the weight of each pixel in each new pixel along one side: [b, size, padded].

    ``extent`` [b] is the number of gathered pixels. ``side`` [4, b] holds the number of pixels of the crop before them,
    the length of the crop, its length after resizing, and the start of the window in the resized crop.
    """
    before, length, resized, corner = side
    place = torch.arange(size, device=extent.device)
    if flips is not None:
        place = torch.where(flips[:, None] > 0, size - 1 - place, place)
    scale = (length.float() / resized.float())[:, None]
    reach = scale.clamp(min=1.0)
    center = ((corner[:, None] + place).float() + 0.5) * scale - before[:, None] - 0.5
    pixel = torch.arange(padded, device=extent.device)
    weights: Tensor = (1 - ((pixel - center[..., None]) / reach[..., None]).abs()).clamp(min=0.0)
    weights *= pixel < extent[:, None, None]
    weights /= weights.sum(dim=2, keepdim=True)
    return weights
