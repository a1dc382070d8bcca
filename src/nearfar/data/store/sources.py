"""Where pictures are: in files, in zip or tar archives, or in an array.

A source numbers its pictures and hands out their encoded bytes. ``read`` may be called by many threads at once, and a
source may be sent to another process. Whatever is wrong with one picture is an ``OSError`` of ``read``.
"""

from __future__ import annotations

import bz2
import gzip
import hashlib
import lzma
import os
import threading
import zipfile
import zlib
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Protocol, Self

import numpy as np

from nearfar.utils.atomic import write_text
from nearfar.utils.paths import cache_folder

MAX_BYTES = 1 << 28  # of one encoded picture; archives can promise any size
_NO_CACHE = (OSError, RuntimeError)  # it cannot be read or written; there is not even a home
_DAMAGE = (EOFError, zlib.error, lzma.LZMAError, zipfile.BadZipFile, RuntimeError, NotImplementedError, ValueError)

Ints = np.ndarray[Any, np.dtype[np.int64]]
Anything = np.ndarray[Any, np.dtype[Any]]


class Source(Protocol):
    """Numbered pictures."""

    def __len__(self) -> int:
        """How many there are."""

    def name(self, index: int) -> str:
        """Path or member, with ``/``; the same wherever the folder or archive lies."""

    def read(self, index: int) -> bytes:
        """The encoded picture. Safe in threads; an ``OSError`` where there is none."""

    def fingerprint(self) -> str:
        """Hex digits that change when pictures do, and are the same for copies of them."""

    def stamp(self) -> str:
        """As ``fingerprint``, but quick: files are not read, and are others when they were written again."""


class Files:
    """Pictures in files below a folder.

    >>> Files("photos", ["jay/1.jpg", "wren/1.jpg"]).name(1)
    'wren/1.jpg'
    """

    def __init__(self, root: str | os.PathLike[str], paths: Iterable[str]) -> None:
        self.root = Path(root)
        self.paths = tuple(paths)
        for path in self.paths:
            if not is_inside(path):
                raise ValueError(f"{path!r} is no path below {self.root}")

    def __len__(self) -> int:
        return len(self.paths)

    def name(self, index: int) -> str:
        return self.paths[index]

    def read(self, index: int) -> bytes:
        with open(self.root / self.paths[index], "rb") as file:
            size = os.fstat(file.fileno()).st_size
            _check_size(size)
            return file.read()

    def take(self, indices: Sequence[int] | Ints) -> Files:
        """Some of the pictures, in this order."""
        return Files(self.root, [self.paths[index] for index in indices])

    def fingerprint(self) -> str:
        # All files are read, once; from then on their stamp tells.
        stamp = self.stamp()
        with suppress(*_NO_CACHE):
            return (cache_folder() / ".fingerprints" / stamp).read_text(encoding="utf-8")
        digest, whole = hashlib.sha256(b"contents"), True
        for path in self.paths:
            digest.update(f"{path}\0".encode(errors="surrogateescape"))
            try:
                with open(self.root / path, "rb") as file:
                    digest.update(hashlib.file_digest(file, "sha256").digest())
            except OSError:
                whole = False
                digest.update(b"missing")
        if whole:
            with suppress(*_NO_CACHE):  # it only costs time
                folder = cache_folder() / ".fingerprints"
                folder.mkdir(parents=True, exist_ok=True)
                write_text(folder / stamp, digest.hexdigest())
        return digest.hexdigest()

    def stamp(self) -> str:
        digest = hashlib.sha256(b"files")
        root = os.fspath(self.root)
        for path in self.paths:
            try:
                stat = os.stat(f"{root}/{path}")
                digest.update(f"{path}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode(errors="surrogateescape"))
            except OSError:
                digest.update(f"{path}\0missing\n".encode(errors="surrogateescape"))
        return digest.hexdigest()


class _Archives:
    """What zips and tars have in common: members, and one open handle for each archive and process."""

    def __init__(self, archives: Sequence[Path], names: Sequence[str], where: Ints) -> None:
        self.archives = tuple(archives)
        self.names = tuple(names)
        self.where = where  # [n]: which archive
        self._reset()

    def _reset(self) -> None:
        self._handles: dict[tuple[int, int], Any] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self.names)

    def name(self, index: int) -> str:
        return self.names[index]

    def fingerprint(self) -> str:
        raise NotImplementedError

    def stamp(self) -> str:
        return self.fingerprint()

    def _handle(self, archive: int) -> Any:
        # A forked process shares the file position of its parent's handles, so it opens its own.
        key = (os.getpid(), archive)
        if key not in self._handles:
            self._handles[key] = self._open(self.archives[archive])
        return self._handles[key]

    def _open(self, archive: Path) -> Any:
        raise NotImplementedError

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("_handles", "_lock")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._reset()

    def __del__(self) -> None:
        for handle in getattr(self, "_handles", {}).values():
            handle.close()

    def _damaged(self, index: int, error: BaseException) -> OSError:
        return OSError(f"{self.names[index]} in {self.archives[self.where[index]].name}: {error or 'cut short'}")


class Zips(_Archives):
    """Pictures that are members of zip files."""

    def __init__(
        self, archives: Sequence[Path], names: Sequence[str], where: Ints, members: Sequence[zipfile.ZipInfo]
    ) -> None:
        super().__init__(archives, names, where)
        self.members = tuple(members)

    def _open(self, archive: Path) -> zipfile.ZipFile:
        return zipfile.ZipFile(archive)

    def read(self, index: int) -> bytes:
        member = self.members[index]
        _check_size(member.file_size)
        with self._lock:
            handle: zipfile.ZipFile = self._handle(int(self.where[index]))
        try:
            return handle.read(member)
        except _DAMAGE as error:
            raise self._damaged(index, error) from error

    def take(self, indices: Sequence[int] | Ints) -> Self:
        """Some of the pictures, in this order."""
        picks = np.asarray(indices, dtype=np.int64)
        names, members = [self.names[index] for index in picks], [self.members[index] for index in picks]
        return type(self)(self.archives, names, self.where[picks], members)

    def fingerprint(self) -> str:
        digest = hashlib.sha256(b"zips")
        for name, member in zip(self.names, self.members, strict=True):
            digest.update(f"{name}\0{member.file_size}\0{member.CRC}\n".encode(errors="surrogateescape"))
        return digest.hexdigest()


class Tars(_Archives):
    """Pictures that are members of tar files.

    Members of a plain tar are read where they lie. A compressed one has to be unpacked up to the member, so it is
    quick only from front to back.
    """

    def __init__(
        self, archives: Sequence[Path], names: Sequence[str], where: Ints, offsets: Ints, sizes: Ints, times: Ints
    ) -> None:
        super().__init__(archives, names, where)
        self.offsets, self.sizes, self.times = offsets, sizes, times

    def _open(self, archive: Path) -> IO[bytes]:
        return open_tar_stream(archive)

    def read(self, index: int) -> bytes:
        size, offset = int(self.sizes[index]), int(self.offsets[index])
        _check_size(size)
        try:
            with self._lock:
                stream = self._handle(int(self.where[index]))
                if not _is_plain(stream):
                    stream.seek(offset)
                    data = stream.read(size)
            if _is_plain(stream):
                data = os.pread(stream.fileno(), size, offset)
        except _DAMAGE as error:
            raise self._damaged(index, error) from error
        if len(data) < size:
            raise self._damaged(index, EOFError(f"{len(data)} bytes of {size}"))
        return bytes(data)

    def take(self, indices: Sequence[int] | Ints) -> Self:
        """Some of the pictures, in this order."""
        picks = np.asarray(indices, dtype=np.int64)
        columns = (column[picks] for column in (self.where, self.offsets, self.sizes, self.times))
        return type(self)(self.archives, [self.names[index] for index in picks], *columns)

    def fingerprint(self) -> str:
        digest = hashlib.sha256(b"tars")
        for row in zip(self.names, self.sizes.tolist(), self.offsets.tolist(), self.times.tolist(), strict=True):
            digest.update("\0".join(map(str, row)).encode(errors="surrogateescape") + b"\n")
        return digest.hexdigest()


class Arrays:
    """Pictures in memory or in a memory map: uint8, [n, h, w] or [n, h, w, 3].

    >>> Arrays(np.zeros((5, 8, 8), dtype=np.uint8)).name(4)
    '4'
    """

    needed = "uint8 of shape [n, h, w] or [n, h, w, 3] with n, h, w ≥ 1"

    def __init__(self, array: Anything) -> None:
        if not self._fits(array):
            raise ValueError(f"the array is {array.dtype} of shape {list(array.shape)}; needed is {self.needed}")
        self.array = array

    @staticmethod
    def _fits(array: Anything) -> bool:
        return bool(array.dtype == np.uint8 and array.ndim in (3, 4) and array.shape[3:] in ((), (3,)) and array.size)

    def __len__(self) -> int:
        return len(self.array)

    def name(self, index: int) -> str:
        return str(range(len(self.array))[index])

    def read(self, index: int) -> bytes:
        raise TypeError(f"number {index} is in an array and has no encoded bytes; use .array")

    def take(self, indices: Sequence[int] | Ints) -> Self:
        """Some of the rows, in this order, copied."""
        return type(self)(self.array[np.asarray(indices, dtype=np.int64)])

    def fingerprint(self) -> str:
        digest = hashlib.sha256(f"{self.array.dtype}{self.array.shape}".encode())
        rows = max(1, (1 << 24) * len(self.array) // max(1, self.array.nbytes))
        for start in range(0, len(self.array), rows):
            digest.update(np.ascontiguousarray(self.array[start : start + rows]).data)
        return digest.hexdigest()

    def stamp(self) -> str:
        return self.fingerprint()


class Vectors(Arrays):
    """Vectors instead of pictures: float32, [n, d]."""

    needed = "float32 of shape [n, d] with n, d ≥ 1"

    @staticmethod
    def _fits(array: Anything) -> bool:
        return bool(array.dtype == np.float32 and array.ndim == 2 and array.size)


def is_inside(path: str) -> bool:
    """Whether a relative path stays below the folder it starts from.

    >>> [is_inside(path) for path in ("jay/1.jpg", "../1.jpg", "/etc/1.jpg", "jay/../../1.jpg", "")]
    [True, False, False, False, False]
    """
    parts = path.replace("\\", "/").split("/")
    return bool(path) and ".." not in parts and parts[0] != "" and not parts[0].endswith(":") and "\0" not in path


def open_tar_stream(archive: Path) -> IO[bytes]:
    """The uncompressed bytes of a tar file, whatever its name ends with."""
    with open(archive, "rb") as file:
        start = file.read(6)
    if start.startswith(b"\x1f\x8b"):
        return gzip.open(archive, "rb")  # type: ignore[return-value]
    if start.startswith(b"BZh"):
        return bz2.open(archive, "rb")
    if start.startswith(b"\xfd7zXZ"):
        return lzma.open(archive, "rb")
    return open(archive, "rb", buffering=0)


def _is_plain(stream: Any) -> bool:
    return not isinstance(stream, (gzip.GzipFile, bz2.BZ2File, lzma.LZMAFile))


def _check_size(size: int) -> None:
    if size > MAX_BYTES:
        raise OSError(f"{size} bytes; at most {MAX_BYTES} are read as one picture")
