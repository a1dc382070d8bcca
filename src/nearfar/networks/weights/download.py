"""Downloads files, if that is allowed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from http.client import HTTPException
from pathlib import Path

from filelock import FileLock
from torch.hub import download_url_to_file

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
    """A file could not be downloaded, or what was downloaded is not the published file."""


def download(url: str, file: Path, *, digits: str) -> Path:
    """Download a file unless it exists; it appears when it is complete and its SHA-256 begins with ``digits``."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(file.with_name(f".{file.name}.lock")):
        if file.is_file():  # another process has downloaded it
            return file
        if is_local_only():
            raise DownloadError("not without --download, or download=True in Python")
        try:
            download_url_to_file(url, str(file), digits, progress=sys.stderr.isatty())
        except (OSError, HTTPException, RuntimeError) as error:  # RuntimeError: another checksum
            raise DownloadError(f"{url}: {error}") from error
    return file
