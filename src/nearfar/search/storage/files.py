"""The folder of an index.

    my.index/
      index.sqlite     settings, items, changes since the last compaction, thumbnails
      index.sqlite-reserve  space on the disk that is kept for removals
      data-000002/     vectors.npy, ids.npy and the files of the backend, as of the last compaction
      model/           the model, so that the folder is all that is needed to search by image
      map-pca.npz      cached projection to a plane

Compaction writes a new data folder beside the old one. The transaction that stores its number in index.sqlite makes it
the current one; the old one is removed after that. index.sqlite lists the files that were written and are obsolete:
nothing else is ever removed.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

import numpy as np

from nearfar.search.backends.base import Ids, Vectors
from nearfar.utils.atomic import draft_of, sync_folder, whole_file
from nearfar.utils.folders import LOCK, remove
from nearfar.utils.system import exclusive

DATABASE = "index.sqlite"
MODEL = "model"
OBSOLETE = re.compile(r"\.?data-\d{6}[\w.-]*(/[\w-]+\.\w+)?")  # what may be removed
BLOCK = 8192  # vectors that are written at once
VECTORS = ("ids.npy", "vectors.npy")
LOST = "it is not what was written; restore the folder from a copy, or build the index again"
CHECKED = 2**27  # bytes of a data folder that are compared with their digests when it is opened, in 0.2 s


class BadIndex(ValueError):
    """An index folder that cannot be used; the message says why and what to do."""


def index_exists(folder: Path) -> bool:
    """Return whether a folder contains an index."""
    return (folder / DATABASE).is_file()


def write_lock(folder: Path) -> AbstractContextManager[None]:
    """Hold the lock of the only writer among all processes; raise BadIndex if another process has it."""
    busy = f"{folder} is open for writing in another process; wait for it, or open the index read-only"
    return exclusive(folder / LOCK, BadIndex(busy))


def data_folder(folder: Path, generation: int) -> Path:
    """Return the folder of the vectors of a generation."""
    return folder / f"data-{generation:06}"


@contextmanager
def new_generation(folder: Path, note: Callable[[list[str]], None] = lambda names: None) -> Iterator[tuple[Path, int]]:
    """Create a data folder; it gets its final name when the block ends without an error."""
    numbers = [int(path.name[5:]) for path in folder.glob("data-*") if path.name[5:].isdecimal()]
    number = max(numbers, default=0) + 1
    place = data_folder(folder, number)
    draft = draft_of(place)
    note([draft.name])
    try:
        draft.mkdir(parents=True)
        yield draft, number
        sync_folder(draft)
        note(contents(place, os.listdir(draft)))
        os.replace(draft, place)
        sync_folder(folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def write_vectors(place: Path, ids: Ids, read: Callable[[slice], Vectors], dim: int) -> None:
    """Write ids.npy and vectors.npy; vectors are read in blocks."""
    with whole_file(place / "vectors.npy") as draft, open(draft, "wb") as file:
        header = {"descr": "<f4", "fortran_order": False, "shape": (len(ids), dim)}
        np.lib.format.write_array_header_1_0(file, header)
        for start in range(0, len(ids), BLOCK):
            file.write(np.ascontiguousarray(read(slice(start, start + BLOCK)), dtype="<f4").data)
        file.flush()
    with whole_file(place / "ids.npy") as draft, open(draft, "wb") as file:
        np.save(file, ids)


def read_vectors(place: Path) -> tuple[Ids, Vectors]:
    """Read ids.npy, and map vectors.npy into memory."""
    with readable(place / "ids.npy") as file:
        ids: Ids = np.load(file, allow_pickle=False)
    with readable(place / "vectors.npy") as file:
        size = file.stat().st_size
        vectors: Vectors = np.load(file, mmap_mode="r" if ids.size else None, allow_pickle=False)
    fitting = ids.ndim == 1 and vectors.ndim == 2 and len(ids) == len(vectors) and size >= vectors.nbytes
    if not fitting or ids.dtype != np.int64 or vectors.dtype != np.float32 or (np.diff(ids) <= 0).any():
        raise BadIndex(f"{place} is damaged: its files do not match each other; build the index again")
    return ids, vectors


@contextmanager
def readable(file: Path) -> Iterator[Path]:
    """Turn errors of damaged files into BadIndex errors that name the file."""
    try:
        yield file
    except FileNotFoundError:
        raise
    except Exception as error:  # NumPy's parser of headers raises errors of many kinds
        words = " ".join(str(error).split())
        raise BadIndex(f"{file} is damaged ({type(error).__name__}: {words}); build the index again") from error


def sweep(folder: Path, obsolete: Iterable[str]) -> None:
    """Remove what the database lists as obsolete: drafts as a whole, other folders once they are empty."""
    for name in obsolete:
        path = folder / name
        if not OBSOLETE.fullmatch(name) or path.parent.is_symlink() or path.is_symlink():
            continue
        with suppress(OSError):
            if not path.is_dir():
                path.unlink(missing_ok=True)
            elif name.startswith("."):
                shutil.rmtree(path)
            else:
                path.rmdir()


def erase(folder: Path, obsolete: Iterable[str]) -> None:
    """Remove the files of an index that has no item, and the folder if nothing else is in it."""
    sweep(folder, obsolete)
    remove(folder / MODEL, ("model.safetensors", "model.json"))
    remove(folder, [f"{DATABASE}{ending}" for ending in ("", "-wal", "-shm", "-reserve")])


def contents(place: Path, names: Iterable[str]) -> list[str]:
    """Return the names below the index folder of a data folder with these files, in removal order."""
    return [*(f"{place.name}/{name}" for name in names), place.name]


def digests(place: Path) -> dict[str, str]:
    """Return the SHA-256 of each file of a folder."""
    return {file.name: _digest(file) for file in sorted(place.iterdir())}


def changed(place: Path, known: Mapping[str, str], most: float) -> list[str]:
    """Return the files of a folder that are not what was written; none without looking if there are too many bytes."""
    there = [place / name for name in known if (place / name).is_file()]
    if sum(file.stat().st_size for file in there) > most:
        return []
    return [file.name for file in there if _digest(file) != known[file.name]]


def _digest(file: Path) -> str:
    with open(file, "rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
