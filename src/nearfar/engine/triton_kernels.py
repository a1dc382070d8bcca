"""Triton kernels of pair losses: sums over the rows, and pair weights times columns.

Each kernel computes the similarities of a block of rows with one block of columns after another, in registers and
shared memory. One kernel computes the sums that a ``Program`` asks for. Autograd differentiates the loss by them, which
is cheap: they are a few numbers per anchor. Another kernel computes the similarities again, turns the derivatives into
pair weights and multiplies these with the embeddings. Similarities stay on the chip; weights do too or, for float32,
are written in strips of bounded memory.

From top to bottom: the kernels, their launchers, and what is computed of a batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from nearfar.engine.programs import AllTriplets, KernelError, KernelProgram, Program, Setting, Sums, Terms
from nearfar.engine.rows import constant, masked
from nearfar.engine.tiles import Gradient, ListGradient, Tile, TiledBatch
from nearfar.utils.kernels import interpreted, jit, processors

try:
    import triton
    import triton.language as tl
except ImportError:  # this module can be read without it, not run
    triton = tl = None

if TYPE_CHECKING:
    from nearfar.engine.measures import PreparedVectors

T = TypeVar("T")
PARTIAL_BYTES = 64 * 1024 * 1024  # for the sums of groups of columns
PRODUCTS = {"float32": "halves", "tf32": "tf32", "bfloat16": "tf32"}  # tl.dot ignores it for bfloat16
MOST_POSITIVES = 15  # of an anchor, if a kernel compares all negatives with each of them
LARGEST = 1024.0  # what the largest number is scaled to before it is split into halves; float16 ends at 65,504


@dataclass(frozen=True)
class Blocks:
    """Sizes of the blocks of a kernel."""

    rows: int
    columns: int
    inner: int  # dimensions that one product of similarities sums over
    outer: int  # dimensions of the gradient that one program computes
    warps: int
    stages: int  # of the software pipeline
    resident: int = 1  # programs that a multiprocessor runs at a time


# The first that the GPU has room for is used.
SUM_BLOCKS = [
    Blocks(128, 128, 64, 0, 8, 3),
    Blocks(128, 128, 32, 0, 8, 3),
    Blocks(64, 64, 32, 0, 4, 2, 2),
    Blocks(32, 32, 32, 0, 4, 1, 2),
]
KEPT_BLOCKS = [Blocks(32, 64, 0, 0, 8, 1, 2)]  # where the dot products are read instead of computed
PRODUCT_BLOCKS = [Blocks(64, 64, 32, 256, 8, 2), Blocks(64, 32, 32, 128, 4, 2, 2), Blocks(32, 32, 32, 64, 4, 1, 2)]
STRIP_BLOCKS = [Blocks(128, 64, 0, 128, 8, 3), Blocks(64, 64, 0, 64, 4, 2, 2), Blocks(32, 32, 0, 32, 4, 1, 2)]
SPLIT_BLOCK = 1024
MERGE_BLOCK = 128
SMALL_BLOCKS = Blocks(16, 32, 16, 32, 1, 1, 4)  # for the interpreter: several blocks of a small batch


@jit
def _split(x, factor, high, rest, size, BLOCK: tl.constexpr):
    """Write ``x · factor`` as the sum of two numbers of float16, which together have 22 bits."""
    here = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    within = here < size
    number = tl.load(x + here, mask=within, other=0.0) * tl.load(factor)
    half = number.to(tl.float16)
    tl.store(high + here, half, mask=within)
    tl.store(rest + here, (number - half.to(tl.float32)).to(tl.float16), mask=within)


@jit
def _dots(
    x, y, x_rest, y_rest, x_unit, y_unit, rows, cols, height, width, dim: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRODUCT: tl.constexpr,
):  # fmt: skip
    """The dot products of a block of rows and a block of columns, [BM, BN]."""
    found = tl.zeros([BM, BN], dtype=tl.float32)
    small = tl.zeros([BM, BN], dtype=tl.float32)  # apart, since tensor cores round every addition to a sum down
    for start in range(0, dim, BK):
        inner = start + tl.arange(0, BK)
        of_left = rows.to(tl.int64)[:, None] * dim + inner[None, :]
        of_right = cols.to(tl.int64)[:, None] * dim + inner[None, :]
        in_left, in_right = (rows < height)[:, None], (cols < width)[:, None]
        if dim % BK:
            in_left, in_right = in_left & (inner < dim)[None, :], in_right & (inner < dim)[None, :]
        left = tl.load(x + of_left, mask=in_left, other=0.0)
        right = tl.load(y + of_right, mask=in_right, other=0.0)
        if PRODUCT == "halves":  # the product of both rests is below the precision of float32
            left_rest = tl.load(x_rest + of_left, mask=in_left, other=0.0)
            right_rest = tl.load(y_rest + of_right, mask=in_right, other=0.0)
            small = tl.dot(left, tl.trans(right_rest), small)
            small = tl.dot(left_rest, tl.trans(right), small)
            found = tl.dot(left, tl.trans(right), found)
        else:
            found = tl.dot(left, tl.trans(right), found, input_precision=PRODUCT)
    if PRODUCT == "halves":
        found = (found + small) * (tl.load(x_unit) * tl.load(y_unit))
    return found


@jit
def _all_dots(
    x, y, x_rest, y_rest, x_unit, y_unit, out, height, width, dim: tl.constexpr,
    PRODUCT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """The dot products of all rows and columns, [height, width]."""
    rows = tl.program_id(1) * BM + tl.arange(0, BM)
    cols = tl.program_id(0) * BN + tl.arange(0, BN)
    dots = _dots(x, y, x_rest, y_rest, x_unit, y_unit, rows, cols, height, width, dim, BM, BN, BK, PRODUCT)
    inside = (rows < height)[:, None] & (cols < width)[None, :]
    tl.store(out + rows.to(tl.int64)[:, None] * width + cols[None, :], dots, mask=inside)


@jit
def _split_columns(block, BM: tl.constexpr, BN: tl.constexpr):
    """The left and the right half of a block."""
    return tl.split(tl.permute(tl.reshape(block, [BM, 2, BN // 2]), [0, 2, 1]))


@jit
def _left_and_right(
    x, y, x_rest, y_rest, x_unit, y_unit, kept, rows, start, height, width, dim: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRODUCT: tl.constexpr,
):  # fmt: skip
    """The dot products of a block of rows with the left and with the right half of a block of columns.

    What follows on the halves, one after the other, needs fewer registers than the whole. If PRODUCT is "kept", they
    are read from the matrix of all dot products.
    """
    if PRODUCT == "kept":
        here = kept + rows.to(tl.int64)[:, None] * width
        some = start + tl.arange(0, BN // 2)
        others = some + BN // 2
        left = tl.load(here + some[None, :], mask=(rows < height)[:, None] & (some < width)[None, :], other=0.0)
        right = tl.load(here + others[None, :], mask=(rows < height)[:, None] & (others < width)[None, :], other=0.0)
    else:
        cols = start + tl.arange(0, BN)
        dots = _dots(x, y, x_rest, y_rest, x_unit, y_unit, rows, cols, height, width, dim, BM, BN, BK, PRODUCT)
        left, right = _split_columns(dots, BM, BN)
    return left, right


@jit
def _values(dots, x_squares, y_squares, rows, cols, height, width, POWER: tl.constexpr):
    """The compared values, see ``Measure.pairwise``."""
    if POWER == 0:
        return dots
    left = tl.load(x_squares + rows, mask=rows < height, other=0.0)
    right = tl.load(y_squares + cols, mask=cols < width, other=0.0)
    squares = tl.maximum(left[:, None] + right[None, :] - 2.0 * dots, 1e-30)
    if POWER == 1:
        return tl.sqrt(squares)
    return squares


@jit
def _masks(x_labels, y_labels, own, rows, cols, height, width, OWN: tl.constexpr):
    """The positives and negatives of a block, see ``rows.masks``."""
    left = tl.load(x_labels + rows, mask=rows < height, other=0)
    right = tl.load(y_labels + cols, mask=cols < width, other=0)
    inside = (rows < height)[:, None] & (cols < width)[None, :]
    same = left[:, None] == right[None, :]
    pos = inside & same
    if OWN == "diagonal":
        pos = pos & (rows[:, None] != cols[None, :])
    if OWN == "rows":
        pos = pos & (tl.load(own + rows, mask=rows < height, other=-1)[:, None] != cols[None, :])
    if OWN == "columns":
        pos = pos & (tl.load(own + cols, mask=cols < width, other=-1)[None, :] != rows[:, None])
    return pos, inside & (same == 0)


@jit
def _compared(
    dots, x_squares, y_squares, x_labels, y_labels, own, rows, cols, height, width,
    POWER: tl.constexpr, OWN: tl.constexpr,
):  # fmt: skip
    """Values and similarities (minus the distance for distances) of a block, its positives and its negatives."""
    value = _values(dots, x_squares, y_squares, rows, cols, height, width, POWER)
    similarity = value if POWER == 0 else -value
    pos, neg = _masks(x_labels, y_labels, own, rows, cols, height, width, OWN)
    return value, similarity, pos, neg


@jit
def _logit(value, scale, optimum, delta, KIND: tl.constexpr):
    """The exponents of a log-sum-exp, and their derivatives up to ``scale``."""
    if KIND == "circle":
        pace = tl.maximum(tl.where(scale > 0, value - optimum, optimum - value), 0.0)
        return scale * pace * (value - delta), pace
    return scale * value, value * 0.0 + 1.0


@jit
def _term(value, scale, shift, KIND: tl.constexpr):
    """The terms of a sum, their derivatives by the values, and by ``shift`` (or which terms are not zero)."""
    inner = scale * value + shift
    if KIND == "linear":
        return inner, inner * 0.0 + scale, (inner != 0.0).to(tl.float32)
    if KIND == "square":
        return inner * inner, 2.0 * scale * inner, (inner != 0.0).to(tl.float32)
    if KIND == "hinge":
        active = (inner > 0.0).to(tl.float32)
        return tl.maximum(inner, 0.0), scale * active, active
    if KIND == "squared_hinge":
        above = tl.maximum(inner, 0.0)
        return above * above, 2.0 * scale * above, (above > 0.0).to(tl.float32)
    small = tl.exp(-tl.abs(inner))
    log = tl.where(small < 0.01, small * (1.0 - small * (0.5 - small / 3.0)), tl.log(1.0 + small))
    share = tl.where(inner > 0.0, 1.0, small) / (1.0 + small)
    return tl.maximum(inner, 0.0) + log, scale * share, share


@jit
def _accumulate(
    value, chosen, shift, top, mass, moment, total, active, count, a, b, c, e, f,
    LOGIT: tl.constexpr, TOTAL: tl.constexpr, EXPECTED: tl.constexpr, SHIFTED: tl.constexpr,
):  # fmt: skip
    """Add a block of columns to the sums of its rows."""
    if LOGIT != "none":
        logit, _ = _logit(value, a, b, c, LOGIT)
        # -1e30 is FLOOR of engine.rows
        new = tl.maximum(top, tl.max(tl.where(chosen, logit, -1e30), 1))
        power = tl.where(chosen, tl.exp(logit - new[:, None]), 0.0)
        old = tl.exp(top - new)
        mass = mass * old + tl.sum(power, 1)
        if EXPECTED:
            moment = moment * old + tl.sum(power * value, 1)
        top = new
    if TOTAL != "none":
        term, _, one = _term(value, e, f + shift[:, None], TOTAL)
        total += tl.sum(tl.where(chosen, term, 0.0), 1)
        if TOTAL != "softplus" or SHIFTED:
            active += tl.sum(tl.where(chosen, one, 0.0), 1)
    count += tl.sum(chosen.to(tl.float32), 1)
    return top, mass, moment, total, active, count


@jit
def _any(mask):
    """Whether a block has a pair. Most blocks have no positive if there are many classes, and can skip them."""
    return tl.max(mask.to(tl.int32)) > 0


@jit
def _sums(
    x, y, x_rest, y_rest, x_unit, y_unit, kept, x_squares, y_squares, x_labels, y_labels, own, x_bounds, x_shifts, out,
    height, width, dim: tl.constexpr, per_group,
    pa, pb, pc, pe, pf, na, nb, nc, ne, nf,
    POWER: tl.constexpr, OWN: tl.constexpr, BOUNDED: tl.constexpr, SHIFTED: tl.constexpr,
    P_LOGIT: tl.constexpr, P_TOTAL: tl.constexpr, N_LOGIT: tl.constexpr, N_TOTAL: tl.constexpr,
    P_EXPECTED: tl.constexpr, N_EXPECTED: tl.constexpr,
    PRODUCT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Sums over the positives and over the negatives of each row, for one group of columns: [groups, 12, height]."""
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    within = rows < height
    zero = tl.zeros([BM], dtype=tl.float32)
    n_bound, p_bound, p_shift, n_shift = zero, zero, zero, zero
    if BOUNDED:
        n_bound = tl.load(x_bounds + rows, mask=within, other=0.0)
        p_bound = tl.load(x_bounds + height + rows, mask=within, other=0.0)
    if SHIFTED:
        p_shift = tl.load(x_shifts + rows, mask=within, other=0.0)
        n_shift = tl.load(x_shifts + height + rows, mask=within, other=0.0)
    p0, p1, p2, p3, p4, p5 = zero - 1e30, zero, zero, zero, zero, zero
    n0, n1, n2, n3, n4, n5 = zero - 1e30, zero, zero, zero, zero, zero
    first = tl.program_id(1) * per_group
    for start in range(first, tl.minimum(first + per_group, width), BN):
        left, right = _left_and_right(
            x, y, x_rest, y_rest, x_unit, y_unit, kept, rows, start, height, width, dim, BM, BN, BK, PRODUCT
        )
        for side in tl.static_range(2):
            some = start + side * (BN // 2) + tl.arange(0, BN // 2)
            value, similarity, pos, neg = _compared(
                left if side == 0 else right, x_squares, y_squares, x_labels, y_labels, own, rows, some, height, width,
                POWER, OWN,
            )  # fmt: skip
            if BOUNDED:
                pos = pos & (similarity < p_bound[:, None])
                neg = neg & (-similarity < n_bound[:, None])
            if _any(pos):
                p0, p1, p2, p3, p4, p5 = _accumulate(
                    value, pos, p_shift, p0, p1, p2, p3, p4, p5, pa, pb, pc, pe, pf,
                    P_LOGIT, P_TOTAL, P_EXPECTED, SHIFTED,
                )  # fmt: skip
            n0, n1, n2, n3, n4, n5 = _accumulate(
                value, neg, n_shift, n0, n1, n2, n3, n4, n5, na, nb, nc, ne, nf,
                N_LOGIT, N_TOTAL, N_EXPECTED, SHIFTED,
            )  # fmt: skip
    out += tl.program_id(1).to(tl.int64) * 12 * height
    tl.store(out + rows, p0, mask=within)
    tl.store(out + height + rows, p1, mask=within)
    tl.store(out + 2 * height + rows, p2, mask=within)
    tl.store(out + 3 * height + rows, p3, mask=within)
    tl.store(out + 4 * height + rows, p4, mask=within)
    tl.store(out + 5 * height + rows, p5, mask=within)
    tl.store(out + 6 * height + rows, n0, mask=within)
    tl.store(out + 7 * height + rows, n1, mask=within)
    tl.store(out + 8 * height + rows, n2, mask=within)
    tl.store(out + 9 * height + rows, n3, mask=within)
    tl.store(out + 10 * height + rows, n4, mask=within)
    tl.store(out + 11 * height + rows, n5, mask=within)


@jit
def _merge(parts, out, groups, height, BLOCK: tl.constexpr):
    """The log-sum-exp, the expected value and the three sums of positives or of negatives over all groups, see sums."""
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    within = rows < height
    first = parts + tl.program_id(1) * 6 * height + rows
    top = tl.full([BLOCK], -1e30, dtype=tl.float32)
    for group in range(groups):
        top = tl.maximum(top, tl.load(first + group * 12 * height, mask=within, other=-1e30))
    zero = tl.zeros([BLOCK], dtype=tl.float32)
    mass, moment, total, active, count = zero, zero, zero, zero, zero
    for group in range(groups):
        here = first + group * 12 * height
        factor = tl.exp(tl.load(here, mask=within, other=-1e30) - top)
        mass += factor * tl.load(here + height, mask=within, other=0.0)
        moment += factor * tl.load(here + 2 * height, mask=within, other=0.0)
        total += tl.load(here + 3 * height, mask=within, other=0.0)
        active += tl.load(here + 4 * height, mask=within, other=0.0)
        count += tl.load(here + 5 * height, mask=within, other=0.0)
    some = tl.where(mass > 0.0, mass, 1.0)
    out += tl.program_id(1) * 5 * height + rows
    tl.store(out, tl.where(mass > 0.0, top + tl.log(some), -1e30), mask=within)
    tl.store(out + height, moment / some, mask=within)
    tl.store(out + 2 * height, total, mask=within)
    tl.store(out + 3 * height, active, mask=within)
    tl.store(out + 4 * height, count, mask=within)


@jit
def _extremes(
    x, y, x_rest, y_rest, x_unit, y_unit, kept, x_squares, y_squares, x_labels, y_labels, own, out, where,
    height, width, dim: tl.constexpr, per_group,
    POWER: tl.constexpr, OWN: tl.constexpr, WHERE: tl.constexpr,
    PRODUCT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """The least similar positive and the most similar negative of each row, and their columns: [groups, 2, height]."""
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    within = rows < height
    far = tl.full([BM], float("inf"), dtype=tl.float32)
    near = tl.full([BM], float("-inf"), dtype=tl.float32)
    far_at, near_at = tl.zeros([BM], dtype=tl.int32), tl.zeros([BM], dtype=tl.int32)
    first = tl.program_id(1) * per_group
    for start in range(first, tl.minimum(first + per_group, width), BN):
        left, right = _left_and_right(
            x, y, x_rest, y_rest, x_unit, y_unit, kept, rows, start, height, width, dim, BM, BN, BK, PRODUCT
        )
        for side in tl.static_range(2):
            begin = start + side * (BN // 2)
            some = begin + tl.arange(0, BN // 2)
            _, similarity, pos, neg = _compared(
                left if side == 0 else right, x_squares, y_squares, x_labels, y_labels, own, rows, some, height, width,
                POWER, OWN,
            )  # fmt: skip
            lows, highs = tl.where(pos, similarity, float("inf")), tl.where(neg, similarity, float("-inf"))
            if WHERE:
                low, low_at = tl.min(lows, 1, return_indices=True)
                high, high_at = tl.max(highs, 1, return_indices=True)
                far_at = tl.where(low < far, begin + low_at, far_at)
                near_at = tl.where(high > near, begin + high_at, near_at)
                far, near = tl.minimum(far, low), tl.maximum(near, high)
            else:
                far, near = tl.minimum(far, tl.min(lows, 1)), tl.maximum(near, tl.max(highs, 1))
    out += tl.program_id(1).to(tl.int64) * 2 * height
    tl.store(out + rows, -far, mask=within)
    tl.store(out + height + rows, near, mask=within)
    if WHERE:
        where += tl.program_id(1).to(tl.int64) * 2 * height
        tl.store(where + rows, far_at, mask=within)
        tl.store(where + height + rows, near_at, mask=within)


@jit
def _semi_hard(
    x, y, x_rest, y_rest, x_unit, y_unit, kept, x_squares, y_squares, x_labels, y_labels, own, bounds, out, where,
    height, width, dim: tl.constexpr, per_group,
    POWER: tl.constexpr, OWN: tl.constexpr, BOUNDS: tl.constexpr, SLOTS: tl.constexpr,
    PRODUCT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """The most similar negative below each bound of a row, the least similar one, and their columns.

    Written are [groups, SLOTS, height] numbers; slot ``BOUNDS`` has minus the similarity of the least similar negative.
    """
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    slots = tl.arange(0, SLOTS)[None, :]
    best = tl.full([BM, SLOTS], float("-inf"), dtype=tl.float32)
    at = tl.zeros([BM, SLOTS], dtype=tl.int32)
    first = tl.program_id(1) * per_group
    for start in range(first, tl.minimum(first + per_group, width), BN):
        left, right = _left_and_right(
            x, y, x_rest, y_rest, x_unit, y_unit, kept, rows, start, height, width, dim, BM, BN, BK, PRODUCT
        )
        for side in tl.static_range(2):
            begin = start + side * (BN // 2)
            some = begin + tl.arange(0, BN // 2)
            _, similarity, _, neg = _compared(
                left if side == 0 else right, x_squares, y_squares, x_labels, y_labels, own, rows, some, height, width,
                POWER, OWN,
            )  # fmt: skip
            for slot in tl.static_range(BOUNDS + 1):
                if slot < BOUNDS:
                    bound = tl.load(bounds + slot * height + rows, mask=rows < height, other=float("-inf"))
                    score = tl.where(neg & (similarity < bound[:, None]), similarity, float("-inf"))
                else:
                    score = tl.where(neg, -similarity, float("-inf"))
                top, top_at = tl.max(score, 1, return_indices=True)
                better = (slots == slot) & (top[:, None] > best)
                at = tl.where(better, (begin + top_at)[:, None], at)
                best = tl.where(better, top[:, None], best)
    place = (tl.program_id(1).to(tl.int64) * SLOTS + slots) * height + rows[:, None]
    within = (rows < height)[:, None] & (slots <= BOUNDS)
    tl.store(out + place, best, mask=within)
    tl.store(where + place, at, mask=within)


@jit
def _triplets(
    x, y, x_rest, y_rest, x_unit, y_unit, kept, x_squares, y_squares, x_labels, y_labels, own, thresholds, out,
    height, width, dim: tl.constexpr, per_group, count,
    POWER: tl.constexpr, OWN: tl.constexpr, TOTAL: tl.constexpr, SLOTS: tl.constexpr,
    PRODUCT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Sums over the negatives of each row for each of its thresholds: the terms and their derivatives.

    Written are [groups, 2, count, height] numbers.
    """
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    slots = tl.arange(0, SLOTS)[None, :]
    total, slopes = tl.zeros([BM, SLOTS], dtype=tl.float32), tl.zeros([BM, SLOTS], dtype=tl.float32)
    first = tl.program_id(1) * per_group
    for start in range(first, tl.minimum(first + per_group, width), BN):
        left, right = _left_and_right(
            x, y, x_rest, y_rest, x_unit, y_unit, kept, rows, start, height, width, dim, BM, BN, BK, PRODUCT
        )
        for side in tl.static_range(2):
            some = start + side * (BN // 2) + tl.arange(0, BN // 2)
            _, similarity, _, neg = _compared(
                left if side == 0 else right, x_squares, y_squares, x_labels, y_labels, own, rows, some, height, width,
                POWER, OWN,
            )  # fmt: skip
            for slot in range(count):
                threshold = tl.load(thresholds + slot * height + rows, mask=rows < height, other=float("inf"))
                term, slope, _active = _term(similarity, 1.0, -threshold[:, None], TOTAL)
                here = slots == slot
                total += tl.where(here, tl.sum(tl.where(neg, term, 0.0), 1)[:, None], 0.0)
                slopes += tl.where(here, tl.sum(tl.where(neg, slope, 0.0), 1)[:, None], 0.0)
    place = (tl.program_id(1).to(tl.int64) * 2 * count + slots) * height + rows[:, None]
    within = (rows < height)[:, None] & (slots < count)
    tl.store(out + place, total, mask=within)
    tl.store(out + place + count * height, slopes, mask=within)


@jit
def _triplet_weights(similarity, neg, thresholds, anchors, size, count, ROWS: tl.constexpr, TOTAL: tl.constexpr):
    """The derivative by the similarities of negatives of the sum over all triplets of anchors in rows or columns."""
    weights = similarity * 0.0
    for slot in range(count):
        threshold = tl.load(thresholds + slot * size + anchors, mask=anchors < size, other=float("inf"))
        _, slope, _ = _term(similarity, 1.0, -threshold[:, None] if ROWS else -threshold[None, :], TOTAL)
        weights += slope
    return tl.where(neg, weights, 0.0)


@jit
def _side_weights(value, shift, log, by_log, by_total, a, b, c, e, f, LOGIT: tl.constexpr, TOTAL: tl.constexpr):
    """The derivative by the values of one side."""
    weights = value * 0.0
    if LOGIT != "none":
        logit, pace = _logit(value, a, b, c, LOGIT)
        weights += by_log * pace * tl.exp(logit - log)
    if TOTAL != "none":
        _, slope, _ = _term(value, e, f + shift, TOTAL)
        weights += by_total * slope
    return weights


@jit
def _anchor_params(x_params, members, count):
    """Ten numbers of each anchor, see ``products``."""
    within = members < count
    p0 = tl.load(x_params + members, mask=within, other=0.0)
    p1 = tl.load(x_params + count + members, mask=within, other=0.0)
    p2 = tl.load(x_params + 2 * count + members, mask=within, other=0.0)
    p3 = tl.load(x_params + 3 * count + members, mask=within, other=0.0)
    p4 = tl.load(x_params + 4 * count + members, mask=within, other=0.0)
    p5 = tl.load(x_params + 5 * count + members, mask=within, other=0.0)
    p6 = tl.load(x_params + 6 * count + members, mask=within, other=0.0)
    p7 = tl.load(x_params + 7 * count + members, mask=within, other=0.0)
    p8 = tl.load(x_params + 8 * count + members, mask=within, other=0.0)
    p9 = tl.load(x_params + 9 * count + members, mask=within, other=0.0)
    return p0, p1, p2, p3, p4, p5, p6, p7, p8, p9


@jit
def _weights(
    value, similarity, pos, neg, n_bound, p_bound, p_shift, n_shift, p_log, n_log, p_by_log, n_by_log,
    p_by_total, n_by_total,
    pa, pb, pc, pe, pf, na, nb, nc, ne, nf, BOUNDED: tl.constexpr,
    P_LOGIT: tl.constexpr, P_TOTAL: tl.constexpr, N_LOGIT: tl.constexpr, N_TOTAL: tl.constexpr,
):  # fmt: skip
    """The derivative of the loss by the values of a block, given the numbers of their anchors."""
    if BOUNDED:
        pos = pos & (similarity < p_bound)
        neg = neg & (-similarity < n_bound)
    push = _side_weights(value, n_shift, n_log, n_by_log, n_by_total, na, nb, nc, ne, nf, N_LOGIT, N_TOTAL)
    weights = tl.where(neg, push, 0.0)
    if _any(pos):
        pull = _side_weights(value, p_shift, p_log, p_by_log, p_by_total, pa, pb, pc, pe, pf, P_LOGIT, P_TOTAL)
        weights = tl.where(pos, pull, weights)
    return weights


@jit
def _by_dots(
    dots, x_squares, y_squares, x_labels, y_labels, own, x_params, y_params, rows, cols, height, width, count,
    pa, pb, pc, pe, pf, na, nb, nc, ne, nf,
    POWER: tl.constexpr, OWN: tl.constexpr, BOUNDED: tl.constexpr, TRIPLETS: tl.constexpr,
    FROM_ROWS: tl.constexpr, FROM_COLUMNS: tl.constexpr,
    P_LOGIT: tl.constexpr, P_TOTAL: tl.constexpr, N_LOGIT: tl.constexpr, N_TOTAL: tl.constexpr,
):  # fmt: skip
    """The derivative of the loss by the dot products of a block, where rows, columns or both are anchors."""
    value, similarity, pos, neg = _compared(
        dots, x_squares, y_squares, x_labels, y_labels, own, rows, cols, height, width, POWER, OWN
    )
    weights = value * 0.0
    if TRIPLETS:
        if FROM_ROWS:
            weights += _triplet_weights(similarity, neg, x_params, rows, height, count, True, N_TOTAL)
        if FROM_COLUMNS:
            weights += _triplet_weights(similarity, neg, y_params, cols, width, count, False, N_TOTAL)
        if POWER > 0:
            weights = -weights
    if FROM_ROWS and not TRIPLETS:
        r0, r1, r2, r3, r4, r5, r6, r7, r8, r9 = _anchor_params(x_params, rows, height)
        weights += _weights(
            value, similarity, pos, neg, r0[:, None], r1[:, None], r2[:, None], r3[:, None], r4[:, None],
            r5[:, None], r6[:, None], r7[:, None], r8[:, None], r9[:, None],
            pa, pb, pc, pe, pf, na, nb, nc, ne, nf, BOUNDED, P_LOGIT, P_TOTAL, N_LOGIT, N_TOTAL,
        )  # fmt: skip
    if FROM_COLUMNS and not TRIPLETS:
        c0, c1, c2, c3, c4, c5, c6, c7, c8, c9 = _anchor_params(y_params, cols, width)
        weights += _weights(
            value, similarity, pos, neg, c0[None, :], c1[None, :], c2[None, :], c3[None, :], c4[None, :],
            c5[None, :], c6[None, :], c7[None, :], c8[None, :], c9[None, :],
            pa, pb, pc, pe, pf, na, nb, nc, ne, nf, BOUNDED, P_LOGIT, P_TOTAL, N_LOGIT, N_TOTAL,
        )  # fmt: skip
    if POWER == 1:  # up to 1.5e-15 vectors are equal, see Measure.to_dot
        weights = tl.where(value <= 1.5e-15, 0.0, -weights / value)
    if POWER == 2:
        weights = -2.0 * weights
    return weights


@jit
def _products(
    x, y, x_rest, y_rest, x_unit, y_unit, kept, x_squares, y_squares, x_labels, y_labels, own, x_params, y_params,
    out, out_sums, height, width, dim: tl.constexpr, per_group, count, pa, pb, pc, pe, pf, na, nb, nc, ne, nf,
    POWER: tl.constexpr, OWN: tl.constexpr, BOUNDED: tl.constexpr, TRIPLETS: tl.constexpr,
    FROM_ROWS: tl.constexpr, FROM_COLUMNS: tl.constexpr,
    SUMS: tl.constexpr, P_LOGIT: tl.constexpr, P_TOTAL: tl.constexpr, N_LOGIT: tl.constexpr, N_TOTAL: tl.constexpr,
    PRODUCT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Derivatives by the dot products times the columns, for one group of columns: [groups, height, dim]."""
    rows = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    dims = tl.program_id(1) * BD + tl.arange(0, BD)
    within = rows < height
    found = tl.zeros([BM, BD], dtype=tl.float32)
    sums = tl.zeros([BM], dtype=tl.float32)
    first = tl.program_id(2) * per_group
    for start in range(first, tl.minimum(first + per_group, width), BN):
        cols = start + tl.arange(0, BN)
        dots = _dots(x, y, x_rest, y_rest, x_unit, y_unit, rows, cols, height, width, dim, BM, BN, BK, PRODUCT)
        weights = _by_dots(
            dots, x_squares, y_squares, x_labels, y_labels, own, x_params, y_params, rows, cols, height, width, count,
            pa, pb, pc, pe, pf, na, nb, nc, ne, nf, POWER, OWN, BOUNDED, TRIPLETS, FROM_ROWS, FROM_COLUMNS,
            P_LOGIT, P_TOTAL, N_LOGIT, N_TOTAL,
        )  # fmt: skip
        if SUMS:
            sums += tl.sum(weights, 1)
        columns = tl.load(
            y + cols.to(tl.int64)[:, None] * dim + dims[None, :],
            mask=(cols < width)[:, None] & (dims < dim)[None, :],
            other=0.0,
        )
        found = tl.dot(weights.to(columns.dtype), columns, found, input_precision=PRODUCT)
    out += tl.program_id(2).to(tl.int64) * height * dim
    where = rows.to(tl.int64)[:, None] * dim + dims[None, :]
    tl.store(out + where, found, mask=within[:, None] & (dims < dim)[None, :])
    if SUMS:
        tl.store(out_sums + tl.program_id(2).to(tl.int64) * height + rows, sums, mask=within)


@jit
def _strip(
    x, y, x_rest, y_rest, x_unit, y_unit, kept, x_squares, y_squares, x_labels, y_labels, own, x_params, y_params,
    out, peaks, top, bottom, height, width, dim: tl.constexpr, count, pa, pb, pc, pe, pf, na, nb, nc, ne, nf,
    POWER: tl.constexpr, OWN: tl.constexpr, BOUNDED: tl.constexpr, TRIPLETS: tl.constexpr,
    FROM_ROWS: tl.constexpr, FROM_COLUMNS: tl.constexpr,
    P_LOGIT: tl.constexpr, P_TOTAL: tl.constexpr, N_LOGIT: tl.constexpr, N_TOTAL: tl.constexpr,
    PRODUCT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Derivatives by the dot products of the rows from ``top`` to ``bottom``, [bottom − top, width].

    The bits of the largest magnitude of each row are written to ``peaks``, which starts with zeros.
    """
    here = tl.program_id(1) * BM + tl.arange(0, BM)
    start = tl.program_id(0) * BN
    rows = top + here
    left, right = _left_and_right(
        x, y, x_rest, y_rest, x_unit, y_unit, kept, rows, start, height, width, dim, BM, BN, BK, PRODUCT
    )
    peak = tl.zeros([BM], dtype=tl.float32)
    PARTS: tl.constexpr = 2 if PRODUCT == "kept" else 4  # the numbers of anchors in columns take many registers
    for part in tl.static_range(PARTS):
        dots = left if part < PARTS // 2 else right
        if PARTS == 4:
            first, second = _split_columns(dots, BM, BN // 2)
            dots = first if part % 2 == 0 else second
        some = start + part * (BN // PARTS) + tl.arange(0, BN // PARTS)
        weights = _by_dots(
            dots, x_squares, y_squares, x_labels, y_labels, own, x_params, y_params, rows, some,
            height, width, count, pa, pb, pc, pe, pf, na, nb, nc, ne, nf, POWER, OWN, BOUNDED, TRIPLETS,
            FROM_ROWS, FROM_COLUMNS, P_LOGIT, P_TOTAL, N_LOGIT, N_TOTAL,
        )  # fmt: skip
        inside = (rows < bottom)[:, None] & (some < width)[None, :]
        tl.store(out + here.to(tl.int64)[:, None] * width + some[None, :], weights, mask=inside)
        peak = tl.maximum(peak, tl.max(tl.where(inside, tl.abs(weights), 0.0), 1))
    tl.atomic_max(peaks + here, peak.to(tl.int32, bitcast=True), mask=rows < bottom)  # in the order of the numbers


@jit
def _times_columns(
    weights, peaks, y, y_rest, y_unit, out, height, width, dim: tl.constexpr, per_group,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """A strip of derivatives times the columns, for one group of columns: [groups, height, dim]."""
    rows = tl.program_id(1) * BM + tl.arange(0, BM)
    dims = tl.program_id(0) * BD + tl.arange(0, BD)
    within = rows < height
    peak = tl.maximum(tl.load(peaks + rows, mask=within, other=0.0), 1e-30)
    factor = MOST / peak
    found = tl.zeros([BM, BD], dtype=tl.float32)
    first = tl.program_id(2) * per_group
    for start in range(first, tl.minimum(first + per_group, width), BN):
        cols = start + tl.arange(0, BN)
        inside = within[:, None] & (cols < width)[None, :]
        of_left = rows.to(tl.int64)[:, None] * width + cols[None, :]
        left = tl.load(weights + of_left, mask=inside, other=0.0) * factor[:, None]
        half = left.to(tl.float16)
        rest = (left - half.to(tl.float32)).to(tl.float16)
        of_right = cols.to(tl.int64)[:, None] * dim + dims[None, :]
        in_right = (cols < width)[:, None] & (dims < dim)[None, :]
        right = tl.load(y + of_right, mask=in_right, other=0.0)
        right_rest = tl.load(y_rest + of_right, mask=in_right, other=0.0)
        some = tl.dot(half, right_rest)  # apart, since tensor cores round every addition to a sum down
        some = tl.dot(rest, right, some)
        found += tl.dot(half, right, some)
    found *= (peak / MOST)[:, None] * tl.load(y_unit)
    out += tl.program_id(2).to(tl.int64) * height * dim
    where = rows.to(tl.int64)[:, None] * dim + dims[None, :]
    tl.store(out + where, found, mask=within[:, None] & (dims < dim)[None, :])


@dataclass(frozen=True)
class KernelVectors:
    """Vectors as the kernels read them."""

    points: Tensor  # [m, d], float32 or bfloat16; or their larger halves in float16, in units of `unit`
    rest: Tensor  # the smaller halves; otherwise any tensor
    unit: Tensor  # what the halves are multiples of, a scalar; otherwise any tensor
    squares: Tensor  # squared lengths, [m]; any tensor for dot products
    labels: Tensor  # [m]


def split_float16(points: Tensor, *, is_unit: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Split float32 numbers into sums of two numbers of float16, and return both parts and their unit.

    The parts have 22 bits together, as two numbers of TF32 would, and their products take half the time. The largest
    number of unit vectors is known.
    """
    if is_unit:
        factor, unit = (constant(scale, points.dtype, points.device) for scale in (2.0**9, 2.0**-9))
    else:
        _, exponent = torch.frexp(torch.linalg.vector_norm(points, ord=float("inf")))
        # The bounds keep the factor and its inverse finite.
        factor = torch.ldexp(points.new_ones(()), 10 - exponent.clamp(-100, 100))
        unit = factor.reciprocal()
    parts = torch.empty(2, *points.shape, dtype=torch.float16, device=points.device)
    grid = (-(-points.numel() // SPLIT_BLOCK),)
    _split[grid](points, factor, parts[0], parts[1], points.numel(), BLOCK=SPLIT_BLOCK)
    return parts[0], parts[1], unit


@dataclass(frozen=True)
class KernelInput:
    """What all kernels of one evaluation share."""

    rows: KernelVectors
    columns: KernelVectors
    own: Tensor | None  # the column of each anchor, [m] (−1: none); None: they are the same or share no vector
    power: int  # of the measure
    precision: str
    dots: Tensor | None = None  # all dot products, [m, n], which `products` overwrites; None: each kernel computes them

    def arguments(self, *, of_columns: bool = False) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return pointers and constants for a kernel, with the columns as rows if it computes something of these."""
        rows, columns = (self.columns, self.rows) if of_columns else (self.rows, self.columns)
        dots = None if of_columns else self.dots
        pointers = (
            rows.points, columns.points, rows.rest, columns.rest, rows.unit, columns.unit,
            rows.points if dots is None else dots, rows.squares, columns.squares, rows.labels, columns.labels,
            rows.labels if self.own is None else self.own,
        )  # fmt: skip
        own = "none" if self.own is None else "columns" if of_columns else "rows"
        own = "diagonal" if rows is columns else own
        product = PRODUCTS[self.precision] if dots is None else "kept"
        return pointers, {"POWER": self.power, "OWN": own, "PRODUCT": product}

    def with_dots(self) -> KernelInput:
        """Return the comparison with all dot products computed."""
        (height, dim), width = self.rows.points.shape, len(self.columns.points)
        pointers, constants = self.arguments()
        dots = torch.empty(height, width, device=self.rows.points.device)

        def start(blocks: Blocks) -> None:
            _all_dots[(-(-width // blocks.columns), -(-height // blocks.rows))](
                *pointers[:6], dots, height, width, dim, PRODUCT=constants["PRODUCT"], BM=blocks.rows,
                BN=blocks.columns, BK=blocks.inner, num_warps=blocks.warps, num_stages=blocks.stages,
            )  # fmt: skip

        _launch(_all_dots, SUM_BLOCKS, (constants["PRODUCT"],), start)
        return replace(self, dots=dots)


@cache
def _groups(programs: int, width: int, blocks: Blocks, device: torch.device, most: int) -> tuple[int, int]:
    """How many groups of columns take the least time, at most ``most``, and the number of columns of each."""
    steps, room = -(-width // blocks.columns), blocks.resident * processors(device)

    def time(groups: int) -> int:
        return -(-programs * groups // room) * -(-steps // groups)

    groups = min(range(1, max(1, min(steps, most, -(-2 * room // programs))) + 1), key=time)
    per_group = -(-steps // groups) * blocks.columns
    return -(-width // per_group), per_group


_too_large: set[tuple[Any, ...]] = set()  # blocks that a GPU had no room for


def _launch(kernel: Any, choices: list[Blocks], key: tuple[Any, ...], start: Callable[[Blocks], T]) -> T:
    """Call ``start`` with the first blocks that the GPU has room for."""
    if interpreted():
        return start(SMALL_BLOCKS)
    for blocks in choices:
        if (kernel, blocks, key) in _too_large:
            continue
        try:
            return start(blocks)
        except triton.runtime.errors.OutOfResources:
            _too_large.add((kernel, blocks, key))
        except (KernelError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # versions of Triton differ in what they raise
            raise KernelError(f"Triton failed: {error}") from error
    raise KernelError("the GPU has no room for the Triton kernels; nearfar.engine.use_triton(False) turns them off")


def _sum_blocks(constants: dict[str, Any]) -> list[Blocks]:
    return KEPT_BLOCKS if constants["PRODUCT"] == "kept" else SUM_BLOCKS


def _of_terms(positives: Terms, negatives: Terms) -> tuple[tuple[float, ...], dict[str, str]]:
    """Numbers and constants of the kernels that describe the terms."""
    kinds = {
        "P_LOGIT": positives.logit, "P_TOTAL": positives.total, "N_LOGIT": negatives.logit, "N_TOTAL": negatives.total,
    }  # fmt: skip
    return (*positives.numbers(), *negatives.numbers()), kinds


def _over_columns(
    kernel: Any,
    given: KernelInput,
    shape: tuple[int, ...],
    extra: Sequence[Tensor] = (),
    numbers: tuple[float, ...] = (),
    *,
    places: bool = False,
    **constants: Any,
) -> tuple[Tensor, ...]:
    """Run a kernel for each group of columns; it writes [groups, *shape, m] numbers, and places of columns if asked."""
    (height, dim), width = given.rows.points.shape, len(given.columns.points)
    pointers, shared = given.arguments()
    constants |= shared
    dtypes = (torch.float32, torch.int32) if places else (torch.float32,)

    def start(blocks: Blocks) -> tuple[Tensor, ...]:
        programs, device = -(-height // blocks.rows), pointers[0].device
        most = max(1, PARTIAL_BYTES // (4 * len(dtypes) * math.prod(shape) * height))
        groups, per_group = _groups(programs, width, blocks, device, most)
        out = tuple(torch.empty(groups, *shape, height, device=device, dtype=dtype) for dtype in dtypes)
        kernel[(programs, groups)](
            *pointers, *extra, *out, height, width, dim, per_group, *numbers, **constants, BM=blocks.rows,
            BN=blocks.columns, BK=blocks.inner, num_warps=blocks.warps, num_stages=blocks.stages,
        )  # fmt: skip
        return out

    return _launch(kernel, _sum_blocks(constants), tuple(constants.values()), start)


def _merge_groups(parts: Tensor) -> Tensor:
    """Merge the sums of groups of columns into log-sum-exp, expected, total, active and number for both, [2, 5, m]."""
    groups, _, height = parts.shape
    out = parts.new_empty(2, 5, height)
    _merge[(-(-height // MERGE_BLOCK), 2)](parts, out, groups, height, BLOCK=MERGE_BLOCK)
    return out


def products(
    given: KernelInput,
    params: Tensor,
    numbers: tuple[float, ...],
    constants: dict[str, Any],
    *,
    of_columns: bool,
    both: bool,
    need_sums: bool,
    budget: int,
) -> tuple[Tensor, Tensor]:
    """Multiply the derivatives by the dot products with vectors: W C, Wᵀ R, or both if rows and columns are the same.

    ``params``, [10, m], are bounds and shifts as for ``sums``, log-sum-exps, and derivatives by these and by the
    totals; of all triplets, thresholds. Also returns the sums of the derivatives of each row, [m].
    """
    pointers, shared = given.arguments(of_columns=of_columns)
    constants = constants | shared | {"FROM_ROWS": both or not of_columns, "FROM_COLUMNS": both or of_columns}
    (height, dim), width = pointers[0].shape, len(pointers[1])

    def fused(blocks: Blocks) -> tuple[Tensor, Tensor]:
        outer = min(blocks.outer, triton.next_power_of_2(max(16, dim)))
        programs = -(-height // blocks.rows), -(-dim // outer)
        most = max(1, PARTIAL_BYTES // (4 * height * dim))
        groups, per_group = _groups(programs[0] * programs[1], width, blocks, params.device, most)
        out = params.new_empty(groups, height, dim)
        out_sums = params.new_empty(groups, height if need_sums else 0)
        _products[(*programs, groups)](
            *pointers, params, params, out, out_sums, height, width, dim, per_group, len(params), *numbers,
            SUMS=need_sums, **constants, BM=blocks.rows, BN=blocks.columns, BK=blocks.inner, BD=outer,
            num_warps=blocks.warps, num_stages=blocks.stages,
        )  # fmt: skip
        return (out[0], out_sums[0]) if groups == 1 else (out.sum(dim=0), out_sums.sum(dim=0))

    def by_strips(blocks: Blocks) -> tuple[Tensor, Tensor]:
        _, columns, _, rest, _, unit, kept, *_ = pointers
        rows = max(1, budget // (4 * width) // blocks.rows) * blocks.rows
        # Each program reads and writes its own block, so the weights can take the place of the dot products.
        strip = kept if constants["PRODUCT"] == "kept" else params.new_empty(min(rows, height), width)
        peaks = torch.zeros(height, dtype=torch.int32, device=params.device)
        out, out_sums = params.new_empty(height, dim), params.new_empty(height if need_sums else 0)
        for top in range(0, height, rows):
            part = slice(top, min(top + rows, height))
            weights = strip[: part.stop - top]
            _strip[(-(-width // blocks.columns), -(-len(weights) // blocks.rows))](
                *pointers, params, params, weights, peaks[part], top, part.stop, height, width, dim, len(params),
                *numbers, **constants, BM=blocks.rows, BN=blocks.columns, BK=blocks.inner, num_warps=blocks.warps,
                num_stages=blocks.stages,
            )  # fmt: skip
            of_strip = weights, peaks[part].view(torch.float32), columns, rest, unit
            _launch(_times_columns, STRIP_BLOCKS, (dim,), partial(_multiply, of_strip, out[part]))
            if need_sums:
                torch.sum(weights, dim=1, out=out_sums[part])
        return out, out_sums

    key = (*constants.values(), need_sums, dim)
    if given.precision == "float32":
        # A program holds the gradient by ``outer`` dimensions of its rows, so with more dimensions the fused product
        # computes all similarities again for each part of them. Three products cost more than a strip in memory.
        return _launch(_strip, _sum_blocks(constants), key, by_strips)
    return _launch(_products, PRODUCT_BLOCKS, key, fused)


def _multiply(of_strip: tuple[Tensor, ...], out: Tensor, blocks: Blocks) -> None:
    """Write a strip of W times the columns to ``out``."""
    (height, dim), width = out.shape, of_strip[0].shape[1]
    outer = min(blocks.outer, triton.next_power_of_2(max(16, dim)))
    programs = -(-dim // outer), -(-height // blocks.rows)
    most = max(1, PARTIAL_BYTES // (4 * height * dim))
    groups, per_group = _groups(programs[0] * programs[1], width, blocks, out.device, most)
    parts = out.unsqueeze(0) if groups == 1 else out.new_empty(groups, height, dim)
    _times_columns[(*programs, groups)](
        *of_strip, parts, height, width, dim, per_group, BM=blocks.rows, BN=blocks.columns, BD=outer, MOST=LARGEST,
        num_warps=blocks.warps, num_stages=blocks.stages,
    )  # fmt: skip
    if groups > 1:
        torch.sum(parts, dim=0, out=out)


def compute(
    program: KernelProgram, batch: TiledBatch, *, differentiate: bool
) -> tuple[Tile | None, tuple[Tensor, Gradient | None] | None]:
    """Return a tile of the few pairs that matter, or the loss and its gradients; or neither, if they cannot help."""
    if isinstance(program, str):
        pairs = hard_pairs(batch) if program == "hard" else semi_hard_pairs(batch)
        return None if pairs is None else batch.few_columns(*pairs), None
    if isinstance(program, Program):
        return None, evaluate(program, batch, differentiate=differentiate)
    listed = listed_positives(batch)
    return None, None if listed is None else all_triplets(program, batch, *listed, differentiate=differentiate)


def evaluate(program: Program, batch: TiledBatch, *, differentiate: bool) -> tuple[Tensor, Gradient | None]:
    """Compute the loss of a batch and its gradients."""
    passes = 1 + differentiate + (program.valid_triplet is not None) + (program.shift == "negatives")
    compared = Chunks(batch, keep=passes > 1)
    positives, negatives = program.positives, program.negatives
    nothing = batch.embeddings.new_zeros(batch.height)
    bounds = shifts = anchor_values = None
    if program.valid_triplet is not None:
        scores, _ = compared.run(_extremes, (2,), places=True, WHERE=False)
        bounds = scores.amax(dim=0) + program.valid_triplet
    elif program.bounds != (math.inf, -math.inf):
        upper, lower = program.bounds
        bounds = torch.stack([nothing - lower, nothing + upper])
    if program.shift == "anchor_values":
        assert batch.anchor_values is not None
        anchor_values = batch.anchor_values.detach().requires_grad_(differentiate)
        shifts = torch.stack([-anchor_values.detach(), anchor_values.detach()])
    if program.shift == "negatives":
        # The sum over the positives depends on that over the negatives: two passes.
        _, of_negatives = compared.sums(Terms(), negatives, bounds, None)
        shifts = torch.stack([of_negatives.log, nothing])
        of_positives, _ = compared.sums(positives, Terms(), bounds, shifts)
    else:
        of_positives, of_negatives = compared.sums(positives, negatives, bounds, shifts)

    with torch.set_grad_enabled(differentiate):
        leaves = [
            tensor.detach().requires_grad_(differentiate)
            for sums in (of_positives, of_negatives)
            for tensor in (sums.log, sums.expected, sums.total)
        ]
        pos = replace(of_positives, log=leaves[0], expected=leaves[1], total=leaves[2])
        neg = replace(of_negatives, log=leaves[3], expected=leaves[4], total=leaves[5])
        # A total changes with the shift of its anchor by the number of its active terms.
        if program.shift == "negatives":
            pos = replace(pos, total=pos.total + pos.active * (neg.log - neg.log.detach()))
        if anchor_values is not None:
            change = anchor_values - anchor_values.detach()
            pos = replace(pos, total=pos.total - pos.active * change)
            neg = replace(neg, total=neg.total + neg.active * change)
        loss = program.loss(pos, neg)
    if not differentiate:
        return loss, None
    wanted = leaves if anchor_values is None else [*leaves, anchor_values]
    slopes = torch.autograd.grad(loss, wanted, allow_unused=True)
    p_by_log, n_by_log = _by_logits(positives, *slopes[:2]), _by_logits(negatives, *slopes[3:5])
    absent = nothing, nothing
    numbers = [
        *(absent if bounds is None else bounds), *(absent if shifts is None else shifts),
        of_positives.log, of_negatives.log, p_by_log, n_by_log, slopes[2], slopes[5],
    ]  # fmt: skip
    params = torch.stack([nothing if tensor is None else tensor for tensor in numbers])
    gradient = _gradient(positives, negatives, batch, compared, params, bounded=bounds is not None)
    gradient.by_anchor_values = None if anchor_values is None else slopes[6]
    return loss.detach(), gradient


def _by_logits(terms: Terms, by_log: Tensor | None, by_expected: Tensor | None) -> Tensor | None:
    """The derivative by the values, up to their share of the softmax, given those by its log-sum-exp and its mean."""
    by_values = None if by_log is None else by_log * terms.logit_scale
    return by_expected if by_values is None else by_values if by_expected is None else by_values + by_expected


def hard_pairs(batch: TiledBatch) -> tuple[Tensor, Tensor, Tensor]:
    """Find the columns of each anchor's least similar positive and most similar negative; with masks, [m, 2] each."""
    similarity, columns = Chunks(batch).best(_extremes, 2, 2, WHERE=True)
    columns, present = columns.T.contiguous(), similarity.T.isfinite()
    first = torch.arange(2, device=columns.device) == 0
    return columns, present & first, present & ~first


class Chunks:
    """The anchors against all columns, or against one chunk after the other of a gallery that needs no gradient.

    What the kernels read of a chunk fits into the memory budget of the loss. It is prepared again in each pass.
    ``keep`` keeps the dot products for later passes, if all of them fit into the memory of a strip of weights.
    """

    def __init__(self, batch: TiledBatch, *, keep: bool = False) -> None:
        assert batch.labels is not None
        assert batch.column_labels is not None
        self.batch = batch
        self.anchors = _vectors(batch, batch.anchors, batch.labels)
        width, dim = batch.width, batch.embeddings.shape[1]
        chunk = width
        if batch.gallery is not None and not batch.columns_need_grad:
            chunk = max(1, batch.loss.memory_budget // (2 * batch.embeddings.element_size() * dim))
        self.chunks = [slice(start, min(start + chunk, width)) for start in range(0, width, chunk)]
        fits = 4 * batch.height * width <= batch.loss.memory_budget // 2
        self.keep = keep and fits and len(self.chunks) == 1 and Setting.precision == "float32"
        self._whole: KernelInput | None = None

    def __iter__(self) -> Iterator[KernelInput]:
        if len(self.chunks) > 1:
            yield from (self._compare(chunk) for chunk in self.chunks)
        else:
            if self._whole is None:
                self._whole = self._compare(self.chunks[0])
            yield self._whole

    def _compare(self, chunk: slice) -> KernelInput:
        batch, columns, own = self.batch, self.anchors, self.batch.positions
        if own is not None and chunk.start:  # negative or too large for anchors that are not in the chunk
            own = own - chunk.start
        if batch.gallery is not None:
            assert batch.column_labels is not None
            columns = _vectors(batch, batch.column_chunk(chunk), batch.column_labels[chunk])
        assert Setting.precision is not None
        compared = KernelInput(self.anchors, columns, own, batch.measure.power, Setting.precision)
        return compared.with_dots() if self.keep else compared

    def run(self, kernel: Any, *arguments: Any, **constants: Any) -> list[Tensor]:
        """Run a kernel over all columns: its outputs for the groups of all chunks, [groups, …, m] each."""
        outputs = [_over_columns(kernel, given, *arguments, **constants) for given in self]
        if len(outputs) == 1:
            return list(outputs[0])
        for output, chunk in zip(outputs, self.chunks, strict=True):
            for places in output[1:]:
                places += chunk.start
        return [torch.cat(parts) for parts in zip(*outputs, strict=True)]

    def best(
        self, kernel: Any, count: int, slots: int, extra: Sequence[Tensor] = (), **constants: Any
    ) -> tuple[Tensor, Tensor]:
        """Return the best of ``count`` scores among all groups, and their columns, [count, m] each."""
        scores, columns = self.run(kernel, (slots,), extra, places=True, **constants)
        best, group = scores[:, :count].max(dim=0)
        return best, columns.gather(0, group.unsqueeze(0)).squeeze(0).long()

    def sums(
        self, positives: Terms, negatives: Terms, bounds: Tensor | None, shifts: Tensor | None
    ) -> tuple[Sums, Sums]:
        """Return the sums over positives and negatives of all columns.

        The bounds, [2, m], are upper ones of minus the similarity of negatives and of the similarity of positives.
        """
        # Any tensor will do where there are none.
        extra = [self.anchors.points if tensor is None else tensor for tensor in (bounds, shifts)]
        numbers, kinds = _of_terms(positives, negatives)
        expected = {"P_EXPECTED": positives.expected, "N_EXPECTED": negatives.expected}
        shapes = {"BOUNDED": bounds is not None, "SHIFTED": shifts is not None}
        (parts,) = self.run(_sums, (12,), extra, numbers, **kinds, **expected, **shapes)
        of_positives, of_negatives = _merge_groups(parts)
        return Sums(*of_positives), Sums(*of_negatives)


def _vectors(batch: TiledBatch, prepared: PreparedVectors, labels: Tensor) -> KernelVectors:
    """What the kernels read of anchors or columns."""
    points = rest = unit = prepared.points.detach().contiguous()
    squares = points if prepared.squares is None else prepared.squares
    if Setting.precision == "float32":
        points, rest, unit = split_float16(points, is_unit=batch.measure.normalize)
    if Setting.precision == "bfloat16":
        points = points.to(torch.bfloat16)
        if interpreted():  # its products of bfloat16 are wrong
            points = points.float()
        if prepared.squares is not None:  # of the rounded vectors, so that equal ones have a distance of 0
            squares = points.float().square().sum(dim=1)
    return KernelVectors(points, rest, unit, squares, labels.contiguous())


def semi_hard_pairs(batch: TiledBatch) -> tuple[Tensor, Tensor, Tensor] | None:
    """Find the columns and masks of the pairs that semi-hard mining can select, [m, k]; each column counts once."""
    listed = listed_positives(batch)
    if listed is None:
        return None
    positives, filled, _ = listed
    nothing = torch.zeros_like(filled)
    bounds = masked(batch.few_columns(positives, filled, nothing).similarity, filled, -math.inf).T.contiguous()
    count = len(bounds)
    slots = triton.next_power_of_2(count + 1)
    # The most similar negative below each bound, and the least similar negative.
    scores, columns = Chunks(batch).best(_semi_hard, count + 1, slots, [bounds], BOUNDS=count, SLOTS=slots)
    negatives, present = columns.T, scores.T.isfinite()
    repeats = (negatives.unsqueeze(2) == negatives.unsqueeze(1)).tril(-1) & present.unsqueeze(1)
    present &= ~repeats.any(dim=2)
    masks = torch.cat([filled, torch.zeros_like(present)], dim=1), torch.cat([nothing, present], dim=1)
    return torch.cat([positives, negatives], dim=1), *masks


def listed_positives(batch: TiledBatch) -> tuple[Tensor, Tensor, Tensor] | None:
    """List the columns of the positives of each anchor, which slots are filled, and the number of its negatives.

    None if an anchor has too many of them.
    """
    if batch.embeddings.is_cuda and torch.cuda.is_current_stream_capturing():
        return None
    assert batch.labels is not None
    assert batch.column_labels is not None
    members, order = batch.column_labels.sort(stable=True)
    first, last = (torch.searchsorted(members, batch.labels, right=right) for right in (False, True))
    count = int((last - first).max())
    if count > MOST_POSITIVES + 1:  # the anchor may be among them
        return None
    slots = first.unsqueeze(1) + torch.arange(max(1, count), device=first.device)
    positives = order[slots.clamp(max=batch.width - 1)]
    own = torch.arange(batch.height, device=first.device) if batch.gallery is None else batch.positions
    filled = slots < last.unsqueeze(1)
    if own is not None:
        filled &= positives != own.unsqueeze(1)
    return positives, filled, batch.width - (last - first)


def all_triplets(
    program: AllTriplets, batch: TiledBatch, columns: Tensor, filled: Tensor, negatives: Tensor, *, differentiate: bool
) -> tuple[Tensor, Gradient | None]:
    """Compute the mean over all triplets, and its gradient, given the result of ``listed_positives``."""
    positives = batch.few_columns(columns, filled, torch.zeros_like(filled))
    given, terms = Chunks(batch, keep=differentiate), Terms(total="softplus" if program.soft else "hinge")
    thresholds = masked(positives.similarity - program.margin, filled, math.inf).T.contiguous()
    # Sums of the terms, and of their derivatives, of the negatives above each threshold of their anchor, [k, m] each.
    count, slots = len(thresholds), triton.next_power_of_2(len(thresholds))
    (parts,) = given.run(_triplets, (2, count), [thresholds], (count,), TOTAL=terms.total, SLOTS=slots)
    total, slopes = parts.sum(dim=0)
    # The slope of [x]+ is one for each active triplet.
    number = slopes.sum() if program.active and not program.soft else (filled.sum(dim=1) * negatives).sum()
    factor = masked(number, number > 0, 1).to(total.dtype).reciprocal()
    if not differentiate:
        return total.sum() * factor, None
    gradient = _gradient(Terms(), terms, batch, given, thresholds, triplets=True)
    gradient.scale(factor)
    of_positives = ListGradient(batch)
    of_positives.add(slopes.T * (factor if positives.measure.is_distance else -factor), positives)
    gradient.merge(Gradient(*of_positives.gradients()))
    return total.sum() * factor, gradient


def _gradient(
    positives: Terms,
    negatives: Terms,
    batch: TiledBatch,
    compared: Chunks,
    params: Tensor,
    *,
    bounded: bool = False,
    triplets: bool = False,
) -> Gradient:
    measure, (numbers, kinds) = batch.measure, _of_terms(positives, negatives)
    constants = kinds | {"BOUNDED": bounded, "TRIPLETS": triplets}

    def gradient(of: Tensor, *, of_columns: bool = False, both: bool = False) -> Tensor:
        of_chunks = (
            products(
                given, params, numbers, constants, of_columns=of_columns, both=both, need_sums=measure.has_own_part,
                budget=batch.loss.memory_budget // 2,
            ) for given in compared
        )  # fmt: skip
        total, sums = next(of_chunks)
        for product, row_sums in of_chunks:
            total.add_(product)
            sums.add_(row_sums)
        return measure.plus_own(total, of, sums)

    anchors = batch.anchors.points.detach()
    if batch.gallery is None:
        return Gradient(gradient(anchors, both=batch.columns_need_grad), None)
    by_columns = gradient(batch.columns.points.detach(), of_columns=True) if batch.columns_need_grad else None
    return Gradient(gradient(anchors), by_columns)
