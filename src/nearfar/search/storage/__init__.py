"""The files of an index."""

from nearfar.search.storage.folder import MODEL, BadIndex
from nearfar.search.storage.folder import exists as index_exists
from nearfar.search.storage.storage import IndexStorage
from nearfar.search.storage.table import Ids, Table, Vectors, checked_vectors

__all__ = ["MODEL", "BadIndex", "Ids", "IndexStorage", "Table", "Vectors", "checked_vectors", "index_exists"]
