"""One file for each data set; importing them makes them known."""

from nearfar.data.sets.arrays import arrays, from_arrays
from nearfar.data.sets.cars196 import cars196
from nearfar.data.sets.cub import cub
from nearfar.data.sets.digits import digits
from nearfar.data.sets.folder import folder
from nearfar.data.sets.glyphs import glyphs
from nearfar.data.sets.inshop import inshop
from nearfar.data.sets.mnist import fashion_mnist, mnist
from nearfar.data.sets.sop import sop
from nearfar.data.sets.table import table

__all__ = [
    "arrays",
    "cars196",
    "cub",
    "digits",
    "fashion_mnist",
    "folder",
    "from_arrays",
    "glyphs",
    "inshop",
    "mnist",
    "sop",
    "table",
]
