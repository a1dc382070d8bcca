"""Reads vectors and labels from .npy, .npz, .safetensors and .parquet files."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np

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
        array: Array = _load(file, mmap_mode="r")
        return array
    reader = {".npz": _read_npz, ".safetensors": _read_safetensors, ".parquet": _read_parquet}[file.suffix]
    return reader(file, what, key, shared)


def has(file: Path, what: str) -> bool:
    """Whether a file has embeddings or labels under one of their names."""
    return not set(NAMES[what]).isdisjoint(_names(file))


def read_details(file: Path) -> dict[str, np.ndarray[Any, np.dtype[Any]]]:
    """Read what a file says about its rows: their "names", the "classes" that labels number, and the "split"."""
    if file.suffix == ".safetensors":
        from safetensors import safe_open

        with _reading(file), safe_open(file, framework="pt") as tensors:
            about = tensors.metadata() or {}
            return {what: np.array(json.loads(about[what]), dtype=str) for what in DETAILS if what in about}
    there = set(_names(file))
    found = {what: next((name for name in names if name in there), None) for what, names in DETAILS.items()}
    reader = {".npz": _read_npz, ".parquet": _read_parquet}.get(file.suffix)
    if reader is None:
        return {}
    return {what: np.asarray(reader(file, what, name, False)) for what, name in found.items() if name is not None}


def _names(file: Path) -> list[str]:
    """Return the names of the arrays, tensors or columns of a file."""
    if file.suffix == ".npz":
        with _load(file) as arrays:
            return list(getattr(arrays, "files", ()))
    if file.suffix == ".safetensors":
        from safetensors import safe_open

        with _reading(file), safe_open(file, framework="pt") as tensors:
            return list(tensors.keys())
    if file.suffix == ".parquet":
        with _reading(file), _parquet(file) as table:
            return list(table.schema_arrow.names)
    return []


@contextmanager
def _reading(file: Path) -> Iterator[None]:
    """Turn errors of a library, which are of many kinds for damaged files, into one line that names the file."""
    try:
        yield
    except Exception as error:
        if str(file) in str(error):
            raise
        raise ValueError(f"{file} cannot be read: {' '.join(str(error).split())}") from error


def _load(file: Path, mmap_mode: Literal["r"] | None = None) -> Any:
    with _reading(file):
        return np.load(file, mmap_mode=mmap_mode, allow_pickle=False)


def _read_npz(file: Path, what: str, key: str | None, shared: bool) -> Array:
    with _load(file) as arrays:
        if not hasattr(arrays, "files"):
            raise ValueError(f"{file} cannot be read: it is not an archive of arrays")
        name = _choose(file, what, key, shared, arrays.files)
        with _reading(file):
            array: Array = arrays[name]
    return array


def _read_safetensors(file: Path, what: str, key: str | None, shared: bool) -> Array:
    from safetensors import safe_open

    with _reading(file), safe_open(file, framework="pt") as tensors:
        array: Array = tensors.get_tensor(_choose(file, what, key, shared, list(tensors.keys())))
    return array


def _read_parquet(file: Path, what: str, key: str | None, shared: bool) -> Array:
    with _reading(file), _parquet(file) as table:
        name = _choose(file, what, key, shared, table.schema_arrow.names)
        column = table.read(columns=[name]).column(name)
    if column.null_count:
        raise ValueError(f"{file} has no value in {column.null_count} of {len(column)} rows of {name!r}")
    if what != "embeddings":
        labels: np.ndarray[Any, np.dtype[Any]] = column.to_numpy()
        return labels
    return _stack(file, name, column)


def _parquet(file: Path) -> Any:
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise ImportError(f"{file} needs pyarrow; install it with: pip install 'nearfar[parquet]'") from error
    return parquet.ParquetFile(file)


def _stack(file: Path, name: str, column: Any) -> Array:
    """A column of lists as rows of one array."""
    from pyarrow import compute, types

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
