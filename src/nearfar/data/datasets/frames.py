"""Images cut to their bounding boxes, or padded to squares, when they are decoded."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from nearfar.data.datasets.base import Column, Dataset
from nearfar.data.store.decode import Pixels, decode
from nearfar.data.store.fingerprint import KIND, SIZE
from nearfar.data.store.sources import Arrays, Ints, Source, encode_image

BOX = ("box_top", "box_left", "box_height", "box_width")  # columns of a dataset with bounding boxes, in pixels


class Framed(Source):
    """Images of another source, cut to boxes and padded."""

    def __init__(self, source: Source, boxes: Ints | None = None, *, pad: bool = False) -> None:
        self.source, self.boxes, self.pad = source, boxes, pad

    def __len__(self) -> int:
        return len(self.source)

    def name(self, index: int) -> str:
        return self.source.name(index)

    def read(self, index: int) -> bytes:
        return encode_image(self.pixels(index))

    def pixels(self, index: int, decode: Callable[..., Pixels] = decode, **settings: Any) -> Pixels:
        box = None if self.boxes is None else tuple(self.boxes[index].tolist())
        return decode(self.source.read(index), box=box, pad=self.pad, **settings)

    def fingerprint(self) -> str:
        digest = hashlib.blake2b(f"{self.source.fingerprint()} pad={self.pad} ".encode(), digest_size=SIZE)
        if self.boxes is not None:
            digest.update(self.boxes.astype("<i8").tobytes())
        return KIND + digest.hexdigest()


def cut_to_boxes(dataset: Dataset) -> Dataset:
    """Return the dataset with images cut to the boxes in its columns."""
    missing = [name for name in BOX if name not in dataset.columns]
    if missing:
        raise ValueError(f"boxes is true; {dataset.name} has no bounding boxes in this layout")
    boxes = np.stack([dataset.columns[name] for name in BOX], axis=1).astype(np.int64)
    return replace(dataset, source=Framed(dataset.source, boxes))


def pad_to_squares(dataset: Dataset) -> Dataset:
    """Return the dataset with images padded to squares with black."""
    if isinstance(dataset.source, Arrays):
        raise ValueError(f"data.pad is true; {dataset.name} holds arrays, and only image files can be padded")
    if isinstance(dataset.source, Framed):
        return replace(dataset, source=Framed(dataset.source.source, dataset.source.boxes, pad=True))
    return replace(dataset, source=Framed(dataset.source, pad=True))


def box_columns(corners: Column) -> dict[str, list[int]]:
    """Return the columns of ``BOX`` for left, top, right and bottom of each box, [n, 4]."""
    left, top = np.floor(corners[:, 0]), np.floor(corners[:, 1])
    height, width = np.ceil(corners[:, 3]) - top, np.ceil(corners[:, 2]) - left
    values = (top, left, np.maximum(height, 1), np.maximum(width, 1))
    return {name: value.astype(np.int64).tolist() for name, value in zip(BOX, values, strict=True)}
