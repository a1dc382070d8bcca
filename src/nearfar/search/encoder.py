"""From images or vectors to embeddings: decoding, preprocessing and the model."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageOps

from nearfar.data.datasets.arrays import as_source
from nearfar.data.store.decode import decode, pad_to_square, shrink
from nearfar.data.store.sources import Arrays, encode_image
from nearfar.data.transforms.view import View, planar, window
from nearfar.networks import Embedder, Ensemble
from nearfar.networks.embedder import cpu_batch
from nearfar.networks.weights import save
from nearfar.utils.progress import Progress
from nearfar.utils.system import prefetch
from nearfar.utils.tensors import as_device
from nearfar.utils.validation import whole

Model = Embedder | Ensemble
Pixels = NDArray[np.uint8]
Decode = Callable[..., Pixels]  # takes bytes, channels and side, as ``data.store.decode.decode``
# A path, the bytes of an image file, decoded pixels, or a vector for a model that reads vectors.
ImageInput = str | Path | bytes | Image.Image | NDArray[Any]

THUMBNAIL_SIDE = 160  # pixels of the longer side
TINY = 64  # images up to this side are enlarged without interpolation, which JPEG would blur
QUALITY = 82

T = TypeVar("T")
U = TypeVar("U")


class Encoder:
    """A model in evaluation mode with its preprocessing."""

    def __init__(self, model: Model, *, device: str | torch.device = "auto") -> None:
        self.device = device if isinstance(device, torch.device) else as_device("device", device)
        self.model = model.to(self.device).eval()
        self.dim, self.unit = int(model.dim), bool(model.normalize)
        self._lock = threading.Lock()
        self.preprocessing = steps = save.preprocessing_of(model)
        self.in_dim = model.in_channels if steps is None else None
        if steps is None:
            return
        self._view = View(size=steps.size, crop=steps.crop, resize=steps.resize, aspect=steps.aspect, flip=False)
        self._side = None if steps.pad else steps.resize  # to which images may be reduced when they are decoded
        self._channels = steps.normalization.channels
        self._flips_channels = steps.normalization.order == "BGR" and self._channels == 3
        self._factor, self._shift = steps.normalization.constants(self.device)  # once: the same for every batch

    @cached_property
    def fingerprint(self) -> str:
        """Fingerprint of the model."""
        return save.fingerprint(self.model)

    def preprocess(self, item: ImageInput) -> NDArray[Any]:
        """Decode, resize and crop an image, or check a vector."""
        if self.preprocessing is None:
            return self._vector(item)
        return self._cropped(decoded(item, self._channels, self._side))

    def preprocess_with_thumbnail(self, item: ImageInput, decode: Decode = decode) -> tuple[NDArray[Any], bytes]:
        """Decode an image once, for the model and for a thumbnail."""
        if self.preprocessing is None:
            return self._vector(item), b""
        if isinstance(item, (str, Path)):
            item = Path(item).read_bytes()
        pixels = decoded(item, self._channels, self._side, decode)
        # The pixels for the model are enough for a thumbnail, unless they are gray or very small.
        enough = pixels.shape[2] == 3 and self.preprocessing.resize >= THUMBNAIL_SIDE
        return self._cropped(pixels), thumbnail(pixels if enough else item, decode)

    def vectors(self, inputs: Sequence[NDArray[Any]] | NDArray[Any]) -> NDArray[np.float32]:
        """Compute embeddings: in one forward pass, or several of fewer large images on a CPU."""
        if not len(inputs):
            return np.empty((0, self.dim), dtype=np.float32)
        batch = torch.from_numpy(np.asarray(inputs)).to(self.device)
        with self._lock, torch.inference_mode():
            if self.preprocessing is not None:
                batch = (batch.flip(1) if self._flips_channels else batch).float() * self._factor - self._shift
                batch = batch.contiguous(memory_format=torch.channels_last)
            most = cpu_batch(*batch.shape[2:]) if batch.ndim == 4 and self.device.type == "cpu" else len(batch)
            parts = [self.model(part).float() for part in torch.split(batch, most)]
            vectors: NDArray[np.float32] = torch.cat(parts).cpu().numpy()
        return vectors

    def encode(
        self, items: Sequence[ImageInput] | NDArray[Any], *, batch_size: int = 64, progress: Progress | None = None
    ) -> NDArray[np.float32]:
        """Compute the embeddings of images or vectors."""
        vectors = np.empty((len(items), self.dim), dtype=np.float32)
        for start in range(0, len(items), whole("batch_size", batch_size)):
            inputs: Any = items[start : start + batch_size]
            if self.preprocessing is None and isinstance(inputs, np.ndarray):
                self._vector(inputs[0])
                inputs = inputs.astype(np.float32)
            else:
                inputs = [self.preprocess(item) for item in inputs]
            vectors[start : start + batch_size] = self.vectors(inputs)
            if progress is not None:
                progress(start + len(inputs), len(items))
        return vectors

    def encode_with_thumbnail(self, item: ImageInput) -> tuple[NDArray[np.float32], bytes]:
        """Compute the embedding [dim] of an image or vector, and the thumbnail; an image is decoded once."""
        inputs, small = self.preprocess_with_thumbnail(item)
        return self.vectors([inputs])[0], small

    def _cropped(self, pixels: Pixels) -> Pixels:
        if self.preprocessing is not None and self.preprocessing.pad:
            pixels = shrink(pad_to_square(pixels), self.preprocessing.resize)
        plan = self._view.plan(np.array([pixels.shape[:2]]))
        return planar(window(pixels, plan, 0))

    def _vector(self, item: Any) -> NDArray[np.float32]:
        if not isinstance(item, np.ndarray) or item.shape != (self.in_dim,) or item.dtype.kind not in "fiu":
            if not isinstance(item, np.ndarray):
                raise TypeError(f"the model reads vectors of {self.in_dim} numbers, not images or files")
            given = f"{item.dtype} {list(item.shape)}"
            raise TypeError(f"the model reads vectors of {self.in_dim} numbers; the input is {given}")
        return item.astype(np.float32)


def embed(model: Model, inputs: Any, *, batch_size: int = 64, progress: Progress | None = None) -> NDArray[np.float32]:
    """Compute the embeddings of images or vectors in memory, or of image files; see ``Embedder.embed``."""
    source, was = as_source(inputs), model.training
    try:
        encoder = Encoder(model, device=next(model.parameters(), torch.empty(0)).device)
        if isinstance(source, Arrays):
            return encoder.encode(source.array, batch_size=batch_size, progress=progress)
        vectors: list[NDArray[np.float32]] = []
        batch: list[NDArray[Any]] = []
        rows = range(len(source))
        for row, item in enumerate(prefetch(lambda row: encoder.preprocess(source.read(row)), rows), start=1):
            batch.append(item)
            if len(batch) == whole("batch_size", batch_size) or row == len(rows):
                vectors.append(encoder.vectors(batch))
                batch.clear()
                if progress is not None:
                    progress(row, len(rows))
        return np.concatenate(vectors)
    finally:
        model.train(was)


def thumbnail(image: ImageInput, decode: Decode = decode) -> bytes:
    """Make a color JPEG with at most 160 pixels per side."""
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


def decoded(image: ImageInput, channels: int, side: int | None, decode: Decode = decode) -> Pixels:
    """Return the pixels of an image, upright, with transparency on white.

    Pixels that are already decoded are not encoded or decoded again; they are resized at most once.
    """
    if isinstance(image, (str, Path)):
        image = Path(image).read_bytes()
    if isinstance(image, bytes):
        return decode(image, channels=channels, side=side)
    if isinstance(image, np.ndarray):
        pixels = _with_channels(image, channels)
        return pixels if side is None else shrink(pixels, side)
    if not isinstance(image, Image.Image):
        raise TypeError(
            f"the image is a {type(image).__name__}; it must be a path, bytes, a Pillow image or uint8 pixels"
        )
    pixels = _flattened(image, channels)
    return pixels if side is None else shrink(pixels, side)


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
    if image.mode not in ("L", "RGB") or "transparency" in image.info:
        return decode(encode_image(image), channels=channels)
    with suppress(Exception):  # broken EXIF data does not make an image unusable
        image = ImageOps.exif_transpose(image)
    return _with_channels(np.asarray(image, dtype=np.uint8), channels)
