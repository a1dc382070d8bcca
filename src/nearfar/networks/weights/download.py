"""Downloads files: tries again, verifies checksums, and writes atomically."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from http.client import HTTPException
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from filelock import FileLock

from nearfar.utils.atomic import whole_file
from nearfar.utils.progress import Progress

PIECE = 1 << 20  # bytes per read
TRIES = 3
TIMEOUT = 30.0  # seconds without a byte


_local_only: ContextVar[bool] = ContextVar("local_only", default=False)


@contextmanager
def local_only() -> Iterator[None]:
    """Use files of this machine only in the block: nothing is downloaded, not even the description of a network."""
    before = _local_only.set(True)
    try:
        yield
    finally:
        _local_only.reset(before)


def is_local_only() -> bool:
    """Whether the caller is in a block of :func:`local_only`."""
    return _local_only.get()


class DownloadError(OSError):
    """A file could not be downloaded."""


class ChecksumError(DownloadError):
    """A downloaded file has another checksum than expected."""


def sha256(file: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal digits."""
    with open(file, "rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def verify(file: Path, digits: str, name: str | None = None) -> None:
    """Check that the SHA-256 of a file starts with the given digits."""
    found = sha256(file)
    if not found.startswith(digits.lower()):
        raise ChecksumError(
            f"{name or file} has the SHA-256 {found[: max(8, len(digits))]}…; expected is {digits}: the file is "
            "damaged, or not the published one"
        )


def download(url: str, file: Path, *, digits: str = "", progress: Progress | None = None) -> Path:
    """Download a file unless it exists; it appears when it is complete and verified.

    Args:
        url: Address of the file.
        file: Where it is stored.
        digits: First digits of its SHA-256; empty to skip the check.
        progress: Called with the bytes done and the bytes of the file.

    Returns:
        The file.
    """
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"url is {url!r}; it must begin with http:// or https://")
    file.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(file.with_name(f".{file.name}.lock")):
        if file.is_file():  # another process has downloaded it
            return file
        if is_local_only():
            raise DownloadError("not without --download, or download=True in Python")
        with whole_file(file) as draft:
            _fetch(url, draft, progress)
            verify(draft, digits, url)
    return file


def _fetch(url: str, draft: Path, progress: Progress | None) -> None:
    """Download a file, from its first byte in each try: a part may belong to another version of it."""
    for tries_left in reversed(range(TRIES)):
        try:
            _attempt(url, draft, progress)
            return
        except HTTPError as error:
            problem = f"the server answered {error.code} {error.reason}"
            if error.code < 500 and error.code not in (408, 429):
                tries_left = 0
        except (OSError, HTTPException) as error:
            problem = str(getattr(error, "reason", None) or error) or type(error).__name__
        if not tries_left:
            raise DownloadError(f"{url}: {problem}")


def _attempt(url: str, draft: Path, progress: Progress | None) -> None:
    # Without compression, as the length must be that of the file.
    request = Request(url, headers={"User-Agent": "nearfar", "Accept-Encoding": "identity"})
    with urlopen(request, timeout=TIMEOUT) as answer, open(draft, "wb") as written:
        done, total = 0, answer.length
        while piece := answer.read(PIECE):
            written.write(piece)
            done += len(piece)
            if progress is not None:
                progress(done, total or done)
    if total is not None and done != total:
        raise OSError(f"the transfer was interrupted after {done:,} of {total:,} bytes")
