"""Triton, if it is installed, and whether it runs on a device. Importing this module imports Triton."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # this module can be read without it, not run
    triton = tl = None

OLDEST = (8, 0)  # compute capability: bfloat16 and TF32
OLDEST_TRITON = (3, 6)  # the oldest version that has run the kernels; earlier ones lack parts of the language


def jit(function: Callable[..., Any] | None = None, *, one_kernel_for: Sequence[str] = ()) -> Any:
    """Compile a function with Triton when it is called; without Triton, return it as it is."""
    if function is None:
        return partial(jit, one_kernel_for=one_kernel_for)
    if triton is None:
        return function
    arguments = inspect.signature(function).parameters
    return triton.jit(function, do_not_specialize=[name for name in one_kernel_for if name in arguments])


@jit
def _add_one(x):  # type: ignore[no-untyped-def]
    tl.store(x, tl.load(x) + 1.0)


def interpreted() -> bool:
    """Whether Triton runs in its interpreter, which works on tensors of the CPU."""
    return triton is not None and not isinstance(_add_one, triton.JITFunction)


@cache
def usable(device: torch.device) -> bool:
    """Whether Triton works on a device; it needs a C compiler on top of a GPU. Warns if it should work and does not.

    Versions of Triton before ``OLDEST_TRITON`` are not used.
    """
    if interpreted():
        return True
    if triton is None or device.type != "cuda" or torch.cuda.get_device_capability(device) < OLDEST:
        return False
    if tuple(int(part) for part in triton.__version__.split(".")[:2]) < OLDEST_TRITON:
        return False
    try:
        with torch.cuda.device(device):
            _add_one[(1,)](torch.zeros(1, device=device))
    except Exception as error:  # whatever it is, PyTorch can compute the same
        warnings.warn(f"Triton does not work on {device}, so PyTorch is used: {error}", stacklevel=2)
        return False
    return True


@cache
def processors(device: torch.device) -> int:
    """Return the number of multiprocessors of a GPU; 4 for the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
