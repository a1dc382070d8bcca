"""Bytes of a picture file as pixels, whatever its kind; or one reason why not.

Files are told apart by how they begin, never by their ending. Pillow does the decoding; its settings, which are
shared by the whole process, are left alone.
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
MAX_PIXELS = 1 << 27  # 134 million: any camera's picture, and half a gigabyte at work

# How a file begins, and the module and class of Pillow that read it. "?" stands for any byte.
READERS = (
    (b"\xff\xd8\xff", "JPEG", "JpegImagePlugin.JpegImageFile"),  # of an MPO it reads the first picture
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
# Files that are often found among pictures, to name them.
OTHERS = (
    (b"????ftyp", "an HEIC picture or a video, which is not read"),
    (b"%PDF", "a PDF document, not a picture"),
    (b"PK\x03\x04", "a zip archive, not a picture"),
    (b"\x1f\x8b", "a gzip archive, not a picture"),
    (b"8BPS", "a Photoshop document, which is not read"),
    (b"\0\0\1\0", "an icon, which is not read"),
    (b"version https://git-lfs", "a Git LFS pointer; the picture itself was not fetched"),
)

# EXIF orientation → how many quarter turns, against the clock, after which left and right change places or not.
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
    """Bytes that are no picture; ``reason`` says why in a few words."""

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
    """Pixels [height, width, channels] of a picture file: upright, without transparency, 8 bits a channel.

    The first frame of what moves, the first page of what has several. What shines through is white. 16 bits
    become 8. Anything Pillow cannot decode to its end is refused.

    Args:
        data: The file's bytes.
        channels: 3 for RGB, 1 for grey.
        max_pixels: A header that claims more is refused before anything is decoded.
        side: Shrink as :func:`shrink` does; large JPEGs are then not even decoded at full size.
        aspect: "keep" or "squash".

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
        picture = _open(reader, data)
        width, height = picture.size
        if width < 1 or height < 1:
            raise BadImage(f"{width} × {height} pixels")
        if width * height > whole("max_pixels", max_pixels):
            raise BadImage(f"{width} × {height} pixels; at most {max_pixels:,} are decoded")
        if kind == "JPEG" and side is not None:
            _draft(picture, side)
        picture.load()
        orientation = _orientation(picture)
        picture = _flat(picture, channels)
        if side is not None:
            picture = _resized(picture, side, aspect)
        pixels = np.asarray(picture, dtype=np.uint8)
        return _upright(pixels.reshape(*pixels.shape[:2], channels), orientation)
    except BadImage:
        raise
    except MemoryError:
        raise BadImage(f"{kind}: too large for the memory") from None
    # Decoders meet whatever bytes there are in whatever place: any exception of theirs is a bad file.
    except Exception as error:
        raise BadImage(f"{kind}: {_words(error)}") from error


def shrink(image: Pixels, side: int, aspect: str = "keep") -> Pixels:
    """A picture [h, w, c] with its shorter side at ``side`` ("keep"; never enlarged) or side × side ("squash").

    Antialiased, bilinear, as Pillow's ``resize``.

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
    """Kind of a file, and the reader's name in Pillow."""
    for start, kind, reader in READERS:
        if _begins(data, start):
            return kind, reader
    if not data:
        raise BadImage("an empty file")
    if data[4:8] == b"ftyp" and b"avif" in data[8:64]:  # not the first of its brands
        return "AVIF", "AvifImagePlugin.AvifImageFile"
    for start, name in OTHERS:
        if _begins(data, start):
            raise BadImage(name)
    head = data[:512].lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if head.startswith((b"<!doctype html", b"<html", b"<head", b"<body")) or b"<html" in head:
        raise BadImage("an HTML page, not a picture")
    if head.startswith((b"<svg", b"<?xml")):
        raise BadImage("an SVG or XML document, which is not read")
    if not data.strip(b"\0"):
        raise BadImage("nothing but zeros")
    if all(byte >= 32 or byte in b"\t\r\n" for byte in data[:512]):
        raise BadImage("text, not a picture")
    raise BadImage("no kind of picture that is known")


def _open(reader: str, data: bytes) -> Any:
    """The picture's header. Not through Image.open, which warns and refuses by a limit of the whole process."""
    module, _, name = reader.partition(".")
    try:
        factory = getattr(importlib.import_module(f"PIL.{module}"), name)
    except ImportError:
        raise BadImage("a kind that this version of Pillow does not read") from None
    return factory(BytesIO(data))


def _draft(picture: Any, side: int) -> None:
    """Let libjpeg leave out detail: by 2, 4 or 8, but to about twice what is asked for at least."""
    width, height = picture.size
    scale = 2 * side / min(width, height)
    if scale <= 0.5:
        picture.draft(picture.mode, (int(width * scale), int(height * scale)))


def _orientation(picture: Any) -> int:
    """As the camera was held; asked after loading, as TIFFs are turned by Pillow and then say so."""
    try:
        orientation = picture.getexif().get(ORIENTATION, 1)
    except Exception:  # broken EXIF is no reason to lose the picture
        return 1
    return orientation if orientation in TURNS else 1


def _upright(pixels: Pixels, orientation: int) -> Pixels:
    turns, mirrored = TURNS[orientation]
    pixels = np.rot90(pixels, turns)
    return np.ascontiguousarray(pixels[:, ::-1] if mirrored else pixels)


def _flat(picture: Any, channels: int) -> Any:
    """RGB or grey of 8 bits, on white where there is transparency."""
    mode = picture.mode
    if mode.startswith("I") or mode == "F":
        picture = _eight_bits(picture)
    elif mode in ("LA", "La", "PA", "RGBA", "RGBa") or "transparency" in picture.info:
        if mode in ("La", "RGBa"):
            picture = picture.convert({"La": "LA", "RGBa": "RGBA"}[mode])
        picture = picture.convert("RGBA")
        white = Image.new("RGBA", picture.size, "white")
        picture = Image.alpha_composite(white, picture).convert("RGB")
    if picture.mode not in ("L", "RGB"):
        picture = picture.convert("L" if picture.mode == "1" else "RGB")
    wanted = "L" if channels == 1 else "RGB"
    return picture if picture.mode == wanted else picture.convert(wanted)


def _eight_bits(picture: Any) -> Any:
    """Grey of 16 bits, or of 32 with values of 16; floating point from 0 to 1 or from 0 to 255."""
    values = np.asarray(picture)
    low, high = values.min(), values.max()
    if picture.mode == "F":
        if not (low >= 0 and high <= 255):  # NaN too
            raise BadImage("floating point beyond 0 to 255")
        scaled = values * (255 if high <= 1 else 1)
    else:
        if low < 0 or high > 65535:
            raise BadImage("grey of 32 bits with values beyond 0 to 65535")
        scaled = values / 257
    return Image.fromarray(np.rint(scaled).astype(np.uint8))


def _resized(picture: Any, side: int, aspect: str) -> Any:
    width, height = picture.size
    if aspect == "squash":
        size = (side, side)
    else:
        scale = side / min(width, height)
        size = (max(side, round(width * scale)), max(side, round(height * scale))) if scale < 1 else (width, height)
    return picture if size == (width, height) else picture.resize(size, BILINEAR)


def _words(error: Exception) -> str:
    """What Pillow says, on one line."""
    text = " ".join(str(error).split()) or type(error).__name__
    if "not identified by this driver" in text:
        return "a broken header"
    return "truncated" if "truncated" in text.lower() else text
