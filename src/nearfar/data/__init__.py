"""Datasets, image stores, splits, samplers, augmentation and the loader.

Example:
    >>> from nearfar import data
    >>> digits = data.open("digits")
    >>> split = data.splits.standard(digits)
    >>> split.train.shape, split.test["test"].shape
    ((901,), (896,))
"""

from typing import TYPE_CHECKING, Any

from nearfar.data import sampling, splits
from nearfar.data.datasets import from_arrays
from nearfar.data.datasets.base import Dataset, describe, names, open, problems, register, summary
from nearfar.data.loader import Batch, Loader
from nearfar.data.splits import Split
from nearfar.data.store.store import BadFile, Store
from nearfar.data.transforms.view import View

if TYPE_CHECKING:
    from nearfar.data.store.prepare import prepare

__all__ = [
    "BadFile", "Batch", "Dataset", "Loader", "Split", "Store", "View", "describe", "from_arrays", "names", "open",
    "prepare", "problems", "register", "sampling", "splits", "summary",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Import ``prepare`` on first use: it needs Pillow, and opening a dataset does not."""
    if name == "prepare":
        from nearfar.data.store.prepare import prepare

        return prepare
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
