"""Reads vectors and labels from .npy, .npz, .safetensors and .parquet files."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from nearfar.utils.system import require
from nearfar.utils.tensors import Array

ENDINGS = (".npy", ".npz", ".safetensors", ".parquet")
# Names of tensors and columns.
NAMES = {"embeddings": ("embeddings", "embedding", "X"), "labels": ("labels", "label", "y")}
DETAILS = {"names": ("names", "name"), "classes": ("classes",), "split": ("split",)}


def read(file: Path, what: str, key: str | None = None, *, shared: bool = False) -> Array:
    """Read the embeddings or labels of a file.

    An .npy file holds one array, which is memory-mapped.
    """
    if not file.is_file():
        raise FileNotFoundError(f"{file} does not exist, or is not a file")
    if file.suffix not in ENDINGS:
        raise ValueError(f"{file} has no known format; its name must end in {', '.join(ENDINGS)}")
    if file.suffix == ".npy":
        if shared:
            raise ValueError(f"{file} holds a single array; embeddings and labels need a file each")
        if key is not None:
            raise ValueError(f"{file} holds a single array without a name; {key!r} was asked for")
        with _reading(file):
            array: Array = np.load(file, mmap_mode="r", allow_pickle=False)
        return array
    with _open(file, what) as (names, get):
        return get(_choose(file, what, key, shared, names))


def has(file: Path, what: str) -> bool:
    """Whether a file has embeddings or labels under one of their names."""
    with _open(file, what) as (names, _):
        return not set(NAMES[what]).isdisjoint(names)


def read_details(file: Path) -> dict[str, np.ndarray[Any, np.dtype[Any]]]:
    """Read what a file says about its rows: their "names", the "classes" that labels number, and the "split"."""
    if file.suffix == ".safetensors":
        from safetensors import safe_open

        with _reading(file), safe_open(file, framework="pt") as tensors:
            about = tensors.metadata() or {}
            return {what: np.array(json.loads(about[what]), dtype=str) for what in DETAILS if what in about}
    with _open(file, "details") as (names, get):
        chosen = {what: next((name for name in allowed if name in names), None) for what, allowed in DETAILS.items()}
        return {what: np.asarray(get(name)) for what, name in chosen.items() if name is not None}


@contextmanager
def _open(file: Path, what: str) -> Iterator[tuple[list[str], Callable[[str], Array]]]:
    """Open a file of several arrays: yield their names, and a function that reads one of them."""
    with _reading(file), ExitStack() as stack:
        if file.suffix == ".npz":
            arrays = stack.enter_context(np.load(file, allow_pickle=False))
            if not hasattr(arrays, "files"):
                raise ValueError("it is not an archive of arrays")
            yield list(arrays.files), arrays.__getitem__
        elif file.suffix == ".safetensors":
            from safetensors import safe_open

            tensors = stack.enter_context(safe_open(file, framework="pt"))
            yield list(tensors.keys()), tensors.get_tensor
        elif file.suffix == ".parquet":
            require(str(file), "pyarrow", "nearfar[parquet]")
            from pyarrow import parquet

            table = stack.enter_context(parquet.ParquetFile(file))
            yield list(table.schema_arrow.names), lambda name: _column(file, table, name, lists=what == "embeddings")
        else:
            yield [], lambda name: np.empty(0)


@contextmanager
def _reading(file: Path) -> Iterator[None]:
    """Turn errors of a library, which are of many kinds for damaged files, into one line that names the file."""
    try:
        yield
    except Exception as error:
        if str(file) in str(error):
            raise
        raise ValueError(f"{file} cannot be read: {' '.join(str(error).split())}") from error


def _column(file: Path, table: Any, name: str, *, lists: bool) -> Array:
    """Read a column; one of lists becomes the rows of one array."""
    from pyarrow import compute, types

    column = table.read(columns=[name]).column(name)
    if column.null_count:
        raise ValueError(f"{file} has no value in {column.null_count} of {len(column)} rows of {name!r}")
    if not lists:
        labels: np.ndarray[Any, np.dtype[Any]] = column.to_numpy()
        return labels
    kind = column.type
    if not (types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)):
        raise ValueError(f"{file} holds {kind} in {name!r}; lists of numbers are needed")
    lengths = compute.unique(compute.list_value_length(column)).to_pylist() or [0]
    if len(lengths) > 1:
        shortest, longest = min(lengths), max(lengths)
        raise ValueError(f"{file} holds lists of {shortest} to {longest} numbers in {name!r}; they must be alike")
    parts = [chunk.flatten().to_numpy(zero_copy_only=False) for chunk in column.chunks]
    array = np.concatenate(parts) if parts else np.empty(0, dtype=np.float32)
    return array.reshape(len(column), lengths[0])


def _choose(file: Path, what: str, key: str | None, shared: bool, names: Sequence[str]) -> str:
    if key is not None:
        if key not in names:
            raise ValueError(f"{file} has no {key!r}; it holds {_and(names)}")
        return key
    named = [name for name in names if name in NAMES[what]]
    if len(named) == 1:
        return named[0]
    if not named and len(names) == 1 and not shared:
        return names[0]
    raise ValueError(f"{file} holds {_and(names)}; which of them are the {what} must be said by a key")


def _and(things: Sequence[object]) -> str:
    *most, last = [str(thing) for thing in things] or ["nothing"]
    return f"{', '.join(most)} and {last}" if most else last
