"""Datasets; importing their modules registers them."""

from nearfar.data.datasets.arrays import arrays, from_arrays
from nearfar.data.datasets.digits import digits
from nearfar.data.datasets.folder import folder
from nearfar.data.datasets.glyphs import glyphs
from nearfar.data.datasets.mnist import fashion_mnist, mnist
from nearfar.data.datasets.published import cars196, cub, inshop, market1501, sop
from nearfar.data.datasets.relations import pairs, triplets
from nearfar.data.datasets.table import table

__all__ = [
    "arrays", "cars196", "cub", "digits", "fashion_mnist", "folder", "from_arrays", "glyphs", "inshop",
    "market1501", "mnist", "pairs", "sop", "table", "triplets",
]  # fmt: skip
