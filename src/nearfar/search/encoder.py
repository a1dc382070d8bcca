"""From images to vectors: decoding, preprocessing and the model."""

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
from nearfar.data.transforms.view import View, planar, window
from nearfar.networks import Embedder, Ensemble
from nearfar.networks.weights import save
from nearfar.utils.tensors import as_device

Model = Embedder | Ensemble
Pixels = NDArray[np.uint8]
Decode = Callable[..., Pixels]  # takes bytes, channels and side, as ``data.store.decode.decode``
ImageInput = str | Path | bytes | Image.Image | Pixels  # a path, the bytes of an image file, or decoded pixels

WORKERS = 2  # decoding threads
THUMBNAIL_SIDE = 160  # pixels of the longer side
TINY = 64  # images up to this side are enlarged without interpolation, which JPEG would blur
QUALITY = 82

T = TypeVar("T")
U = TypeVar("U")


class Encoder:
    """A model in evaluation mode with its preprocessing.

    Args:
        model: A network for images, as ``nearfar.load`` returns it.
        device: Where it computes: "auto", "cpu", "cuda", "cuda:1", …

    Example:
        >>> from nearfar import networks
        >>> encoder = Encoder(networks.create("small_cnn", dim=4), device="cpu")
        >>> encoder.encode([Image.new("L", (9, 12))]).shape
        (1, 4)
    """

    def __init__(self, model: Model, *, device: str = "auto") -> None:
        found = save.preprocessing_of(model)
        if found is None:
            raise ValueError("model takes vectors; an index of images needs a model that takes images")
        self.preprocessing = found
        self.device = as_device("device", device)
        self.model = model.to(self.device).eval()
        self.dim, self.unit = int(model.dim), bool(model.normalize)
        self.fingerprint = save.fingerprint(model)
        self._view = View(size=found.size, crop=found.crop, resize=found.resize, aspect=found.aspect, flip=False)
        self._channels = found.normalization.channels
        self._flips_channels = found.normalization.order == "BGR" and self._channels == 3
        self._factor, self._shift = found.normalization.constants(self.device)  # once: the same for every batch
        self._lock = threading.Lock()

    def preprocess(self, image: ImageInput) -> Pixels:
        """Decode, resize and crop an image.

        Args:
            image: The image; a decoded one is used as it is.

        Returns:
            What the model takes, [channels, height, width], before normalization.
        """
        return self._cropped(decoded(image, self._channels, self.preprocessing.resize))

    def preprocess_with_thumbnail(self, image: ImageInput, decode: Decode = decode) -> tuple[Pixels, bytes]:
        """Decode an image once, for the model and for a thumbnail.

        Args:
            image: The image.
            decode: Decodes the bytes of a file.

        Returns:
            What ``preprocess`` returns, and a JPEG thumbnail.
        """
        if isinstance(image, (str, Path)):
            image = Path(image).read_bytes()
        pixels = decoded(image, self._channels, self.preprocessing.resize, decode)
        # The pixels for the model are enough for a thumbnail, unless they are gray or very small.
        enough = pixels.shape[2] == 3 and self.preprocessing.resize >= THUMBNAIL_SIDE
        return self._cropped(pixels), thumbnail(pixels if enough else image, decode)

    def vectors(self, pixels: Sequence[Pixels]) -> NDArray[np.float32]:
        """Compute embeddings in one forward pass.

        Args:
            pixels: Results of ``preprocess``.

        Returns:
            The embeddings [n, dim].
        """
        if not len(pixels):
            return np.empty((0, self.dim), dtype=np.float32)
        batch = torch.from_numpy(np.stack(pixels)).to(self.device)
        with self._lock, torch.inference_mode():
            images = (batch.flip(1) if self._flips_channels else batch).float() * self._factor - self._shift
            images = images.contiguous(memory_format=torch.channels_last)
            found: NDArray[np.float32] = self.model(images).float().cpu().numpy()
        return found

    def encode(self, images: Sequence[ImageInput], *, batch_size: int = 64) -> NDArray[np.float32]:
        """Compute the embeddings of images.

        Args:
            images: The images.
            batch_size: Number of images per forward pass.

        Returns:
            The embeddings [n, dim].
        """
        parts = []
        for start in range(0, len(images), batch_size):
            parts.append(self.vectors([self.preprocess(image) for image in images[start : start + batch_size]]))
        return np.concatenate(parts) if parts else np.empty((0, self.dim), dtype=np.float32)

    def encode_with_thumbnail(self, image: ImageInput) -> tuple[NDArray[np.float32], bytes]:
        """Compute the embedding [dim] of an image, and its thumbnail; the image is decoded once.

        Args:
            image: The image.
        """
        pixels, small = self.preprocess_with_thumbnail(image)
        return self.vectors([pixels])[0], small

    def _cropped(self, pixels: Pixels) -> Pixels:
        plan = self._view.plan(np.array([pixels.shape[:2]]))
        return planar(window(pixels, plan, 0))


def thumbnail(image: ImageInput, decode: Decode = decode) -> bytes:
    """Make a color JPEG with at most 160 pixels per side.

    Args:
        image: The image.
        decode: Decodes the bytes of a file.

    Example:
        >>> Image.open(io.BytesIO(thumbnail(Image.new("RGB", (640, 320))))).size
        (160, 80)
        >>> Image.open(io.BytesIO(thumbnail(Image.new("L", (8, 8))))).size
        (160, 160)
    """
    small = Image.fromarray(decoded(image, 3, THUMBNAIL_SIDE, decode))
    longest = max(small.size)
    if longest <= TINY:
        times = THUMBNAIL_SIDE // longest
        small = small.resize((small.width * times, small.height * times), Image.Resampling.NEAREST)
    elif longest > THUMBNAIL_SIDE:
        scale = THUMBNAIL_SIDE / longest
        size = max(1, round(small.width * scale)), max(1, round(small.height * scale))
        small = small.resize(size, Image.Resampling.BILINEAR, reducing_gap=3.0)
    file = io.BytesIO()
    small.save(file, "JPEG", quality=QUALITY)
    return file.getvalue()


def decoded(image: ImageInput, channels: int, side: int, decode: Decode = decode) -> Pixels:
    """Return the pixels of an image, upright, with transparency on white.

    Pixels that are already decoded are not encoded or decoded again; they are resized at most once.

    Args:
        image: The image.
        channels: 1 for gray, 3 for color.
        side: Length of the shorter side that is needed; larger images are reduced to it.
        decode: Decodes the bytes of a file.

    Returns:
        Pixels [height, width, channels].
    """
    if isinstance(image, (str, Path)):
        image = Path(image).read_bytes()
    if isinstance(image, bytes):
        return decode(image, channels=channels, side=side)
    if isinstance(image, np.ndarray):
        return shrink(_with_channels(image, channels), side)
    if not isinstance(image, Image.Image):
        raise TypeError(
            f"the image is a {type(image).__name__}; it must be a path, bytes, a Pillow image or uint8 pixels"
        )
    return shrink(_flattened(image, channels), side)


def prefetch(function: Callable[[T], U], work: Iterable[T], *, workers: int = WORKERS, most: int = 128) -> Iterator[U]:
    """Apply a function in threads, and yield the results in order.

    Args:
        function: The function.
        work: Its arguments.
        workers: Number of threads.
        most: Number of results that may wait to be consumed.

    Example:
        >>> list(prefetch(abs, [-1, -2]))
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


def _with_channels(pixels: Pixels, channels: int) -> Pixels:
    """Pixels [h, w], [h, w, 1] or [h, w, 3] as [h, w, channels]."""
    if pixels.dtype != np.uint8 or not (pixels.ndim == 2 or (pixels.ndim == 3 and pixels.shape[2] in (1, 3))):
        raise ValueError(
            f"the image is of {pixels.dtype} and has shape {pixels.shape}; it must be uint8 [h, w], [h, w, 1] "
            "or [h, w, 3]"
        )
    pixels = pixels.reshape(*pixels.shape[:2], -1)
    if pixels.shape[2] == channels:
        return pixels
    if channels == 3:
        return np.repeat(pixels, 3, axis=2)
    return np.asarray(Image.fromarray(pixels).convert("L"))[:, :, None]


def _flattened(image: Image.Image, channels: int) -> Pixels:
    """The pixels of a Pillow image as ``decode`` reads them from its file: upright, on white, with 8 bits."""
    with suppress(Exception):  # broken EXIF data does not make an image unusable
        image = ImageOps.exif_transpose(image)
    if image.mode in ("L", "RGB") and "transparency" not in image.info:
        return _with_channels(np.asarray(image, dtype=np.uint8), channels)
    file = io.BytesIO()
    image.save(file, "TIFF" if image.mode in ("F", "I", "CMYK", "LAB", "YCbCr") else "PNG")
    return decode(file.getvalue(), channels=channels)
