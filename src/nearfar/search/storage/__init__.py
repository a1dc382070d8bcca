"""The files of an index: SQLite for items, changes and thumbnails, NumPy files for vectors."""

from nearfar.search.backends.base import Ids, Vectors
from nearfar.search.storage.files import MODEL, VERSION, BadIndex, index_exists
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
    "index_exists",
]
