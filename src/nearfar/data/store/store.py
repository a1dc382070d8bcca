"""Stores of decoded images: packed pixels in memory or in a memory-mapped file."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearfar.utils.atomic import write_json

FORMAT = 3  # of the folder; a store of another format is prepared again
PIXELS, INDEX, ABOUT = "pixels.bin", "index.npy", "store.json"

Pixels = NDArray[np.uint8]


@dataclass(frozen=True)
class BadFile:
    """A file that could not be decoded.

    Args:
        index: Its position in the dataset.
        name: Its name in the source.
        reason: What is wrong, in a few words.
        unreadable: Whether its bytes could not be read, for example for lack of permission; it is tried again.
    """

    index: int
    name: str
    reason: str
    unreadable: bool = False


@dataclass(frozen=True, eq=False)
class Store:
    """Images of any sizes as packed uint8 pixels, without padding.

    Args:
        pixels: All images one after the other, each [height, width, channels], flattened.
        offsets: Start of each image in ``pixels``, int64 [n].
        sizes: Height and width of each image, int32 [n, 2].
        channels: 1 or 3, the same for all images.
        rows: Position of each image in the dataset, int64 [n], increasing; files that were skipped are missing.
        bad: Files that were skipped.
        folder: Folder of the store; None for a store in memory.
        about: Source and settings of the store, as written in its folder.

    Example:
        >>> store = Store.of_arrays(np.arange(2 * 4 * 5, dtype=np.uint8).reshape(2, 4, 5))
        >>> len(store), store.channels, store.image(1).shape, int(store.image(1)[0, 0, 0])
        (2, 1, (4, 5, 1), 20)
    """

    pixels: Pixels
    offsets: NDArray[np.int64]
    sizes: NDArray[np.int32]
    channels: int
    rows: NDArray[np.int64]
    bad: tuple[BadFile, ...] = ()
    folder: Path | None = None
    about: dict[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.offsets)

    @property
    def nbytes(self) -> int:
        """Size of the pixels in bytes."""
        return self.pixels.size

    def image(self, place: int) -> Pixels:
        """Return the image at a position in the store, [height, width, channels], not copied."""
        if not 0 <= place < len(self):
            raise IndexError(f"place is {place}; the store holds {len(self)} images")
        start, (height, width) = int(self.offsets[place]), self.sizes[place].tolist()
        stop = start + height * width * self.channels
        return self.pixels[start:stop].reshape(height, width, self.channels)

    def places(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the positions in the store of images of the dataset, without those that were skipped.

        Args:
            indices: Positions in the dataset.

        Example:
            >>> images = np.zeros((3, 2, 2), dtype=np.uint8)
            >>> Store.of_arrays(images, rows=np.array([0, 4, 5])).places(np.array([5, 4, 3])).tolist()
            [2, 1]
        """
        if not len(self):
            return np.empty(0, dtype=np.int64)
        places: NDArray[np.int64] = np.searchsorted(self.rows, indices).clip(max=len(self) - 1).astype(np.int64)
        kept: NDArray[np.int64] = places[self.rows[places] == indices]
        return kept

    @classmethod
    def of_arrays(cls, images: Pixels | Sequence[Pixels], *, rows: NDArray[np.int64] | None = None) -> Store:
        """Create a store in memory.

        Args:
            images: One uint8 array [n, h, w] or [n, h, w, c], not copied, or a list of arrays [h, w, c].
            rows: Position of each image in the dataset; None for 0 to n − 1.
        """
        if isinstance(images, np.ndarray):
            pixels, sizes, channels = _of_array(images)
        else:
            pixels, sizes, channels = _of_list(images)
        rows = np.arange(len(sizes), dtype=np.int64) if rows is None else np.asarray(rows, dtype=np.int64)
        if rows.shape != (len(sizes),) or (np.diff(rows) <= 0).any():
            raise ValueError(
                f"rows has shape {rows.shape}; needed are {len(sizes)} increasing numbers, one for each image"
            )
        return cls(pixels, offsets_of(sizes, channels), sizes, channels, rows)

    @classmethod
    def open(cls, folder: str | Path) -> Store:
        """Open a prepared store; its pixels are memory-mapped.

        Args:
            folder: Folder of the store.

        Raises:
            ValueError: If the folder is not a complete store of the current format.
        """
        folder = Path(folder)
        try:
            about = json.loads((folder / ABOUT).read_text(encoding="utf-8"))
            version, channels, count = about["format"], int(about["channels"]), int(about["images"])
            bad = tuple(BadFile(**entry) for entry in about["bad"]) if version == FORMAT else ()
            index = np.load(folder / INDEX, allow_pickle=False)
            length = (folder / PIXELS).stat().st_size
        except (OSError, EOFError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{folder} is not an image store ({type(error).__name__}: {error})") from error
        if version != FORMAT:
            raise ValueError(f"{folder} is a store of format {version}; this version reads {FORMAT}")
        if index.shape != (count, 3) or index.dtype != np.int64:
            raise ValueError(f"{folder} is damaged: {INDEX} does not fit {ABOUT}")
        rows, sizes = index[:, 0].copy(), index[:, 1:].astype(np.int32)
        if length != _length(sizes, channels):
            raise ValueError(f"{folder} is damaged: {PIXELS} has {length} bytes; needed are {_length(sizes, channels)}")
        pixels: Pixels = np.memmap(folder / PIXELS, dtype=np.uint8, mode="r") if length else np.empty(0, dtype=np.uint8)
        return cls(pixels, offsets_of(sizes, channels), sizes, channels, rows, bad, folder, about)

    def __reduce__(self) -> tuple[Callable[..., Store], tuple[Any, ...]]:
        """Pickle the path of a store on disk, so that another process maps the same file."""
        if self.folder is not None:
            return Store.open, (self.folder,)
        return Store, (self.pixels, self.offsets, self.sizes, self.channels, self.rows, self.bad)


def finalize(
    folder: Path, rows: NDArray[np.int64], sizes: NDArray[np.int32], channels: int, about: dict[str, Any]
) -> None:
    """Turn a folder with finished pixels into a store: write the index and the description, and sync all to disk."""
    with open(folder / INDEX, "wb") as file:
        np.save(file, np.column_stack([rows, sizes.astype(np.int64).reshape(-1, 2)]))
        file.flush()
        os.fsync(file.fileno())
    with open(folder / PIXELS, "rb+") as file:
        os.fsync(file.fileno())
    facts = {"format": FORMAT, "images": len(rows), "channels": channels}
    write_json(folder / ABOUT, {**facts, **about})


def offsets_of(sizes: NDArray[np.int32], channels: int) -> NDArray[np.int64]:
    """Return the start of each image if all are packed in order."""
    lengths = sizes.astype(np.int64).prod(axis=1) * channels
    return np.concatenate([np.zeros(1, dtype=np.int64), lengths.cumsum()])[:-1]


def _length(sizes: NDArray[np.int32], channels: int) -> int:
    return int((sizes.astype(np.int64).prod(axis=1) * channels).sum())


def _of_array(images: Pixels) -> tuple[Pixels, NDArray[np.int32], int]:
    if images.dtype != np.uint8 or images.ndim not in (3, 4) or (images.ndim == 4 and images.shape[3] not in (1, 3)):
        raise ValueError(
            f"images is of {images.dtype} and has shape {images.shape}; needed is uint8 [n, h, w], [n, h, w, 1] or "
            "[n, h, w, 3]"
        )
    count, height, width = images.shape[:3]
    if 0 in (height, width):
        raise ValueError(f"images has shape {images.shape}; height and width must be ≥ 1")
    sizes = np.tile(np.array([height, width], dtype=np.int32), (count, 1))
    return images.reshape(-1), sizes, images.shape[3] if images.ndim == 4 else 1


def _of_list(images: Sequence[Pixels]) -> tuple[Pixels, NDArray[np.int32], int]:
    channels = images[0].shape[2] if len(images) and images[0].ndim == 3 else 1
    for number, image in enumerate(images):
        grey = image.ndim == 2 and channels == 1
        if image.dtype != np.uint8 or not (grey or (image.ndim == 3 and image.shape[2] == channels in (1, 3))):
            raise ValueError(
                f"images[{number}] is of {image.dtype} and has shape {image.shape}; needed is uint8 [h, w, c] with the "
                "same 1 or 3 channels in all"
            )
        if image.size == 0:
            raise ValueError(f"images[{number}] has shape {image.shape}; height and width must be ≥ 1")
    sizes = np.array([image.shape[:2] for image in images], dtype=np.int32).reshape(-1, 2)
    flat = [image.reshape(-1) for image in images]
    return np.concatenate(flat) if flat else np.empty(0, dtype=np.uint8), sizes, channels
