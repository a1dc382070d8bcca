"""From files to augmented batches: a data set, a store of its pictures, samplers, views, and a loader.

>>> from nearfar import data
>>> digits = data.open("digits")
>>> split = data.splits.standard(digits)
>>> split.train.shape, split.test["test"].shape
((901,), (896,))
"""

from typing import TYPE_CHECKING, Any

from nearfar.data import samplers, splits
from nearfar.data.dataset import DataSet
from nearfar.data.loader import Batch, Loader
from nearfar.data.registry import describe, names, open, problems, register, summary
from nearfar.data.sets import from_arrays
from nearfar.data.splits import Split
from nearfar.data.store import Bad, Store
from nearfar.data.views import View

if TYPE_CHECKING:
    from nearfar.data.preparing import prepare

__all__ = [
    "Bad",
    "Batch",
    "DataSet",
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
        from nearfar.data.preparing import prepare

        return prepare
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
