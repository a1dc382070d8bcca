"""MNIST and Fashion-MNIST, from IDX files."""

from __future__ import annotations

import gzip
import math
import os
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from nearfar.data.datasets.base import Dataset, Root, register
from nearfar.data.store.sources import Arrays

FASHION = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")
TRAINED = 5  # the first five of ten classes are training classes
_PARTS = {"train": ("train", 60000), "test": ("t10k", 10000)}
_DTYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}


@register
def mnist(root: Root) -> Dataset:
    """MNIST: 70,000 handwritten digits, 28 × 28.

    For retrieval of unseen classes, the digits 0 to 4 of all 70,000 images are for training and 5 to 9 for testing. The
    official split into train and test images, in which both have the same classes, is the column "official". Download:
    https://ossci-datasets.s3.amazonaws.com/mnist/

    Layouts:
        A folder with train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-images-idx3-ubyte and
        t10k-labels-idx1-ubyte; also with a dot before idx, with the extension .gz, or below MNIST/raw/ or raw/.

    Args:
        root: Path of the folder.
    """
    return _open("mnist", Path(root), tuple(str(digit) for digit in range(10)))


@register
def fashion_mnist(root: Root) -> Dataset:
    """Fashion-MNIST: 70,000 images of ten kinds of clothing, 28 × 28.

    The first five classes are for training and the others for testing; everything else is as for mnist. Download:
    https://github.com/zalandoresearch/fashion-mnist

    Layouts:
        As for mnist, also below FashionMNIST/raw/.

    Args:
        root: Path of the folder.
    """
    return _open("fashion_mnist", Path(root), FASHION)


def _open(name: str, root: Path, classes: tuple[str, ...]) -> Dataset:
    below = ("", "raw", "MNIST/raw", "MNIST", "FashionMNIST/raw", "FashionMNIST")
    folders = [root / folder for folder in below]
    notes: list[str] = []
    images, labels, official = [], [], []
    for part, (prefix, published) in _PARTS.items():
        files = [_find(folders, f"{prefix}-{what}") for what in ("images-idx3-ubyte", "labels-idx1-ubyte")]
        if files[0] is None or files[1] is None:
            notes.append(f"the official {part} images ({prefix}-images-idx3-ubyte and its labels) are missing")
            continue
        pixels, numbers = _read(files[0], 3), _read(files[1], 1)
        if len(pixels) != len(numbers):
            raise ValueError(f"{files[0]} has {len(pixels)} images, but {files[1]} {len(numbers)} labels")
        if len(numbers) and not (numbers.min() >= 0 and numbers.max() < len(classes)):
            raise ValueError(f"{files[1]} has the label {numbers.max()}; allowed are 0 to {len(classes) - 1}")
        if len(pixels) != published:
            notes.append(f"the official {part} part has {len(pixels):,} images; published are {published:,}")
        images.append(pixels)
        labels.append(numbers.astype(np.int64))
        official.append(np.full(len(numbers), part))
    if not images:
        raise FileNotFoundError(
            f"{name} was not recognized in {root}; looked for train-images-idx3-ubyte, train-labels-idx1-ubyte, "
            f"t10k-images-idx3-ubyte and t10k-labels-idx1-ubyte (or with .idx, or with .gz), here or below "
            f"{', '.join(folder + '/' for folder in below if folder)}"
        )
    numbers = np.concatenate(labels)
    trained = numbers < TRAINED
    return Dataset(
        name,
        Arrays(np.concatenate(images)),
        numbers,
        classes,
        {"train": np.flatnonzero(trained), "test": np.flatnonzero(~trained)},
        {"official": np.concatenate(official)},
        tuple(notes),
    )


def _find(folders: list[Path], name: str) -> Path | None:
    for folder in folders:
        for spelled in (name, name.replace("-idx", ".idx")):
            for ending in ("", ".gz"):
                if (folder / (spelled + ending)).is_file():
                    return folder / (spelled + ending)
    return None


def _read(file: Path, dimensions: int) -> np.ndarray[Any, np.dtype[Any]]:
    """Read an IDX file, compressed or not, whatever its extension."""
    with open(file, "rb") as stream:
        compressed = stream.read(2) == b"\x1f\x8b"
    try:
        with gzip.open(file) if compressed else open(file, "rb") as stream:
            magic = stream.read(4)
            if len(magic) < 4 or magic[:2] != b"\0\0" or magic[2] not in _DTYPES or magic[3] != dimensions:
                raise ValueError(f"{file} is not an IDX file of {dimensions} dimensions")
            dtype = np.dtype(_DTYPES[magic[2]])
            shape = struct.unpack(f">{dimensions}I", stream.read(4 * dimensions))
            size = math.prod(shape) * dtype.itemsize
            # Bounds the size that a damaged header can claim: gzip compresses by a factor of 1,032 at most.
            if size > 1100 * os.path.getsize(file):
                raise ValueError(f"{file} is truncated: its header says {size} bytes")
            data = stream.read(size + 1)
    except (EOFError, zlib.error, struct.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{file} cannot be read: {error}") from error
    if len(data) != size:
        raise ValueError(
            f"{file} has {f'more than {size}' if len(data) > size else len(data)} bytes of data; its header says {size}"
        )
    return np.frombuffer(data, dtype=dtype).reshape(shape)
