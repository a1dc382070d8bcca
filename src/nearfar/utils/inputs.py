"""Vectors, labels and the word for a device as they come in: checked once, with errors that name the argument.

Losses take tensors only (``check_vectors``). Metrics also take NumPy arrays and memory maps, and never read
more of one than a block at a time.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

Array = Tensor | np.ndarray[Any, np.dtype[Any]]

TORCH_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
NUMPY_FLOATS = (np.float16, np.float32, np.float64)  # in this machine's byte order
BLOCK_BYTES = 1 << 24  # of a memory map that are looked at together


def check_vectors(name: str, vectors: Tensor, labels_name: str, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Vectors [m, d] as float32 or float64 and labels [m] as int64 on their device, for a loss.

    NaN and infinity are not looked for on a GPU, where that would stop the host.
    """
    for argument, value in ((name, vectors), (labels_name, labels)):
        if not isinstance(value, Tensor):
            raise TypeError(f"{argument} is a {type(value).__name__}; a torch.Tensor is needed")
    _check_shape(name, vectors, "m")
    if not vectors.is_floating_point():
        raise TypeError(f"{name} is of {vectors.dtype}; floating point is needed")
    if labels.ndim != 1 or labels.shape[0] != vectors.shape[0]:
        raise ValueError(
            f"{labels_name} has shape {tuple(labels.shape)}; needed is [{len(vectors)}], one for each row of {name}"
        )
    if not is_integer(labels):
        raise TypeError(f"{labels_name} is of {labels.dtype}; whole numbers are needed")
    if vectors.dtype in (torch.float16, torch.bfloat16):
        vectors = vectors.float()
    if readable(vectors):
        check_finite(name, vectors)
    return vectors, labels.to(vectors.device, torch.int64)


def readable(tensor: Tensor) -> bool:
    """Whether a tensor's numbers can be looked at without stopping the host for a GPU."""
    return tensor.device.type == "cpu"


def is_integer(tensor: Tensor) -> bool:
    """Whether a tensor holds whole numbers; truth values are none."""
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)


def as_vectors(name: str, array: Array) -> Tensor:
    """Vectors [n, d] as a tensor of the dtype and on the device they have; a memory map is not read.

    Follow with :func:`check_finite`, which does read them.

    >>> as_vectors("embeddings", np.zeros((2, 3), dtype=np.float16)).dtype
    torch.float16
    """
    if not isinstance(array, (Tensor, np.ndarray)):
        raise TypeError(f"{name} is a {type(array).__name__}; a torch.Tensor or NumPy array is needed")
    _check_shape(name, array, "n")
    if array.dtype not in (NUMPY_FLOATS if isinstance(array, np.ndarray) else TORCH_FLOATS):
        raise TypeError(f"{name} is of {array.dtype}; floating point of 16, 32 or 64 bits is needed")
    return _from_numpy(array) if isinstance(array, np.ndarray) else array.detach()


def as_labels(name: str, array: Array, count: int | None = None) -> Tensor:
    """Labels [count] as int64. NumPy arrays may hold text: each word becomes its place in the sorted list of words.

    Any number of labels, but not none, where ``count`` is not given.

    >>> as_labels("labels", np.array(["jay", "wren", "jay"]), 3)
    tensor([0, 1, 0])
    """
    array = _checked_labels(name, array, count)
    return _codes(array) if isinstance(array, np.ndarray) else array


def as_label_pair(
    name: str, array: Array, count: int, other_name: str, other: Array, other_count: int
) -> tuple[Tensor, Tensor]:
    """Two arrays of labels that are compared with each other: the same word is the same number in both."""
    array, other = _checked_labels(name, array, count), _checked_labels(other_name, other, other_count)
    if isinstance(array, np.ndarray) and isinstance(other, np.ndarray):
        codes = _codes(np.concatenate([array, other]))
        return codes[:count], codes[count:]
    if isinstance(array, Tensor) and isinstance(other, Tensor):
        return array, other
    kind, other_kind = ("whole numbers" if isinstance(labels, Tensor) else "text" for labels in (array, other))
    raise TypeError(f"{name} holds {kind} and {other_name} {other_kind}; both must hold the same")


def blocks(vectors: Tensor, size: int) -> Iterator[slice]:
    """Slices of rows, each of at most this many bytes, or of one row."""
    rows = max(1, size // (vectors.shape[1] * vectors.element_size()))
    for start in range(0, len(vectors), rows):
        yield slice(start, min(start + rows, len(vectors)))


def check_finite(name: str, vectors: Tensor) -> None:
    """Refuse NaN and infinity; a block of rows at a time."""
    strange, first = 0, -1
    for rows in blocks(vectors, BLOCK_BYTES):
        block = vectors[rows].detach()
        # A finite sum is proof enough; only a strange one is worth a look at every number.
        if math.isfinite(block.sum(dtype=torch.promote_types(block.dtype, torch.float32)).item()):
            continue
        bad = (~block.isfinite()).any(dim=1).nonzero()
        if len(bad) and first < 0:
            first = rows.start + int(bad[0])
        strange += len(bad)
    if strange:
        raise ValueError(
            f"{name} contains NaN or infinity in {strange} of {len(vectors)} rows; the first is row {first}"
        )


def _check_shape(name: str, array: Array, letter: str) -> None:
    if array.ndim != 2 or 0 in array.shape:
        raise ValueError(f"{name} has shape {tuple(array.shape)}; needed is [{letter}, d] with {letter} ≥ 1 and d ≥ 1")


def _from_numpy(array: np.ndarray[Any, np.dtype[Any]]) -> Tensor:
    """The array's own memory as a tensor; copied where its strides are none that tensors have."""
    with warnings.catch_warnings():
        # Of arrays that may not be written to: nobody here writes to them.
        warnings.filterwarnings("ignore", message=".*not writable", category=UserWarning)
        try:
            return torch.from_numpy(array)
        except ValueError:
            return torch.from_numpy(array.copy())


def _checked_labels(name: str, array: Array, count: int | None) -> Array:
    """Numbers as an int64 tensor, text as the array it is."""
    if not isinstance(array, (Tensor, np.ndarray)):
        raise TypeError(f"{name} is a {type(array).__name__}; a torch.Tensor or NumPy array is needed")
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
    """Where to compute: "cpu", "cuda", "cuda:1" and so on, or "auto", a GPU where there is one.

    Args:
        name: What errors call it.
        local: Which of the processes of this machine asks; "auto" and "cuda" then are a GPU of its own.

    >>> as_device("device", "cpu")
    device(type='cpu')
    """
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
