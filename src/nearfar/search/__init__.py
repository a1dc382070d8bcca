"""Search images by image: an index of embeddings, with filters, re-ranking, duplicates and clusters."""

from nearfar.search.index import Index, VectorQuery
from nearfar.search.items import Hit, Item, Items
from nearfar.search.results import Neighbor, Results

__all__ = ["Hit", "Index", "Item", "Items", "Neighbor", "Results", "VectorQuery"]
