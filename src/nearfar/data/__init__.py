"""Datasets, image stores, splits, samplers, augmentation and the loader.

Names are imported when they are first used, so that a process that only decodes images does not wait for PyTorch.

Example:
    >>> from nearfar import data
    >>> digits = data.open("digits")
    >>> split = data.splits.standard(digits)
    >>> split.train.shape, split.test["test"].shape
    ((901,), (896,))
"""

from typing import TYPE_CHECKING

from nearfar.utils.lazy import lazy

if TYPE_CHECKING:
    from nearfar.data import datasets, loader, preview, sampling, splits, store, transforms  # noqa: F401
    from nearfar.data.datasets import from_arrays
    from nearfar.data.datasets.base import Dataset, describe, names, open, problems, register, summary
    from nearfar.data.loader import Batch, Loader
    from nearfar.data.splits import Split
    from nearfar.data.store.prepare import prepare
    from nearfar.data.store.store import BadFile, Store
    from nearfar.data.transforms.view import View

_MODULES = ("datasets", "loader", "preview", "sampling", "splits", "store", "transforms")
_NAMES = {
    "BadFile": "store.store",
    "Batch": "loader",
    "Dataset": "datasets.base",
    "Loader": "loader",
    "Split": "splits",
    "Store": "store.store",
    "View": "transforms.view",
    "describe": "datasets.base",
    "from_arrays": "datasets",
    "names": "datasets.base",
    "open": "datasets.base",
    "prepare": "store.prepare",
    "problems": "datasets.base",
    "register": "datasets.base",
    "summary": "datasets.base",
}
__all__ = [
    "BadFile", "Batch", "Dataset", "Loader", "Split", "Store", "View", "describe", "from_arrays", "names", "open",
    "prepare", "problems", "register", "sampling", "splits", "summary",
]  # fmt: skip
__getattr__ = lazy(__name__, _MODULES, _NAMES)


def __dir__() -> list[str]:
    return __all__
