"""Files from the web: taken up where they broke off, verified, and there whole or not at all."""

from __future__ import annotations

import hashlib
import os
import re
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import cast
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from nearfar.utils.progress import Progress
from nearfar.utils.system import locked

PIECE = 1 << 20  # bytes that are read together
TRIES = 3  # how often a transfer that breaks off is taken up again
TIMEOUT = 30.0  # seconds without a byte


class DownloadError(OSError):
    """A file did not arrive; the message says why."""


class ChecksumError(DownloadError):
    """A file arrived, but it is another one."""


def sha256(file: Path) -> str:
    """The SHA-256 of a file in hexadecimal digits."""
    with open(file, "rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def verify(file: Path, digits: str, name: str | None = None) -> None:
    """Refuse a file whose SHA-256 does not begin with these digits; no digits fit every file."""
    found = sha256(file)
    if not found.startswith(digits.lower()):
        raise ChecksumError(
            f"{name or file} has the SHA-256 {found[: max(8, len(digits))]}…; expected is {digits}: the file is "
            "damaged, or not the published one"
        )


def download(url: str, file: Path, *, digits: str = "", progress: Progress | None = None) -> Path:
    """Fetch a file, unless it is there.

    What has arrived stands beside ``file`` with the ending .part until all of it is there and its SHA-256 begins
    with ``digits``. A transfer that breaks off is taken up again, now or at the next call.
    """
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"url is {url!r}; it must begin with http:// or https://")
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(file.name + ".part")
    with locked(file.with_name(f".{file.name}.lock")):
        if file.is_file():  # another process was quicker
            return file
        resumed = part.is_file() and part.stat().st_size > 0
        try:
            _complete(url, part, progress)
            _verify_part(url, part, digits)
        except ChecksumError:
            if not resumed:
                raise
            # The beginning may stem from an earlier version of the file: once more, all of it.
            _complete(url, part, progress)
            _verify_part(url, part, digits)
        os.replace(part, file)
    return file


def _verify_part(url: str, part: Path, digits: str) -> None:
    """A part that fails is of no use to anyone: it goes away."""
    try:
        verify(part, digits, url)
    except ChecksumError:
        part.unlink()
        raise


def _complete(url: str, part: Path, progress: Progress | None) -> None:
    """Fetch what is missing of a part."""
    problem = "nothing arrived"
    for _ in range(TRIES):
        try:
            if _attempt(url, part, progress):
                return
            problem = f"the transfer broke off after {part.stat().st_size:,} bytes"
        except HTTPError as error:
            if error.code < 500 and error.code not in (408, 429):
                raise DownloadError(f"{url}: the server says {error.code} {error.reason}") from error
            problem = f"the server says {error.code} {error.reason}"
        except (OSError, HTTPException) as error:
            problem = str(getattr(error, "reason", None) or error) or type(error).__name__
            if not part.is_file():  # not even connected: trying again at once is of no use
                break
    raise DownloadError(f"{url}: {problem}")


def _attempt(url: str, part: Path, progress: Progress | None) -> bool:
    """One request; whether the part is complete after it."""
    have = part.stat().st_size if part.is_file() else 0
    # No compression on the way: offsets and lengths are those of the file.
    headers = {"User-Agent": "nearfar", "Accept-Encoding": "identity"}
    if have:
        headers["Range"] = f"bytes={have}-"
    try:
        answer = cast(HTTPResponse, urlopen(Request(url, headers=headers), timeout=TIMEOUT))
    except HTTPError as error:
        if error.code != 416 or not have:
            raise
        # Nothing lies behind what we have: it is all there, or it is of another file.
        if _total(error.headers.get("Content-Range")) != have:
            part.write_bytes(b"")
            return False
        return True
    with answer:
        if answer.status == 206:
            start, total = _span(answer.headers.get("Content-Range"))
            if start != have:
                raise DownloadError(f"the server sent bytes from {start}; asked for were those from {have}")
        else:  # a server that knows no ranges begins anew
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
    """Start and size of the file in ``bytes 5-9/10``; the size may be unknown."""
    match = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", words or "")
    return (int(match[1]), None if match[2] == "*" else int(match[2])) if match else (None, None)


def _total(words: str | None) -> int | None:
    """The size in ``bytes */10``."""
    match = re.fullmatch(r"bytes \*/(\d+)", words or "")
    return int(match[1]) if match else None
