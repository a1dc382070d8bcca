"""One file for each data set; importing them makes them known."""

from nearfar.data.sets.cars196 import cars196
from nearfar.data.sets.cub import cub
from nearfar.data.sets.folder import folder
from nearfar.data.sets.inshop import inshop
from nearfar.data.sets.sop import sop

__all__ = ["cars196", "cub", "folder", "inshop", "sop"]
