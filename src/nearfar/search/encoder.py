"""From pictures to vectors: a model, and what happens to pictures before it reads them."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageOps

from nearfar.data.store.decode import decode, shrink
from nearfar.data.transforms.cpu import planar, window
from nearfar.data.transforms.view import View
from nearfar.networks import Embedder, Ensemble
from nearfar.networks.weights import save
from nearfar.search.storage import thumbnails
from nearfar.utils.inputs import as_device

Model = Embedder | Ensemble
Pixels = NDArray[np.uint8]
Picture = str | Path | bytes | Image.Image | Pixels  # a file's name, its content, or pixels

WORKERS = 2  # threads that decode

T = TypeVar("T")
U = TypeVar("U")


class Encoder:
    """A model that is ready to look at pictures.

    Args:
        model: What ``nearfar.networks.weights.save`` loads, in evaluation mode.
        device: Where it computes: "auto", "cpu", "cuda", "cuda:1", …

    >>> from nearfar import networks
    >>> encoder = Encoder(networks.create("small_cnn", dim=4), device="cpu")
    >>> encoder.encode([Image.new("L", (9, 12))]).shape
    (1, 4)
    """

    def __init__(self, model: Model, *, device: str = "auto") -> None:
        found = save.preprocessing_of(model)
        if found is None:
            raise ValueError("model reads vectors; an index of pictures needs one that reads pictures")
        self.preprocessing = found
        self.device = as_device("device", device)
        self.model = model.to(self.device).eval()
        self.dim, self.unit = int(model.dim), bool(model.normalize)
        self.fingerprint = save.fingerprint(model)
        self._view = View(size=found.size, crop=found.crop, resize=found.resize, aspect=found.aspect, flip=False)
        self._lock = threading.Lock()

    def look(self, picture: Picture) -> Pixels:
        """What the model sees of a picture, [channels, height, width]."""
        return self._seen(self._pixels(picture))

    def look_twice(self, picture: Picture) -> tuple[Pixels, bytes]:
        """What the model sees of a picture, and a thumbnail for people."""
        if isinstance(picture, (str, Path)):
            picture = Path(picture).read_bytes()
        pixels = self._pixels(picture)
        # What was decoded for the model is enough for people too, unless it is grey or very small.
        enough = pixels.shape[2] == 3 and self.preprocessing.resize >= thumbnails.SIDE
        return self._seen(pixels), thumbnail(pixels if enough else picture)

    def _pixels(self, picture: Picture) -> Pixels:
        return _pixels(picture, self.preprocessing.normalization.channels, self.preprocessing.resize)

    def _seen(self, pixels: Pixels) -> Pixels:
        plan = self._view.plan(np.array([pixels.shape[:2]]))
        return planar(window(pixels, plan, 0))

    def vectors(self, seen: Sequence[Pixels]) -> NDArray[np.float32]:
        """The embeddings [n, dim] of what ``look`` gave."""
        if not len(seen):
            return np.empty((0, self.dim), dtype=np.float32)
        pixels = torch.from_numpy(np.stack(seen)).to(self.device)
        with self._lock, torch.inference_mode():
            images = self.preprocessing.normalization(pixels).contiguous(memory_format=torch.channels_last)
            found: NDArray[np.float32] = self.model(images).float().cpu().numpy()
        return found

    def encode(self, pictures: Sequence[Picture], *, batch_size: int = 64) -> NDArray[np.float32]:
        """The embeddings [n, dim] of pictures."""
        parts = []
        for start in range(0, len(pictures), batch_size):
            parts.append(self.vectors([self.look(picture) for picture in pictures[start : start + batch_size]]))
        return np.concatenate(parts) if parts else np.empty((0, self.dim), dtype=np.float32)


def thumbnail(picture: Picture) -> bytes:
    """A small JPEG of a picture, in colour."""
    pixels = _pixels(picture, 3, thumbnails.SIDE)
    return thumbnails.make(Image.fromarray(pixels))


def ahead(function: Callable[[T], U], work: Iterable[T], *, workers: int = WORKERS, most: int = 128) -> Iterator[U]:
    """What a function gives for each, in order, computed by threads; at most so many wait to be taken.

    >>> list(ahead(abs, [-1, -2]))
    [1, 2]
    """
    with ThreadPoolExecutor(workers, "nearfar-decode") as pool:
        waiting: list[Future[U]] = []
        try:
            for each in work:
                waiting.append(pool.submit(function, each))
                if len(waiting) >= most:
                    yield waiting.pop(0).result()
            while waiting:
                yield waiting.pop(0).result()
        finally:
            for future in waiting:
                future.cancel()


def _pixels(picture: Picture, channels: int, side: int) -> Pixels:
    """[height, width, channels], not much larger than needed."""
    if isinstance(picture, (str, Path)):
        picture = Path(picture).read_bytes()
    if isinstance(picture, bytes):
        return decode(picture, channels=channels, side=side)
    if isinstance(picture, np.ndarray):
        if (
            picture.dtype != np.uint8
            or picture.ndim not in (2, 3)
            or (picture.ndim == 3 and picture.shape[2] not in (1, 3))
        ):
            raise ValueError(
                f"the picture is of {picture.dtype} and has shape {picture.shape}; needed is uint8 [h, w], [h, w, 1] "
                "or [h, w, 3]"
            )
        picture = Image.fromarray(
            picture.reshape(picture.shape[:2]) if picture.size == picture.shape[0] * picture.shape[1] else picture
        )
    if not isinstance(picture, Image.Image):
        raise TypeError(
            f"the picture is a {type(picture).__name__}; needed is a path, bytes, a Pillow image or uint8 pixels"
        )
    return shrink(_plain(picture, channels), side)


def _plain(image: Image.Image, channels: int) -> Pixels:
    """The pixels of an open picture as those of its file would be: upright, transparency is white, 16 bits are 8."""
    with suppress(Exception):  # broken EXIF is no reason to lose the picture
        image = ImageOps.exif_transpose(image)
    wanted = "L" if channels == 1 else "RGB"
    if image.mode in ("L", "RGB") and "transparency" not in image.info:
        shown = image.convert(wanted)
        return np.asarray(shown, dtype=np.uint8).reshape(shown.height, shown.width, channels)
    file = io.BytesIO()
    image.save(file, "TIFF" if image.mode in ("F", "I", "CMYK", "LAB", "YCbCr") else "PNG")
    return decode(file.getvalue(), channels=channels)
