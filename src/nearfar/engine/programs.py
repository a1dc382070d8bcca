"""Pair losses as programs for the Triton kernels, which compute large batches on a GPU.

A loss describes itself as a ``Program``: what is summed over the positives and over the negatives of a row, and the
loss as a function of these sums. Losses without a program, other supervision than labels, float64 and tensors on a CPU
use the tiles of ``engine.tiles``. The kernels are in ``engine.triton_kernels``.
"""

from __future__ import annotations

import importlib.util
import math
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from torch import Tensor

from nearfar.engine.measures import Measure
from nearfar.engine.rows import masked
from nearfar.utils.validation import one_of

if TYPE_CHECKING:
    from nearfar.engine.tiles import TiledBatch

PRECISIONS = ("float32", "tf32", "bfloat16")


@dataclass(frozen=True)
class Terms:
    """What is summed over the positives, or over the negatives, of a row with values v."""

    # Exponents of a log-sum-exp. "linear": logit_scale · v. "circle": logit_scale · w · (v − delta) with the constant
    # w = [v − optimum]+, or [optimum − v]+ if logit_scale is negative. "none": there is none.
    logit: str = "none"
    logit_scale: float = 1.0
    optimum: float = 0.0
    delta: float = 0.0
    # Terms of a sum, where z = scale · v + shift. "linear": z, "square": z², "hinge": [z]+, "squared_hinge": [z]+²,
    # "softplus": log(1 + e^z). "none": there is none.
    total: str = "none"
    scale: float = 1.0
    shift: float = 0.0
    expected: bool = False  # whether the loss uses `Sums.expected`

    def numbers(self) -> tuple[float, ...]:
        """Return the numbers that the kernels take."""
        return self.logit_scale, self.optimum, self.delta, self.scale, self.shift


@dataclass(frozen=True)
class Sums:
    """Sums over the selected positives, or negatives, of each anchor, [m] each."""

    log: Tensor  # the log-sum-exp of the exponents; FLOOR without a pair
    expected: Tensor  # the mean of v with the weights of the softmax, as constants; 0 without a pair or if not used
    total: Tensor  # the sum
    active: Tensor  # its terms that are not zero; of "softplus" the sum of the sigmoids if shifted, otherwise 0
    number: Tensor  # the pairs


@dataclass(frozen=True)
class Program:
    """A loss in terms of sums over rows."""

    positives: Terms
    negatives: Terms
    loss: Callable[[Sums, Sums], Tensor] = field(compare=False)  # of the sums over positives and negatives, by autograd
    # A shift of each anchor's sums. "negatives": `log` of the negatives is added in the sum over the positives.
    # "anchor_values": they are subtracted in the sum over the positives and added in the other.
    shift: str = "none"
    # Only positives of a smaller and negatives of a larger similarity than these are used.
    bounds: tuple[float, float] = (math.inf, -math.inf)
    valid_triplet: float | None = None  # margin of the mining of that name; None: no mining


@dataclass(frozen=True)
class AllTriplets:
    """Says that a loss is the mean of [x]+ over all triplets, with x = s_n − s_p + margin.

    A kernel sums over the negatives of each positive, and another one computes the weights of the negatives.
    """

    margin: float
    soft: bool  # log(1 + e^x) instead of [x]+
    active: bool  # the mean over the triplets with a loss above zero


# The names are those of minings: the loss depends on nothing but the pairs that they select of each anchor. A kernel
# finds these pairs, and PyTorch computes the loss of them; of "semi_hard", it mines among them. For "semi_hard" and all
# triplets the host waits for the largest number of positives; with more than 15, PyTorch computes everything.
KernelProgram = Program | AllTriplets | Literal["hard", "semi_hard"]
AUTOMATIC = 1 << 24  # pairs: from here on the kernels were faster than PyTorch for every loss, or as fast


class Setting:
    """Whether the kernels are used."""

    precision: ClassVar[str | None] = "float32"  # of products; None: the kernels are off
    smallest: ClassVar[int] = AUTOMATIC  # pairs from which on they are used


class KernelError(RuntimeError):
    """Triton cannot compile a kernel for this GPU, or the GPU has no room for it."""


def fall_back(error: KernelError) -> None:
    """Use PyTorch from now on, with a warning; raise the error if the kernels were turned on explicitly."""
    if Setting.smallest != AUTOMATIC:
        raise error
    warnings.warn(f"the fused kernels do not work on this GPU, so PyTorch is used: {error}", stacklevel=2)
    Setting.precision = None


def use_triton(enabled: bool | None = True, *, precision: str = "float32") -> None:
    """Say whether pair losses on a GPU are computed by fused Triton kernels, in this process.

    By default they are, in float32, for batches of at least 4,096 × 4,096 pairs, if Triton 3.6 or later is
    installed. Losses and inputs that the kernels cannot compute always use PyTorch.

    Args:
        enabled: True: for batches of every size. False: never. None: for large batches, as by default.
        precision: Products of embeddings: "float32" (three products of float16 each, which keep 22 bits), "tf32" or
            "bfloat16". Sums are float32.

    Raises:
        ImportError: If Triton is not installed.

    Example:
        >>> use_triton(None)
    """
    one_of("precision", precision, PRECISIONS)
    if enabled and importlib.util.find_spec("triton") is None:
        raise ImportError("use_triton needs Triton, which is not installed: pip install triton")
    Setting.precision = None if enabled is False else precision
    Setting.smallest = AUTOMATIC if enabled is None else 0


def mean_over(total: Tensor, count: Tensor) -> Tensor:
    """Return Σ total / Σ count; 0 if nothing was counted."""
    number = count.detach().sum()
    return total.sum() / masked(number, number > 0, 1.0)


def applies(batch: TiledBatch) -> bool:
    """Whether the kernels can compute a batch, if its loss has a program."""
    if batch.labels is None or batch.embeddings.dtype != torch.float32:
        return False
    if type(batch.measure) is not Measure:
        return False
    if batch.embeddings.device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return False
    from nearfar.utils.kernels import usable

    return usable(batch.embeddings.device)
