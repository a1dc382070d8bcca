"""Small trees of files in the layouts that data sets come in. A picture's bytes are its name, as nothing decodes it."""

import errno
import gzip
import io
import os
import struct
import tarfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np


def write(root, files):
    """Files below a folder, with their names as content where none is given."""
    content = files if isinstance(files, Mapping) else {name: name for name in files}
    for name, data in content.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data if isinstance(data, bytes) else data.encode())
    return root


def lock(patch, folder):
    """Refuse to list a folder; permissions would not stop a test that runs as root."""
    scandir = os.scandir

    def refuse(path):
        if Path(path) == folder:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return scandir(path)

    patch.setattr(os, "scandir", refuse)


def write_tar(file, names, mode="w", form=tarfile.PAX_FORMAT):
    file.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(file, mode, format=form) as archive:
        for name in names:
            add(archive, name, name.encode())
    return file


def add(archive, name, data=b"", **about):
    member = tarfile.TarInfo(name)
    member.size = len(data)
    for key, value in about.items():
        setattr(member, key, value)
    archive.addfile(member, io.BytesIO(data))


def write_zip(file, names):
    file.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in names:
            archive.writestr(name, name)
    return file


def write_idx(file, array, packed=False):
    """An array of bytes as an IDX file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    data = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.astype(np.uint8).tobytes()
    file.write_bytes(gzip.compress(data) if packed else data)
    return file
