"""Finding pictures by pictures: an index of what a model makes of them."""

from nearfar.search.index import Index
from nearfar.search.items import Hit, Item, Items
from nearfar.search.results import Neighbour, Results

__all__ = ["Hit", "Index", "Item", "Items", "Neighbour", "Results"]
