"""Triton kernels of depthwise convolutions of channels-last maps, with shift and ReLU6 before and after.

The forward pass reads each input once and writes each output once; the backward pass is one kernel for the input and
one for the weights. Sums are float32 for every type of map.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from nearfar.utils.kernels import jit, processors

try:
    import triton.language as tl
except ImportError:  # this module can be read without it, not run
    tl = None

TILE = 8  # side of the square of pixels that a program computes at once
CHANNELS = 32  # that a program computes at once
GROUP = 8  # neighbors in a row that share what they read
WARPS = 2
KERNELS = (3, 5)  # sides
BUSY = 16  # programs per processor that keep a GPU busy

SIDES = ("height", "width", "rows", "columns", "top", "left", "tiles")  # not worth a kernel for each size

jit_sides = partial(jit, one_kernel_for=SIDES)


@jit_sides
def _place(height, width, channels, TILE: tl.constexpr, GROUP: tl.constexpr, CHANNELS: tl.constexpr):
    """The image, rows and first columns of the groups of a program, [groups], and its channels."""
    blocks = tl.cdiv(channels, CHANNELS)
    channel = tl.program_id(0) % blocks * CHANNELS + tl.arange(0, CHANNELS)
    image, row, column = _groups(tl.program_id(0) // blocks, height, width, TILE, GROUP)
    return image, row, column, channel


@jit_sides
def _groups(tile, height, width, TILE: tl.constexpr, GROUP: tl.constexpr):
    """The image, rows and first columns of the groups of a tile, [groups]."""
    across, down = tl.cdiv(width, TILE), tl.cdiv(height, TILE)
    group = tl.arange(0, TILE * TILE // GROUP)
    row = tile // across % down * TILE + group // (TILE // GROUP)
    column = tile % across * TILE + group % (TILE // GROUP) * GROUP
    return (tile // (across * down)).to(tl.int64), row, column


@jit_sides
def _pixels(maps, image, row, column, height, width, channels, channel, outside):
    """The values of a map at some pixels, [pixels, channels], in float32."""
    inside = ((row >= 0) & (row < height) & (column >= 0) & (column < width))[:, None] & (channel < channels)[None, :]
    start = maps + image * height * width * channels
    return tl.load(start + (row * width + column)[:, None] * channels + channel[None, :], inside, outside).to(
        tl.float32
    )


@jit_sides
def _clamped(x, image, row, column, height, width, channels, channel, low):
    """relu6(x + shift) − shift, where ``low`` is −shift; in the padding also −shift."""
    values = _pixels(x, image, row, column, height, width, channels, channel, -1e30)
    return _limited(values, low[None, :], (low + 6.0)[None, :])


@jit_sides
def _limited(values, low, high):
    """The values between two bounds; NaN stays NaN, so that a training that diverges is noticed."""
    values = tl.maximum(values, low, propagate_nan=tl.PropagateNan.ALL)
    return tl.minimum(values, high, propagate_nan=tl.PropagateNan.ALL)


@jit_sides
def _store(maps, values, image, row, column, height, width, channels, channel):
    inside = ((row < height) & (column < width))[:, None] & (channel < channels)[None, :]
    address = image * height * width * channels + (row * width + column)[:, None] * channels + channel[None, :]
    tl.store(maps + address, values.to(maps.dtype.element_ty), inside)


# mypy: disable-error-code="var-annotated, assignment"
@jit_sides
def _forward(
    x, weight, before, after, y, height, width, channels, rows, columns, top, left,
    K: tl.constexpr, S: tl.constexpr, TILE: tl.constexpr, GROUP: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    image, row, column, channel = _place(rows, columns, channels, TILE, GROUP, CHANNELS)
    there = channel < channels
    shift = tl.load(before + channel, there, 0.0)
    total = ()
    for _ in tl.static_range(GROUP):
        total += (tl.zeros([TILE * TILE // GROUP, CHANNELS], dtype=tl.float32),)
    every = tl.zeros([CHANNELS], dtype=tl.float32)  # the sum of the weights
    for down in range(K):
        factors = ()
        for right in tl.static_range(K):
            factors += (tl.load(weight + (down * K + right) * channels + channel, there, 0.0),)
            every += factors[right]
        for beside in tl.static_range(S * (GROUP - 1) + K):
            # A pixel that several results of the group use.
            seen = _clamped(
                x, image, row * S - top + down, column * S - left + beside, height, width, channels, channel, -shift
            )
            sums = ()
            for member in tl.static_range(GROUP):
                if beside >= S * member and beside < S * member + K:
                    sums += (total[member] + seen * factors[beside - S * member][None, :],)
                else:
                    sums += (total[member],)
            total = sums
    rest = tl.load(after + channel, there, 0.0) + shift * every
    for member in tl.static_range(GROUP):
        out = _limited(total[member] + rest[None, :], 0.0, 6.0)
        _store(y, out, image, row, column + member, rows, columns, channels, channel)


@jit_sides
def _backward_input(
    gradient, weight, x, before, out, height, width, channels, rows, columns, top, left,
    K: tl.constexpr, S: tl.constexpr, TILE: tl.constexpr, GROUP: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    # All pixels of a program have the same rest by the stride, so they use the same weights.
    rest_row, rest_column = tl.program_id(1) // S, tl.program_id(1) % S
    image, row, column, channel = _place(tl.cdiv(height, S), tl.cdiv(width, S), channels, TILE, 1, CHANNELS)
    there = channel < channels
    total = tl.zeros([TILE * TILE, CHANNELS], dtype=tl.float32)
    for down in range(K):
        below = rest_row + top - down + K * S  # not negative
        if below % S == 0:
            for right in tl.static_range(K):
                beside = rest_column + left - right + K * S
                if beside % S == 0:
                    values = _pixels(
                        gradient, image, row + below // S - K, column + beside // S - K, rows, columns, channels,
                        channel, 0.0,
                    )  # fmt: skip
                    total += values * tl.load(weight + (down * K + right) * channels + channel, there, 0.0)[None, :]
    row, column = row * S + rest_row, column * S + rest_column
    values = _pixels(x, image, row, column, height, width, channels, channel, 0.0)
    values += tl.load(before + channel, there, 0.0)[None, :]
    total = tl.where((values > 0.0) & (values < 6.0), total, 0.0)
    _store(out, total, image, row, column, height, width, channels, channel)


@jit_sides
def _backward_weight(
    gradient, x, before, out, height, width, channels, rows, columns, top, left, tiles,
    K: tl.constexpr, S: tl.constexpr, TILE: tl.constexpr, GROUP: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    # One row of the weights, for every parts-th tile of pixels; each weight has a sum of its own.
    down, part, parts = tl.program_id(1), tl.program_id(2), tl.num_programs(2)
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    there = channel < channels
    shift = tl.load(before + channel, there, 0.0)
    total = ()
    for _ in tl.static_range(K):
        total += (tl.zeros([TILE * TILE // GROUP, CHANNELS], dtype=tl.float32),)
    every = tl.zeros([TILE * TILE // GROUP, CHANNELS], dtype=tl.float32)  # the sum of the gradient
    for tile in range(part, tiles, parts):
        image, row, column = _groups(tile, rows, columns, TILE, GROUP)
        given = ()
        for member in tl.static_range(GROUP):
            given += (_pixels(gradient, image, row, column + member, rows, columns, channels, channel, 0.0),)
            every += given[member]
        for beside in tl.static_range(S * (GROUP - 1) + K):
            seen = _clamped(
                x, image, row * S - top + down, column * S - left + beside, height, width, channels, channel, -shift
            )
            sums = ()
            for right in tl.static_range(K):
                part_of = total[right]
                for member in tl.static_range(GROUP):
                    if beside == S * member + right:
                        part_of += seen * given[member]
                sums += (part_of,)
            total = sums
    rest = shift * tl.sum(every, 0)
    for right in tl.static_range(K):
        address = out + ((part * K + down) * K + right) * channels + channel
        tl.store(address, tl.sum(total[right], 0) + rest, there)


def forward(
    x: Tensor, weight: Tensor, before: Tensor, after: Tensor, stride: int, top: int, left: int,
    rows: int, columns: int,
) -> Tensor:  # fmt: skip
    """Convolve each channel: relu6(convolution of relu6(x + before) + after)."""
    n, channels, height, width = x.shape
    y = torch.empty((n, channels, rows, columns), dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
    _forward[(_blocks(channels) * n * _tiles(rows, columns),)](
        x, weight, before, after, y, height, width, channels, rows, columns, top, left,
        K=len(weight), S=stride, TILE=TILE, GROUP=GROUP, CHANNELS=CHANNELS, num_warps=WARPS,
    )  # fmt: skip
    return y


def backward_input(
    gradient: Tensor, weight: Tensor, x: Tensor, before: Tensor, stride: int, top: int, left: int
) -> Tensor:
    """Return the gradient by the maps, for the gradient by the convolution without the ReLU6 after it."""
    n, channels, height, width = x.shape
    out = torch.empty_like(x)
    tiles = n * _tiles(-(-height // stride), -(-width // stride))
    _backward_input[(_blocks(channels) * tiles, stride * stride)](
        gradient, weight, x, before, out, height, width, channels, *gradient.shape[2:], top, left,
        K=len(weight), S=stride, TILE=TILE, GROUP=GROUP, CHANNELS=CHANNELS, num_warps=2 * WARPS,
    )  # fmt: skip
    return out


def backward_weight(gradient: Tensor, x: Tensor, before: Tensor, side: int, stride: int, top: int, left: int) -> Tensor:
    """Return the gradient by the weights, [k, k, c], for the gradient by the convolution without the ReLU6 after it."""
    n, channels, height, width = x.shape
    tiles = n * _tiles(*gradient.shape[2:])
    programs = side * _blocks(channels)
    parts = min(tiles, max(1, BUSY * processors(x.device) // programs))
    out = torch.empty((parts, side, side, channels), dtype=torch.float32, device=x.device)
    _backward_weight[(_blocks(channels), side, parts)](
        gradient, x, before, out, height, width, channels, *gradient.shape[2:], top, left, tiles,
        K=side, S=stride, TILE=TILE, GROUP=GROUP, CHANNELS=CHANNELS, num_warps=WARPS,
    )  # fmt: skip
    return out.sum(0)


def _blocks(channels: int) -> int:
    return -(-channels // CHANNELS)


def _tiles(rows: int, columns: int) -> int:
    return -(-rows // TILE) * -(-columns // TILE)
