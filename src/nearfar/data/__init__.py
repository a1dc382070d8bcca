"""From files to augmented batches: a data set, a store of its pictures, samplers, views, and a loader.

>>> from nearfar import data
>>> digits = data.open("digits")
>>> split = data.splits.standard(digits)
>>> split.train.shape, split.test["test"].shape
((901,), (896,))
"""

from typing import TYPE_CHECKING, Any

from nearfar.data import splits
from nearfar.data.datasets import from_arrays
from nearfar.data.datasets.base import Dataset
from nearfar.data.datasets.registry import describe, names, open, problems, register, summary
from nearfar.data.loader import Batch, Loader
from nearfar.data.sampling import registry as samplers
from nearfar.data.splits import Split
from nearfar.data.store.store import Bad, Store
from nearfar.data.transforms.view import View

if TYPE_CHECKING:
    from nearfar.data.store.prepare import prepare

__all__ = [
    "Bad",
    "Batch",
    "Dataset",
    "Loader",
    "Split",
    "Store",
    "View",
    "describe",
    "from_arrays",
    "names",
    "open",
    "prepare",
    "problems",
    "register",
    "samplers",
    "splits",
    "summary",
]


def __getattr__(name: str) -> Any:
    """``prepare`` brings Pillow, which is not needed to look at a data set."""
    if name == "prepare":
        from nearfar.data.store.prepare import prepare

        return prepare
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
