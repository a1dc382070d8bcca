"""From files to augmented batches: a data set, a store of its pictures, samplers, views, and a loader.

>>> from nearfar import data
>>> digits = data.open("digits")
>>> split = data.splits.standard(digits)
>>> split.train.shape, split.test["test"].shape
((901,), (896,))
"""

from nearfar.data import samplers, splits
from nearfar.data.dataset import DataSet
from nearfar.data.loader import Batch, Loader
from nearfar.data.registry import describe, names, open, problems, register, summary
from nearfar.data.sets import from_arrays
from nearfar.data.splits import Split
from nearfar.data.store import Bad, Store
from nearfar.data.views import View

# nearfar.data.prepare is a module, as it needs Pillow: from nearfar.data.prepare import prepare

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
    "problems",
    "register",
    "samplers",
    "splits",
    "summary",
]
