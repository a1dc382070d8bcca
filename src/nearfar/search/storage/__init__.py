"""The files of an index: SQLite for items, changes and thumbnails, NumPy files for vectors."""

from nearfar.search.backends.base import Ids as Ids
from nearfar.search.backends.base import Vectors as Vectors
from nearfar.search.storage.database import VERSION as VERSION
from nearfar.search.storage.files import MODEL as MODEL
from nearfar.search.storage.files import BadIndex as BadIndex
from nearfar.search.storage.files import erase as erase
from nearfar.search.storage.files import index_exists as index_exists
from nearfar.search.storage.storage import IndexStorage as IndexStorage
from nearfar.search.storage.storage import checked_vectors as checked_vectors
