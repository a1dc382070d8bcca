"""Small trees of files in the layouts that data sets come in. A picture's bytes are its name, as nothing decodes it."""

from __future__ import annotations

import errno
import gzip
import io
import os
import struct
import tarfile
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import pytest


def write(root: Path, files: Iterable[str] | Mapping[str, str | bytes]) -> Path:
    """Files below a folder, with their names as content where none is given."""
    content = files if isinstance(files, Mapping) else {name: name for name in files}
    for name, data in content.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data if isinstance(data, bytes) else data.encode())
    return root


def lock(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """Refuse to list a folder; permissions would not stop a test that runs as root."""
    scandir = os.scandir

    def refuse(path: Path) -> object:
        if Path(path) == folder:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return scandir(path)

    patch.setattr(os, "scandir", refuse)


def write_tar(file: Path, names: Iterable[str], mode: str = "w", form: int = tarfile.PAX_FORMAT) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(file, mode, format=form) as archive:  # type: ignore[call-overload]
        for name in names:
            add(archive, name, name.encode())
    return file


def add(archive: tarfile.TarFile, name: str, data: bytes = b"", **about: object) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(data)
    for key, value in about.items():
        setattr(member, key, value)
    archive.addfile(member, io.BytesIO(data))


def write_zip(file: Path, names: Iterable[str]) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in names:
            archive.writestr(name, name)
    return file


def write_idx(file: Path, array: np.ndarray, packed: bool = False) -> Path:
    """An array of bytes as an IDX file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    data = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.astype(np.uint8).tobytes()
    file.write_bytes(gzip.compress(data) if packed else data)
    return file
