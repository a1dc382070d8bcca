"""Files that are there whole or not at all."""

from __future__ import annotations

import errno
import json
import os
import secrets
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)  # full, or broken


@contextmanager
def whole_file(file: Path) -> Iterator[Path]:
    """A draft to write beside ``file``; it takes its place when the block ends well and goes away otherwise.

    Of a link, what it points to is written. Who may read and write what is there stays as it is. What is there and is
    no plain file, such as a pipe or /dev/null, has no draft: it is written to as it is.
    """
    if file.is_dir():
        raise IsADirectoryError(f"{file} is a folder; needed is the name of a file")
    if file.exists() and not file.is_file():
        with naming(file):
            yield file
        return
    place = file.resolve()
    if not place.parent.is_dir():
        raise FileNotFoundError(f"{file} cannot be written: there is no folder {place.parent}")
    # Another one for each who writes: threads of one process may write the same file.
    draft = place.with_name(f".{place.name}.{os.getpid()}-{secrets.token_hex(4)}")
    try:
        with naming(file):
            draft.touch()
            mode = stat.S_IMODE((place if place.exists() else draft).stat().st_mode)
            os.chmod(draft, mode)  # before there is anything to read
            yield draft
            os.chmod(draft, mode)  # some that write make files for their owner alone
            with open(draft, "rb+") as written:
                os.fsync(written.fileno())
            os.replace(draft, place)
    finally:
        draft.unlink(missing_ok=True)


@contextmanager
def naming(file: Path) -> Iterator[None]:
    """Let errors of a full or broken disk say which file was being written; by themselves they do not."""
    try:
        yield
    except OSError as error:
        if error.errno in DISK and error.filename is None:
            error.filename = str(file)
        raise


def sync_folder(folder: Path) -> None:
    """See that the names in a folder are on disk."""
    if os.name == "nt":  # where folders cannot be opened
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_text(file: Path, text: str) -> None:
    """Write text in UTF-8."""
    with whole_file(file) as draft:
        draft.write_text(text, encoding="utf-8")


def write_tensors(file: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write tensors as safetensors."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    with whole_file(file) as draft:
        try:
            save_file(dict(tensors), draft, metadata=metadata)
        except SafetensorError as error:
            raise OSError(f"{file} cannot be written: {error}") from error


def write_json(file: Path, value: Any) -> None:
    """Write a value as indented JSON; NaN is refused, as JSON has none."""
    write_text(file, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")
