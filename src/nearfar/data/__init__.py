"""From files to augmented batches.

>>> import nearfar as nf
>>> from nearfar import data
>>> digits = data.open("digits")
>>> digits.parts["train"].shape, digits.num_classes
((901,), 10)
"""

from nearfar.data import splits
from nearfar.data.dataset import DataSet
from nearfar.data.registry import describe, names, open, problems, register, summary
from nearfar.data.sets import from_arrays
from nearfar.data.splits import Split

__all__ = [
    "DataSet",
    "Split",
    "describe",
    "from_arrays",
    "names",
    "open",
    "problems",
    "register",
    "splits",
    "summary",
]
