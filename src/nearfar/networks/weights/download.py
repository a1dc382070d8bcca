"""Downloads files: resumes interrupted transfers, verifies checksums, and writes atomically."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import cast
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from filelock import FileLock

from nearfar.utils.progress import Progress

PIECE = 1 << 20  # bytes per read
TRIES = 3  # attempts at an interrupted transfer
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
    """Download a file unless it exists.

    The data are written to a file with the extension .part until the download is complete and verified. An interrupted
    transfer is resumed, now or in the next call.
    """
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"url is {url!r}; it must begin with http:// or https://")
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(file.name + ".part")
    with FileLock(file.with_name(f".{file.name}.lock")):
        if file.is_file():  # another process has downloaded it
            return file
        if is_local_only():
            raise DownloadError("not without --download, or download=True in Python")
        resumed = part.is_file() and part.stat().st_size > 0
        try:
            _complete(url, part, progress)
            _verify_part(url, part, digits)
        except ChecksumError:
            if not resumed:
                raise
            # The resumed part may belong to an earlier version of the file: download all of it again.
            _complete(url, part, progress)
            _verify_part(url, part, digits)
        os.replace(part, file)
    return file


def _verify_part(url: str, part: Path, digits: str) -> None:
    """Verify a part, and delete it if it fails."""
    try:
        verify(part, digits, url)
    except ChecksumError:
        part.unlink()
        raise


def _complete(url: str, part: Path, progress: Progress | None) -> None:
    """Download what is missing of a part."""
    problem = "no data received"
    for _ in range(TRIES):
        try:
            if _attempt(url, part, progress):
                return
            problem = f"the transfer was interrupted after {part.stat().st_size:,} bytes"
        except HTTPError as error:
            if error.code < 500 and error.code not in (408, 429):
                raise DownloadError(f"{url}: the server answered {error.code} {error.reason}") from error
            problem = f"the server answered {error.code} {error.reason}"
        except (OSError, HTTPException) as error:
            problem = str(getattr(error, "reason", None) or error) or type(error).__name__
            if not part.is_file():  # no connection: trying again at once would not help
                break
    raise DownloadError(f"{url}: {problem}")


def _attempt(url: str, part: Path, progress: Progress | None) -> bool:
    """Send one request, and return whether the part is complete."""
    have = part.stat().st_size if part.is_file() else 0
    # Without compression, as offsets and lengths must be those of the file.
    headers = {"User-Agent": "nearfar", "Accept-Encoding": "identity"}
    if have:
        headers["Range"] = f"bytes={have}-"
    try:
        answer = cast(HTTPResponse, urlopen(Request(url, headers=headers), timeout=TIMEOUT))
    except HTTPError as error:
        if error.code != 416 or not have:
            raise
        # There are no bytes after these: the part is complete, or belongs to another file.
        if _total(error.headers.get("Content-Range")) != have:
            part.write_bytes(b"")
            return False
        return True
    with answer:
        if answer.status == 206:
            start, total = _span(answer.headers.get("Content-Range"))
            if start != have:
                raise DownloadError(f"the server sent bytes from {start}; requested were those from {have}")
        else:  # a server without support for ranges sends the whole file
            have, total = 0, answer.length
        with open(part, "ab" if have else "wb") as written:
            done = have
            while piece := answer.read(PIECE):
                written.write(piece)
                done += len(piece)
                if progress is not None:
                    progress(done, total or done)
            written.flush()
            os.fsync(written.fileno())
    return total is None or done == total


def _span(words: str | None) -> tuple[int | None, int | None]:
    """Parse the start and the file size in ``bytes 5-9/10``; the size may be unknown."""
    match = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", words or "")
    return (int(match[1]), None if match[2] == "*" else int(match[2])) if match else (None, None)


def _total(words: str | None) -> int | None:
    """Parse the size in ``bytes */10``."""
    match = re.fullmatch(r"bytes \*/(\d+)", words or "")
    return int(match[1]) if match else None
