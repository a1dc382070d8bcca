"""Image sources: files, members of zip or tar archives, or arrays.

A source numbers its images and returns their encoded bytes. ``read`` is thread-safe, and a source can be pickled. If an
image cannot be read, ``read`` raises ``OSError``.
"""

from __future__ import annotations

import bz2
import gzip
import hashlib
import io
import lzma
import os
import threading
import zipfile
import zlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Protocol, Self

import numpy as np

from nearfar.data.store.decode import Pixels, decode
from nearfar.data.store.fingerprint import fingerprint

_DAMAGE = (EOFError, zlib.error, lzma.LZMAError, zipfile.BadZipFile, RuntimeError, NotImplementedError, ValueError)

Ints = np.ndarray[Any, np.dtype[np.int64]]
Anything = np.ndarray[Any, np.dtype[Any]]


class Source(Protocol):
    """Numbered images."""

    def __len__(self) -> int:
        """Return the number of images."""

    def name(self, index: int) -> str:
        """Return the path of an image, with ``/``, relative to the folder or archive."""

    def read(self, index: int) -> bytes:
        """Return the encoded bytes of an image."""

    def pixels(self, index: int, decode: Callable[..., Pixels] = decode, **settings: Any) -> Pixels:
        """Decode an image, with settings of :func:`nearfar.data.store.decode.decode`."""
        return decode(self.read(index), **settings)

    def fingerprint(self) -> str:
        """Return a hash of the names and contents of all images; copies have the same."""


class Files(Source):
    """Image files below a folder."""

    def __init__(self, root: str | os.PathLike[str], paths: Iterable[str]) -> None:
        self.root = Path(root)
        self.paths = tuple(paths)
        for path in self.paths:
            if not is_inside(path):
                raise ValueError(f"{path!r} is not a path below {self.root}")

    def __len__(self) -> int:
        return len(self.paths)

    def name(self, index: int) -> str:
        return self.paths[index]

    def read(self, index: int) -> bytes:
        with open(self.root / self.paths[index], "rb") as file:
            return file.read()

    def take(self, indices: Sequence[int] | Ints) -> Files:
        """Return a source of some of the images."""
        return Files(self.root, [self.paths[index] for index in indices])

    def fingerprint(self) -> str:
        return fingerprint(self.paths, [(f"{self.root}/{path}", 0) for path in self.paths], self.read)


class _Archives(Source):
    """Base class of zip and tar sources: one open handle per archive and process."""

    def __init__(self, archives: Sequence[Path], names: Sequence[str], members: Sequence[tuple[int, Any]]) -> None:
        self.archives = tuple(archives)
        self.names = tuple(names)
        self.members = tuple(members)  # archive of each image, and what is needed to read it there
        self._reset()

    def _reset(self) -> None:
        self._handles: dict[tuple[int, int], Any] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self.names)

    def name(self, index: int) -> str:
        return self.names[index]

    def fingerprint(self) -> str:
        archives = [str(archive) for archive in self.archives]
        locations = [(archives[archive], self._start(member)) for archive, member in self.members]
        return fingerprint(self.names, locations, self.read, threads=self._threads())

    def take(self, indices: Sequence[int] | Ints) -> Self:
        """Return a source of some of the images."""
        picks = np.asarray(indices, dtype=np.int64).tolist()
        names, members = [self.names[index] for index in picks], [self.members[index] for index in picks]
        return type(self)(self.archives, names, members)

    def _threads(self) -> int | None:
        """Return the number of threads that can read at a time; None for any number."""
        return None

    def _start(self, member: Any) -> int:
        """Return where an image begins in its archive."""
        raise NotImplementedError

    def _handle(self, archive: int) -> Any:
        # A forked process opens its own handles, as it shares the file positions of its parent's.
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
        return OSError(f"{self.names[index]} in {self.archives[self.members[index][0]].name}: {error or 'truncated'}")


class Zips(_Archives):
    """Images in zip files; their members are ``ZipInfo``."""

    def _open(self, archive: Path) -> zipfile.ZipFile:
        return zipfile.ZipFile(archive)

    def read(self, index: int) -> bytes:
        archive, member = self.members[index]
        with self._lock:
            handle: zipfile.ZipFile = self._handle(archive)
        try:
            return handle.read(member)
        except _DAMAGE as error:
            raise self._damaged(index, error) from error

    def _start(self, member: zipfile.ZipInfo) -> int:
        return member.header_offset


class Tars(_Archives):
    """Images in tar files; their members are offset and size.

    Members of an uncompressed tar are read directly. A compressed one has to be decompressed up to the member, so it is
    fast only in order.
    """

    def _open(self, archive: Path) -> IO[bytes]:
        return open_tar_stream(archive)

    def read(self, index: int) -> bytes:
        archive, (offset, size) = self.members[index]
        try:
            with self._lock:
                stream = self._handle(archive)
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

    def _start(self, member: tuple[int, int]) -> int:
        return member[0]

    def _threads(self) -> int | None:
        # A step back in a compressed archive decompresses it from its beginning.
        return (
            None if all(_is_plain(self._handle(archive)) for archive in {archive for archive, _ in self.members}) else 1
        )


class Arrays(Source):
    """Images in memory or in a memory map."""

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
        raise TypeError(f"item {index} is in an array and has no encoded bytes; use .array")

    def take(self, indices: Sequence[int] | Ints) -> Self:
        """Return a source of copies of some of the rows."""
        return type(self)(self.array[np.asarray(indices, dtype=np.int64)])

    def fingerprint(self) -> str:
        digest = hashlib.sha256(f"{self.array.dtype}{self.array.shape}".encode())
        rows = max(1, (1 << 24) * len(self.array) // max(1, self.array.nbytes))
        for start in range(0, len(self.array), rows):
            digest.update(np.ascontiguousarray(self.array[start : start + rows]).data)
        return digest.hexdigest()


class Vectors(Arrays):
    """Vectors in memory or in a memory map."""

    needed = "float32 of shape [n, d] with n, d ≥ 1"

    @staticmethod
    def _fits(array: Anything) -> bool:
        return bool(array.dtype == np.float32 and array.ndim == 2 and array.size)


class Images(Source):
    """Images of any sizes in memory."""

    def __init__(self, images: Sequence[Any]) -> None:
        self.images = tuple(images)

    def __len__(self) -> int:
        return len(self.images)

    def name(self, index: int) -> str:
        return str(range(len(self))[index])

    def read(self, index: int) -> bytes:
        image = self.images[index]
        return image if isinstance(image, bytes) else encode_image(image)

    def fingerprint(self) -> str:
        digest = hashlib.sha256()
        for index in range(len(self)):
            digest.update(hashlib.sha256(self.read(index)).digest())
        return digest.hexdigest()


def encode_image(image: Any) -> bytes:
    """Return a Pillow image or uint8 pixels as the bytes of an upright, lossless image file."""
    from PIL import Image, ImageOps

    if not isinstance(image, Image.Image):
        image = Image.fromarray(image)
    with suppress(Exception):  # broken EXIF data does not make an image unusable
        image = ImageOps.exif_transpose(image)
    file = io.BytesIO()
    image.save(file, "TIFF" if image.mode in ("F", "I", "CMYK", "LAB", "YCbCr") else "PNG")
    return file.getvalue()


def is_inside(path: str) -> bool:
    """Return whether a relative path stays below the folder it starts from."""
    parts = path.replace("\\", "/").split("/")
    return bool(path) and ".." not in parts and parts[0] != "" and not parts[0].endswith(":") and "\0" not in path


def open_tar_stream(archive: Path) -> IO[bytes]:
    """Open the uncompressed bytes of a tar file, whatever its extension."""
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
