"""Decodes image files of any format to pixels.

Formats are recognized by the first bytes of a file, never by its extension. Pillow decodes; its process-wide settings
are not changed.
"""

from __future__ import annotations

import importlib
from io import BytesIO
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from nearfar.utils.validation import one_of, whole

Pixels = NDArray[np.uint8]

ASPECTS = ("keep", "squash")
MAX_PIXELS = 1 << 27  # 134 million: larger than any camera's image; half a gigabyte while decoding

# First bytes of a file, format, and the module and class of Pillow that read it. "?" matches any byte.
READERS = (
    (b"\xff\xd8\xff", "JPEG", "JpegImagePlugin.JpegImageFile"),  # reads the first image of an MPO
    (b"\x89PNG\r\n\x1a\n", "PNG", "PngImagePlugin.PngImageFile"),
    (b"RIFF????WEBP", "WebP", "WebPImagePlugin.WebPImageFile"),
    (b"GIF87a", "GIF", "GifImagePlugin.GifImageFile"),
    (b"GIF89a", "GIF", "GifImagePlugin.GifImageFile"),
    (b"II*\0", "TIFF", "TiffImagePlugin.TiffImageFile"),
    (b"MM\0*", "TIFF", "TiffImagePlugin.TiffImageFile"),
    (b"II+\0", "TIFF", "TiffImagePlugin.TiffImageFile"),
    (b"MM\0+", "TIFF", "TiffImagePlugin.TiffImageFile"),
    (b"BM", "BMP", "BmpImagePlugin.BmpImageFile"),
    (b"????ftypavi", "AVIF", "AvifImagePlugin.AvifImageFile"),
    (b"\0\0\0\x0cjP  \r\n\x87\n", "JPEG 2000", "Jpeg2KImagePlugin.Jpeg2KImageFile"),
    (b"\xff\x4f\xff\x51", "JPEG 2000", "Jpeg2KImagePlugin.Jpeg2KImageFile"),
    *((f"P{kind}".encode(), "PPM", "PpmImagePlugin.PpmImageFile") for kind in range(1, 7)),
)
# Other files that are often found among images.
OTHERS = (
    (b"????ftyp", "an HEIC image or a video, which is not supported"),
    (b"%PDF", "a PDF document, not an image"),
    (b"PK\x03\x04", "a zip archive, not an image"),
    (b"\x1f\x8b", "a gzip archive, not an image"),
    (b"8BPS", "a Photoshop document, which is not supported"),
    (b"\0\0\1\0", "an icon, which is not supported"),
    (b"version https://git-lfs", "a Git LFS pointer; the image itself was not fetched"),
)

# EXIF orientation → number of counterclockwise quarter turns, and whether the result is mirrored.
TURNS = {
    1: (0, False),
    2: (0, True),
    3: (2, False),
    4: (2, True),
    5: (3, True),
    6: (3, False),
    7: (1, True),
    8: (1, False),
}
ORIENTATION = 0x0112
BILINEAR = Image.Resampling.BILINEAR


class BadImage(ValueError):
    """The bytes are not an image that can be decoded.

    Args:
        reason: What is wrong, in a few words.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def decode(
    data: bytes,
    *,
    channels: int = 3,
    max_pixels: int = MAX_PIXELS,
    side: int | None = None,
    aspect: str = "keep",
) -> Pixels:
    """Decode an image file to uint8 pixels [height, width, channels].

    The orientation of EXIF is applied, transparency becomes white, and 16 bits become 8. Of an animation the first
    frame is used, of several pages the first. Files that cannot be decoded completely are errors.

    Args:
        data: Bytes of the file.
        channels: 3 for RGB, 1 for grayscale.
        max_pixels: Larger images are an error, before anything is decoded.
        side: Shrink as :func:`shrink` does; large JPEGs are then decoded at a reduced size.
        aspect: "keep" or "squash".

    Raises:
        BadImage: If the bytes cannot be decoded.

    Example:
        >>> file = BytesIO()
        >>> Image.new("CMYK", (4, 3), (0, 0, 0, 0)).save(file, "JPEG")
        >>> decode(file.getvalue()).shape, int(decode(file.getvalue()).min())
        ((3, 4, 3), 255)
    """
    whole("channels", channels)
    if channels not in (1, 3):
        raise ValueError(f"channels is {channels}; allowed are 1 and 3")
    if side is not None:
        whole("side", side)
    one_of("aspect", aspect, ASPECTS)
    kind, reader = _reader(data)
    try:
        image = _open(reader, data)
        width, height = image.size
        if width < 1 or height < 1:
            raise BadImage(f"{width} × {height} pixels")
        if width * height > whole("max_pixels", max_pixels):
            raise BadImage(f"{width} × {height} pixels; at most {max_pixels:,} are decoded")
        if kind == "JPEG" and side is not None:
            _draft(image, side)
        image.load()
        orientation = _orientation(image)
        image = _flat(image, channels)
        if side is not None:
            image = _resized(image, side, aspect)
        pixels = np.asarray(image, dtype=np.uint8)
        return _upright(pixels.reshape(*pixels.shape[:2], channels), orientation)
    except BadImage:
        raise
    except MemoryError:
        raise BadImage(f"{kind}: not enough memory") from None
    # Decoders raise all kinds of exceptions for damaged files.
    except Exception as error:
        raise BadImage(f"{kind}: {_words(error)}") from error


def shrink(image: Pixels, side: int, aspect: str = "keep") -> Pixels:
    """Resize an image, antialiased and bilinear, as Pillow's ``resize``.

    Args:
        image: Image [height, width, channels].
        side: Length of the shorter side ("keep"; never enlarged) or of both sides ("squash").
        aspect: "keep" or "squash".

    Example:
        >>> shrink(np.zeros((300, 600, 3), dtype=np.uint8), 100).shape
        (100, 200, 3)
    """
    whole("side", side)
    one_of("aspect", aspect, ASPECTS)
    grey = image.shape[2] == 1
    resized = _resized(Image.fromarray(image[:, :, 0] if grey else image), side, aspect)
    return np.asarray(resized).reshape(resized.height, resized.width, image.shape[2])


def _begins(data: bytes, start: bytes) -> bool:
    return len(data) >= len(start) and all(want in (63, have) for want, have in zip(start, data, strict=False))


def _reader(data: bytes) -> tuple[str, str]:
    """Return the format of a file and the name of its reader in Pillow."""
    for start, kind, reader in READERS:
        if _begins(data, start):
            return kind, reader
    if not data:
        raise BadImage("an empty file")
    if data[4:8] == b"ftyp" and b"avif" in data[8:64]:  # "avif" is not the first of its brands
        return "AVIF", "AvifImagePlugin.AvifImageFile"
    for start, name in OTHERS:
        if _begins(data, start):
            raise BadImage(name)
    head = data[:512].lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if head.startswith((b"<!doctype html", b"<html", b"<head", b"<body")) or b"<html" in head:
        raise BadImage("an HTML page, not an image")
    if head.startswith((b"<svg", b"<?xml")):
        raise BadImage("an SVG or XML document, which is not supported")
    if not data.strip(b"\0"):
        raise BadImage("only zero bytes")
    if all(byte >= 32 or byte in b"\t\r\n" for byte in data[:512]):
        raise BadImage("text, not an image")
    raise BadImage("not a known image format")


def _open(reader: str, data: bytes) -> Any:
    """Open the header of an image. Image.open is not used, as its size limit is process-wide."""
    module, _, name = reader.partition(".")
    try:
        factory = getattr(importlib.import_module(f"PIL.{module}"), name)
    except ImportError:
        raise BadImage("a format that this version of Pillow does not support") from None
    return factory(BytesIO(data))


def _draft(image: Any, side: int) -> None:
    """Let libjpeg decode at 1/2, 1/4 or 1/8 of the size, but at least at about twice the requested size."""
    width, height = image.size
    scale = 2 * side / min(width, height)
    if scale <= 0.5:
        image.draft(image.mode, (int(width * scale), int(height * scale)))


def _orientation(image: Any) -> int:
    """Return the EXIF orientation; call it after loading, as Pillow rotates TIFFs and then updates it."""
    try:
        orientation = image.getexif().get(ORIENTATION, 1)
    except Exception:  # broken EXIF data does not make the image unusable
        return 1
    return orientation if orientation in TURNS else 1


def _upright(pixels: Pixels, orientation: int) -> Pixels:
    turns, mirrored = TURNS[orientation]
    pixels = np.rot90(pixels, turns)
    return np.ascontiguousarray(pixels[:, ::-1] if mirrored else pixels)


def _flat(image: Any, channels: int) -> Any:
    """Convert to 8-bit RGB or grayscale, on white if there is transparency."""
    mode = image.mode
    if mode.startswith("I") or mode == "F":
        image = _eight_bits(image)
    elif mode in ("LA", "La", "PA", "RGBA", "RGBa") or "transparency" in image.info:
        if mode in ("La", "RGBa"):
            image = image.convert({"La": "LA", "RGBa": "RGBA"}[mode])
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image).convert("RGB")
    if image.mode not in ("L", "RGB"):
        image = image.convert("L" if image.mode == "1" else "RGB")
    wanted = "L" if channels == 1 else "RGB"
    return image if image.mode == wanted else image.convert(wanted)


def _eight_bits(image: Any) -> Any:
    """Convert 16-bit grayscale (also stored in 32 bits), or floating point from 0 to 1 or from 0 to 255."""
    values = np.asarray(image)
    low, high = values.min(), values.max()
    if image.mode == "F":
        if not (low >= 0 and high <= 255):  # NaN too
            raise BadImage("floating-point values outside of 0 to 255")
        scaled = values * (255 if high <= 1 else 1)
    else:
        if low < 0 or high > 65535:
            raise BadImage("32-bit grayscale with values outside of 0 to 65535")
        scaled = values / 257
    return Image.fromarray(np.rint(scaled).astype(np.uint8))


def _resized(image: Any, side: int, aspect: str) -> Any:
    width, height = image.size
    if aspect == "squash":
        size = (side, side)
    else:
        scale = side / min(width, height)
        size = (max(side, round(width * scale)), max(side, round(height * scale))) if scale < 1 else (width, height)
    return image if size == (width, height) else image.resize(size, BILINEAR)


def _words(error: Exception) -> str:
    """Return Pillow's message on one line."""
    text = " ".join(str(error).split()) or type(error).__name__
    if "not identified by this driver" in text:
        return "a broken header"
    return "truncated" if "truncated" in text.lower() else text
