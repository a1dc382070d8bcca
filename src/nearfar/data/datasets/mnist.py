"""MNIST and Fashion-MNIST, from IDX files."""

from __future__ import annotations

import gzip
import math
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
        if len(numbers) and numbers.max() >= len(classes):
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
    codes = np.concatenate(labels)
    trained = codes < TRAINED
    return Dataset(
        name,
        Arrays(np.concatenate(images)),
        codes,
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


def _read(file: Path, dimensions: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Read an IDX file of bytes, compressed or not, whatever its extension."""
    data, start = file.read_bytes(), 4 + 4 * dimensions
    try:
        data = gzip.decompress(data) if data.startswith(b"\x1f\x8b") else data
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{file} cannot be read: {error}") from error
    if len(data) < start or data[:4] != bytes((0, 0, 8, dimensions)):
        raise ValueError(f"{file} is not an IDX file of bytes in {dimensions} dimensions")
    shape = struct.unpack(f">{dimensions}I", data[4:start])
    if len(data) - start != math.prod(shape):
        raise ValueError(f"{file} has {len(data) - start} bytes of data; its header says {math.prod(shape)}")
    return np.frombuffer(data, dtype=np.uint8, offset=start).reshape(shape)
