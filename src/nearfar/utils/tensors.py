"""Vectors, labels and devices: validation with errors that name the argument, and exact float32 arithmetic.

Losses take tensors only (``check_vectors``). Metrics also take NumPy arrays and memory maps, which they read one block
at a time, and tables and columns of pandas (``as_array``).
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

Array = Tensor | np.ndarray[Any, np.dtype[Any]]


class Frame(Protocol):
    """A table or column of pandas, or of another library that converts to NumPy in the same way."""

    def to_numpy(self) -> Any:
        """Return the values as a NumPy array."""


ArrayInput = Array | Frame

TORCH_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
NUMPY_FLOATS = (np.float16, np.float32, np.float64)  # in native byte order
BLOCK_BYTES = 1 << 24  # bytes of a memory map that are read at once
NOT_PAIRS = "; to say which pairs are the same, use nearfar.supervision.Pairs"


def check_vectors(name: str, vectors: Tensor, labels_name: str, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Check the vectors and labels of a loss; return float32 or float64, and int64 on the same device."""
    check_values(labels_name, labels, only_tensors=True)
    vectors = check_embeddings(name, vectors)
    if labels.ndim != 1 or labels.shape[0] != vectors.shape[0]:
        raise ValueError(
            f"{labels_name} has shape {tuple(labels.shape)}; needed is [{len(vectors)}], one for each row of {name}"
            f"{NOT_PAIRS}"
        )
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise TypeError(
            f"{labels_name} is of {labels.dtype}; whole numbers are needed, the class of each row{NOT_PAIRS}"
        )
    return vectors, labels.to(vectors.device, torch.int64)


def check_embeddings(name: str, vectors: Tensor) -> Tensor:
    """Check the vectors of a loss, [m, d]; return them as float32 or float64."""
    check_values(name, vectors, only_tensors=True)
    if vectors.ndim != 2 or 0 in vectors.shape:
        raise ValueError(f"{name} has shape {tuple(vectors.shape)}; needed is [m, d] with m ≥ 1 and d ≥ 1")
    if not vectors.is_floating_point():
        raise TypeError(f"{name} is of {vectors.dtype}; floating point is needed")
    if vectors.dtype in (torch.float16, torch.bfloat16):
        vectors = vectors.float()
    if readable(vectors) and not math.isfinite(vectors.detach().sum(dtype=torch.float64).item()):
        check_finite(name, vectors)
    return vectors


def check_input(x: Tensor, network: str, channels: int, *, images: bool) -> None:
    """Validate the input of a network."""
    if not x.is_floating_point():
        hint = "; apply the Normalization of the network to pixels first" if images else ""
        raise TypeError(f"input is of {x.dtype}; floating point is needed{hint}")
    if x.ndim != (4 if images else 2) or x.shape[1] != channels:
        needed = f"[b, {channels}, h, w]" if images else f"[b, {channels}]"
        raise ValueError(f"input has shape {tuple(x.shape)}; {network} reads {needed}")


def as_array(name: str, values: Any) -> Any:
    """Convert a table or column, such as a DataFrame or a Series of pandas, to a NumPy array.

    Anything else is returned as it is, for the checks that follow.
    """
    if isinstance(values, (Tensor, np.ndarray)) or not hasattr(values, "to_numpy"):
        return values
    array = values.to_numpy()
    if array.ndim == 2 and array.dtype.kind not in "fiu":
        kinds = {key: values[key].to_numpy().dtype for key in values.columns}
        wrong = [f"{key!r} of {kind}" for key, kind in kinds.items() if kind.kind not in "fiu"]
        raise TypeError(f"{name} has {', '.join(wrong)}; all columns must hold numbers")
    return array


def check_values(name: str, array: Array, *, only_tensors: bool = False) -> None:
    """Raise TypeError unless an array has a value in every place: no meta, sparse or nested tensor, no masked array."""
    if only_tensors and not isinstance(array, Tensor):
        raise TypeError(f"{name} is a {type(array).__name__}; a torch.Tensor is needed")
    if isinstance(array, Tensor):
        if array.is_nested or array.layout is not torch.strided:
            kind = "nested" if array.is_nested else f"{array.layout}"
            raise TypeError(f"{name} is a tensor of layout {kind}; a dense tensor is needed")
        if array.device.type == "meta":
            raise TypeError(f"{name} is on the meta device; a tensor with values is needed")
    elif isinstance(array, np.ma.MaskedArray):
        raise TypeError(f"{name} is a masked array; an array without a mask is needed: fill or remove masked values")


def readable(tensor: Tensor) -> bool:
    """Whether a tensor can be read without making the host wait for a GPU."""
    return tensor.device.type == "cpu"


def is_integer(tensor: Tensor) -> bool:
    """Whether a tensor has an integer dtype; bool does not count."""
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)


def as_vectors(name: str, array: ArrayInput) -> Tensor:
    """Convert vectors [n, d] to a tensor of the same dtype on the same device; a memory map is not read.

    Call :func:`check_finite` afterwards, which reads them.
    """
    array = _checked_array(name, array)
    if array.ndim != 2 or 0 in array.shape:
        raise ValueError(f"{name} has shape {tuple(array.shape)}; needed is [n, d] with n ≥ 1 and d ≥ 1")
    if array.dtype not in (NUMPY_FLOATS if isinstance(array, np.ndarray) else TORCH_FLOATS):
        raise TypeError(f"{name} is of {array.dtype}; floating point of 16, 32 or 64 bits is needed")
    return _from_numpy(array) if isinstance(array, np.ndarray) else array.detach()


def as_labels(name: str, array: ArrayInput, count: int | None = None) -> Tensor:
    """Convert labels to an int64 tensor. Text is numbered in sorted order."""
    array = _checked_labels(name, array, count)
    return _codes(array) if isinstance(array, np.ndarray) else array


def as_label_pair(
    name: str, array: ArrayInput, count: int, other_name: str, other: ArrayInput, other_count: int
) -> tuple[Tensor, Tensor]:
    """Convert two arrays of labels consistently: the same text gets the same number in both."""
    array, other = _checked_labels(name, array, count), _checked_labels(other_name, other, other_count)
    if isinstance(array, np.ndarray) and isinstance(other, np.ndarray):
        codes = _codes(np.concatenate([array, other]))
        return codes[:count], codes[count:]
    if isinstance(array, Tensor) and isinstance(other, Tensor):
        return array, other
    kind, other_kind = ("whole numbers" if isinstance(labels, Tensor) else "text" for labels in (array, other))
    raise TypeError(f"{name} holds {kind} and {other_name} {other_kind}; both must hold the same")


def blocks(vectors: Tensor, size: int) -> Iterator[slice]:
    """Yield slices of rows of at most ``size`` bytes each, or of one row."""
    rows = max(1, size // (vectors.shape[1] * vectors.element_size()))
    for start in range(0, len(vectors), rows):
        yield slice(start, min(start + rows, len(vectors)))


def check_finite(name: str, vectors: Tensor) -> None:
    """Raise an error if vectors contain NaN or infinity; reads one block of rows at a time."""
    bad_rows, first = 0, -1
    for rows in blocks(vectors, BLOCK_BYTES):
        block = vectors[rows].detach()
        # If the sum is finite, so are all numbers; otherwise look at each of them.
        if math.isfinite(block.sum(dtype=torch.promote_types(block.dtype, torch.float32)).item()):
            continue
        bad = (~block.isfinite()).any(dim=1).nonzero()
        if len(bad) and first < 0:
            first = rows.start + int(bad[0])
        bad_rows += len(bad)
    if bad_rows:
        raise ValueError(
            f"{name} contains NaN or infinity in {bad_rows} of {len(vectors)} rows; the first is row {first}"
        )


def _from_numpy(array: np.ndarray[Any, np.dtype[Any]]) -> Tensor:
    """Share the array's memory as a tensor; copy it if tensors cannot have its strides."""
    with warnings.catch_warnings():
        # About read-only arrays, which are not written to.
        warnings.filterwarnings("ignore", message=".*not writable", category=UserWarning)
        try:
            return torch.from_numpy(array)
        except ValueError:
            return torch.from_numpy(array.copy())


def _checked_array(name: str, values: ArrayInput) -> Array:
    array: Array = as_array(name, values)
    if not isinstance(array, (Tensor, np.ndarray)):
        raise TypeError(f"{name} is a {type(array).__name__}; a torch.Tensor or NumPy array is needed")
    check_values(name, array)
    return array


def _checked_labels(name: str, array: ArrayInput, count: int | None) -> Array:
    """Validate labels; return numbers as an int64 tensor, and text as it is."""
    array = _checked_array(name, array)
    if array.ndim != 1 or (len(array) != count if count is not None else len(array) == 0):
        needed = "[n] with n ≥ 1" if count is None else f"[{count}], one for each vector"
        raise ValueError(f"{name} has shape {tuple(array.shape)}; needed is {needed}")
    if isinstance(array, Tensor):
        if not is_integer(array):
            raise TypeError(f"{name} is of {array.dtype}; whole numbers are needed")
        return array.detach().long()
    if array.dtype.kind in "iu":
        return torch.from_numpy(array.astype(np.int64))
    if array.dtype.kind in "UST" or (array.dtype.kind == "O" and all(isinstance(word, str) for word in array)):
        return array
    raise TypeError(f"{name} is of {array.dtype}; whole numbers or text are needed")


def _codes(words: np.ndarray[Any, np.dtype[Any]]) -> Tensor:
    return torch.from_numpy(np.unique(words, return_inverse=True)[1].astype(np.int64))


def as_device(name: str, word: str, *, local: int | None = None) -> torch.device:
    """Convert a device name to a device."""
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", word):
        raise ValueError(
            f"{name} is {word!r}; allowed are auto, cpu, cuda and, where there are several GPUs, cuda:1 and so on"
        )
    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if word == "cpu" or (word == "auto" and not there):
        return torch.device("cpu")
    if word in ("auto", "cuda") and there:
        return torch.device("cuda") if local is None else torch.device("cuda", local % there)
    device = torch.device(word)
    if (device.index or 0) >= there:
        raise ValueError(f"{name} is {word!r}; the number of GPUs that PyTorch finds is {there}")
    return device


class _NotDrawn(TorchFunctionMode):
    """Leaves tensors as they are where random numbers would be drawn."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        settings = kwargs or {}
        if getattr(func, "__name__", "") in ("normal_", "uniform_"):  # methods, and functions of torch.nn.init
            return args[0] if args else settings["tensor"]
        return func(*args, **settings)


@contextmanager
def shapes_only() -> Iterator[None]:
    """Create modules on the device "meta": with shapes, without memory and random numbers.

    Drawing random numbers there would import PyTorch's compiler, which takes seconds.
    """
    with torch.device("meta"), _NotDrawn():
        yield


def unit_rows(points: Tensor) -> Tensor:
    """Normalize rows of float64 without overflow or underflow; zero rows stay zero."""
    # Smaller numbers may be flushed to zero.
    points = points / points.abs().amax(dim=1, keepdim=True).clamp_(min=torch.finfo(torch.float64).tiny)
    norms: Tensor = torch.linalg.vector_norm(points, dim=1, keepdim=True)
    return points.div_(norms.masked_fill_(norms == 0, 1.0))


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Compute matrix products in the precision of their inputs, regardless of autocast and TF32 settings.

    The float32 precision is that of all threads: the first one to enter sets it, the last one to leave restores it.
    """
    with _products.lock:
        _products.inside += 1
        if _products.inside == 1:
            _products.before = [(library, library.fp32_precision) for library in _libraries()]
            for library, _ in _products.before:
                library.fp32_precision = "ieee"
    try:
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        with _products.lock:
            _products.inside -= 1
            for library, precision in () if _products.inside else _products.before:
                library.fp32_precision = "none"  # inherit torch.backends.fp32_precision
                if library.fp32_precision != precision:
                    library.fp32_precision = precision


class _OneWord:
    """The global setting of older PyTorch versions, with the attribute that newer ones have per library."""

    @property
    def fp32_precision(self) -> str:
        return torch.get_float32_matmul_precision()

    @fp32_precision.setter
    def fp32_precision(self, word: str) -> None:
        torch.set_float32_matmul_precision("highest" if word in ("ieee", "none") else word)


@dataclass
class _Products:
    """The matrix products of all threads."""

    lock: Lock = field(default_factory=Lock)
    inside: int = 0  # blocks of ``full_precision`` that are open
    before: list[tuple[Any, str]] = field(default_factory=list)  # libraries and their precision outside of these


def _libraries() -> list[Any]:
    both = (torch.backends.cuda.matmul, getattr(torch.backends.mkldnn, "matmul", None))
    return [library for library in both if hasattr(library, "fp32_precision")] or [_OneWord()]


_products = _Products()
