"""Small pictures of items, packed into one file."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearfar.utils.atomic import whole_file

PIXELS, PLACES = "thumbnails.bin", "thumbnails.npy"


class Pack:
    """The thumbnails of a saved index, by row. An empty one stands for none."""

    def __init__(self, folder: Path) -> None:
        places = np.load(folder / PLACES, allow_pickle=False)
        self._starts: NDArray[np.int64] = places
        length = (folder / PIXELS).stat().st_size
        if places.ndim != 1 or not len(places) or int(places[-1]) != length:
            raise ValueError(f"{folder / PIXELS} has {length:,} bytes, which does not fit {PLACES}")
        self._data: Any = np.memmap(folder / PIXELS, dtype=np.uint8, mode="r") if length else np.empty(0, np.uint8)

    def get(self, row: int) -> bytes:
        found: bytes = self._data[int(self._starts[row]) : int(self._starts[row + 1])].tobytes()
        return found


def pack(folder: Path, pictures: Iterable[bytes]) -> None:
    """Write thumbnails one behind the other, and where each begins."""
    starts = [0]
    with whole_file(folder / PIXELS) as draft, open(draft, "wb") as file:
        for picture in pictures:
            file.write(picture)
            starts.append(starts[-1] + len(picture))
        file.flush()
    with whole_file(folder / PLACES) as draft, open(draft, "wb") as file:
        np.save(file, np.array(starts, dtype=np.int64))
