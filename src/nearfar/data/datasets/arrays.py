"""Vectors or images in memory or in an .npz file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from nearfar.data.datasets.base import Dataset, Root, encode_labels, encode_parts, register
from nearfar.data.store.sources import Arrays, Vectors
from nearfar.utils.tensors import as_vectors, check_finite, check_values

Array = np.ndarray[Any, np.dtype[Any]]


@register
def arrays(
    root: Root | None = None,
    *,
    X: Any = None,
    y: Any = None,
    split: Sequence[str] | Array | None = None,
    name: str = "arrays",
) -> Dataset:
    """Vectors [n, d] or images [n, h, w] or [n, h, w, 3] from memory or an .npz file.

    Vectors are converted to float32; images must be uint8. Labels are integers or text; classes are sorted by them.

    Args:
        root: An .npz file with the arrays X, y and optionally split, in place of these arguments.
        X: Vectors or images: an array, a tensor or a list.
        y: Label of each row.
        split: Part of each row: train, validation, test, query or gallery; None if there are no parts.
        name: Name of the dataset in results.

    Example:
        >>> arrays(X=np.eye(4), y=["jay", "jay", "wren", "wren"])
        Dataset('arrays': 4 of 2 classes; all 4; 0 notes)
    """
    if root is not None:
        if X is not None or y is not None:
            raise TypeError("root and X or y were given; pass either a file or arrays")
        X, y, split = _load(Path(root), split)
    if X is None or y is None:
        raise TypeError("arrays needs X and y, or root, an .npz file that contains them")
    values, targets = _as_array("X", X), _as_array("y", y)
    if targets.ndim != 1 or len(targets) != len(values):
        raise ValueError(f"y has shape {list(targets.shape)}; needed is [{len(values)}], one label for each row of X")
    if targets.dtype.kind not in "iuUO" or (targets.dtype.kind == "O" and not all(isinstance(w, str) for w in targets)):
        raise TypeError(f"y is of {targets.dtype}; whole numbers or text are needed")
    classes, labels = encode_labels(targets)
    return Dataset(name, _source(values), labels, classes, encode_parts(split, len(labels)))


def from_arrays(X: Any, y: Any, *, split: Sequence[str] | Array | None = None, name: str = "arrays") -> Dataset:
    """Create a dataset from vectors [n, d] or images [n, h, w] or [n, h, w, 3] in memory.

    Args:
        X: Vectors, converted to float32, or uint8 images: an array, a tensor or a list.
        y: Label of each row, integers or text.
        split: Part of each row: train, validation, test, query or gallery; None if there are no parts.
        name: Name of the dataset in results.

    Example:
        >>> data = from_arrays(np.zeros((6, 8, 8), dtype=np.uint8), np.array([7, 7, 7, 3, 3, 3]))
        >>> data.classes, data.labels
        (('3', '7'), array([1, 1, 1, 0, 0, 0]))
    """
    return arrays(X=X, y=y, split=split, name=name)


def _source(values: Array) -> Arrays:
    if values.dtype == np.uint8 and values.ndim == 4 and values.shape[3] == 1:
        values = values[..., 0]
    if values.ndim != 2:
        try:
            return Arrays(values)
        except ValueError as error:
            raise ValueError(f"X: {error}; vectors are [n, d]") from error
    if values.dtype.kind in "iu":
        values = values.astype(np.float32)
    check_finite("X", as_vectors("X", values))
    return Vectors(values if values.dtype == np.float32 else values.astype(np.float32))


def _as_array(name: str, value: Any) -> Array:
    if hasattr(value, "detach") or isinstance(value, np.ndarray):
        check_values(name, value)
    if hasattr(value, "detach"):  # a tensor
        value = value.detach().cpu().numpy()
    if isinstance(value, np.ndarray):
        return value
    if isinstance(value, (list, tuple)):
        return np.asarray(value)
    raise TypeError(f"{name} is a {type(value).__name__}; a NumPy array, a tensor or a list is needed")


def _load(file: Path, split: Any) -> tuple[Array, Array, Any]:
    if not file.is_file():
        raise FileNotFoundError(f"root is {file}; there is no such file")
    try:
        loaded = np.load(file, mmap_mode="r", allow_pickle=False)
        if isinstance(loaded, np.ndarray):
            raise ValueError("it contains one array; X and y are needed")
        with loaded as content:
            missing = [key for key in ("X", "y") if key not in content]
            if missing:
                raise ValueError(
                    f"it has no {' and no '.join(missing)}; it has {', '.join(content.files) or 'nothing'}"
                )
            return content["X"], content["y"], content["split"] if split is None and "split" in content else split
    except (ValueError, OSError, EOFError) as error:
        raise ValueError(f"{file} cannot be used as arrays: {error}") from error
