"""The files of an index: SQLite for items, changes and thumbnails, NumPy files for vectors."""

from nearfar.search.backends.base import Ids, Vectors
from nearfar.search.storage.database import VERSION
from nearfar.search.storage.files import MODEL, BadIndex, erase, index_exists
from nearfar.search.storage.storage import IndexStorage, Table, checked_vectors

__all__ = [
    "MODEL",
    "VERSION",
    "BadIndex",
    "Ids",
    "IndexStorage",
    "Table",
    "Vectors",
    "checked_vectors",
    "erase",
    "index_exists",
]
