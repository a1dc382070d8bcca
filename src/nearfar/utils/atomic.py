"""Atomic files: written completely or not at all."""

from __future__ import annotations

import errno
import hashlib
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

ABOUT, DIGEST = "nearfar", "sha256"  # key in the metadata of a safetensors file, and in the JSON object there
FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
DISK = (*FULL_DISK, errno.EIO)  # full, or broken


def draft_of(place: Path) -> Path:
    """Return a path beside a file or folder that no other process or thread uses, to write to before it is renamed."""
    return place.with_name(f".{place.name}.{os.getpid()}-{secrets.token_hex(4)}")


@contextmanager
def whole_file(file: Path) -> Iterator[Path]:
    """Write a file atomically: yield a temporary path beside it, and rename that if the block succeeds.

    A link is replaced, not followed, and the permissions of an existing file are kept. An existing path that is neither
    a regular file nor a link to one, such as a pipe or /dev/null, is written to directly.
    """
    if file.is_dir():
        raise IsADirectoryError(f"{file} is a folder; the name of a file is needed")
    if file.exists() and not file.is_file():
        with naming(file):
            yield file
        return
    place = file.parent.resolve() / file.name
    if not place.parent.is_dir():
        raise FileNotFoundError(f"{file} cannot be written: there is no folder {place.parent}")
    draft = draft_of(place)
    try:
        with naming(file):
            draft.touch()
            mode = stat.S_IMODE((place if place.exists() and not place.is_symlink() else draft).stat().st_mode)
            os.chmod(draft, mode)  # before it has any content
            yield draft
            os.chmod(draft, mode)  # some libraries create files that only their owner can read
            with open(draft, "rb+") as written:
                os.fsync(written.fileno())
            os.replace(draft, place)
    finally:
        draft.unlink(missing_ok=True)


def no_link(file: str, flags: int) -> int:
    """Open a file for ``open(…, opener=no_link)``; a link is an error."""
    return os.open(file, flags | getattr(os, "O_NOFOLLOW", 0), 0o666)


@contextmanager
def naming(file: Path) -> Iterator[None]:
    """Add the name of the file to errors of a full or broken disk, which lack it."""
    try:
        yield
    except OSError as error:
        if error.errno in DISK and error.filename is None:
            error.filename = str(file)
        raise


def sync_folder(folder: Path) -> None:
    """Flush the names in a folder to disk."""
    if os.name == "nt":  # folders cannot be opened there
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_text(file: Path, text: str) -> None:
    """Write text as UTF-8."""
    with whole_file(file) as draft:
        draft.write_text(text, encoding="utf-8")


def write_tensors(file: Path, tensors: Mapping[str, Tensor], about: Mapping[str, Any] | None = None) -> None:
    """Write tensors as a safetensors file, with a JSON object about them and their SHA-256 in its metadata."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    # One key: safetensors writes several in random order, and the same tensors should give the same bytes.
    metadata = {ABOUT: json.dumps({**(about or {}), DIGEST: tensors_digest(tensors)}, sort_keys=True)}
    with whole_file(file) as draft:
        try:
            save_file(dict(tensors), draft, metadata=metadata)
        except SafetensorError as error:
            raise OSError(f"{file} cannot be written: {error}") from error


def read_about(file: Path) -> dict[str, Any]:
    """Read the JSON object of a file that ``write_tensors`` wrote, and not its tensors."""
    with _opened(file) as (_, about):
        return about if isinstance(about, dict) else {}


def read_tensors(file: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read what ``write_tensors`` wrote; the tensors must have the SHA-256 that is stored with them, if any."""
    with _opened(file) as (content, about):
        tensors = {name: content.get_tensor(name) for name in content.keys()}  # noqa: SIM118 (it is no mapping)
    if not isinstance(about, dict) or about.pop(DIGEST, None) not in (None, tensors_digest(tensors)):
        raise ValueError(f"{file} is damaged: its tensors do not have the SHA-256 that was stored with them")
    return tensors, about


@contextmanager
def _opened(file: Path) -> Iterator[tuple[Any, Any]]:
    """Open a safetensors file; yield it and the JSON value in its metadata."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as content:
            yield content, json.loads((content.metadata() or {}).get(ABOUT, "{}"))
    except (SafetensorError, ValueError, RecursionError) as error:
        raise ValueError(f"{file} cannot be read: {' '.join(str(error).split())}") from error


def tensors_digest(tensors: Mapping[str, Tensor], about: str = "") -> str:
    """Return the SHA-256 of a text, and of the names, types, shapes and values of tensors."""
    import torch

    digest = hashlib.sha256(about.encode())
    for name, tensor in sorted(tensors.items()):
        plain = tensor.detach().cpu().contiguous()
        digest.update(f"{name} {plain.dtype} {tuple(plain.shape)}".encode())
        digest.update(plain.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def write_json(file: Path, value: Any) -> None:
    """Write a value as indented JSON; NaN raises an error, since JSON has none."""
    write_text(file, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")
