"""Decodes image files of any format to pixels, in worker processes where files come from strangers.

Formats are recognized by the first bytes of a file, never by its extension. Pillow decodes; its process-wide settings
are not changed.

A decoder written in C cannot be interrupted in a thread, and a hostile file can make it run for minutes, use all memory
or crash. A worker process has limits of CPU time and memory and can be killed. It has neither the environment of the
parent process nor its open files, and it cannot write files.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import queue
import signal
import socket
import struct
import subprocess
import sys
import time
from contextlib import suppress
from functools import cache
from io import BytesIO
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from nearfar.utils.system import processors
from nearfar.utils.validation import one_of, positive, whole

Pixels = NDArray[np.uint8]

ASPECTS = ("keep", "squash")
MAX_PIXELS = 1 << 27  # 134 million: larger than any camera's image; half a gigabyte while decoding
FORMATS = ("JPEG", "PNG", "WebP", "GIF", "AVIF", "TIFF", "BMP", "JPEG 2000", "PPM")
MAX_ASPECT = 50  # longer side divided by shorter side
METADATA = 1 << 22  # bytes of a file that may hold anything else than pixels, if its bytes per pixel are limited

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

ISOLATED = os.name == "posix"  # elsewhere, images are decoded by the calling thread and time and memory are not limited
SECONDS = 60.0  # of CPU time for one file: no image below MAX_PIXELS needs a third of it
PIXEL_BYTES = 32  # of memory for each pixel: the most that a format needs, with its conversion to RGB
BASE_BYTES = 1 << 30  # of address space for Python and its libraries
LENGTHS = struct.Struct(">II")  # of settings and data in a message
ENVIRONMENT = ("PATH", "LD_LIBRARY_PATH", "PYTHONHOME")  # variables that a worker inherits
COMMAND = "import sys; sys.path = sys.argv[3:]; from nearfar.data.store.decode import work; work()"


class BadImage(ValueError):
    """The bytes are not an image that can be decoded."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class SlowImage(BadImage):
    """Decoding the image took more time than it may take."""


class DecoderClosed(RuntimeError):
    """Raised when an image is to be decoded after the decoder was closed."""


def decode(
    data: bytes,
    *,
    channels: int = 3,
    side: int | None = None,
    aspect: str = "keep",
    box: tuple[int, int, int, int] | None = None,
    pad: bool = False,
    formats: tuple[str, ...] | None = None,
    max_pixels: int = MAX_PIXELS,
    max_pixel_bytes: int | None = None,
) -> Pixels:
    """Decode an image file to uint8 pixels [height, width, channels].

    The orientation of EXIF is applied, transparency becomes white, and 16 bits become 8. Then the image is cut to a box
    (top, left, height, width), padded with black to a square, and resized. Of an animation the first frame is used, of
    several pages the first. Files that cannot be decoded completely are errors. So are other formats than ``formats``,
    images that are longer than fifty times their width, and files with more bytes than ``max_pixel_bytes`` for each
    pixel and ``METADATA``; this is known from the headers, before pixels are decoded.
    """
    whole("channels", channels)
    if channels not in (1, 3):
        raise ValueError(f"channels is {channels}; allowed are 1 and 3")
    if side is not None:
        whole("side", side)
    one_of("aspect", aspect, ASPECTS)
    kind, reader = _reader(data)
    if formats is not None and kind not in formats:
        raise BadImage(f"{kind} is not accepted here; accepted are {', '.join(formats)}")
    try:
        image = _open(reader, data)
        width, height = image.size
        if width < 1 or height < 1:
            raise BadImage(f"{width} × {height} pixels")
        if width * height > whole("max_pixels", max_pixels):
            raise BadImage(f"{width} × {height} pixels; at most {max_pixels:,} are decoded")
        if max(width, height) > MAX_ASPECT * min(width, height):
            raise BadImage(f"{width} × {height} pixels; one side is more than {MAX_ASPECT} times as long as the other")
        if max_pixel_bytes is not None and len(data) > METADATA + max_pixel_bytes * width * height:
            raise BadImage(f"{len(data):,} bytes for {width} × {height} pixels")
        framed = box is not None or pad
        if kind == "JPEG" and side is not None and not framed:
            _draft(image, side)
        image.load()
        orientation = _orientation(image)
        image = _flat(image, channels)
        if framed:
            image, orientation = Image.fromarray(_framed(_upright(np.asarray(image), orientation), box, pad)), 1
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
    """Resize an image, antialiased and bilinear, as Pillow's ``resize``."""
    whole("side", side)
    one_of("aspect", aspect, ASPECTS)
    grey = image.shape[2] == 1
    resized = _resized(Image.fromarray(image[:, :, 0] if grey else image), side, aspect)
    return np.asarray(resized).reshape(resized.height, resized.width, image.shape[2])


def pad_to_square(image: Pixels) -> Pixels:
    """Pad an image with black on both sides of its shorter side."""
    height, width = image.shape[:2]
    side = max(height, width)
    top, left = (side - height) // 2, (side - width) // 2
    return np.pad(image, ((top, side - height - top), (left, side - width - left), *((0, 0),) * (image.ndim - 2)))


class Decoder:
    """A pool of worker processes that decode images. It may be used by several threads."""

    def __init__(
        self,
        workers: int | None = None,
        *,
        seconds: float = SECONDS,
        wall_seconds: float | None = None,
        max_pixels: int = MAX_PIXELS,
        nice: int = 0,
    ) -> None:
        self.seconds = positive("seconds", seconds)
        self.wall_seconds = None if wall_seconds is None else positive("wall_seconds", wall_seconds)
        self.max_pixels = whole("max_pixels", max_pixels)
        limits = (BASE_BYTES + PIXEL_BYTES * max_pixels, nice)
        count = processors() if workers is None else whole("workers", workers)
        self._workers = [_Worker(*limits) for _ in range(count)]
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        for worker in self._workers:
            self._idle.put(worker)
        self._closed = False

    def __enter__(self) -> Decoder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Start all processes now, instead of each when it is first needed."""
        for worker in self._workers:
            worker.start()

    def close(self) -> None:
        """Kill the processes, whatever they are doing."""
        self._closed = True
        for worker in self._workers:
            worker.kill()
        with suppress(queue.Empty):
            for _ in self._workers:  # busy ones are cleaned up by the threads that use them
                worker = self._idle.get_nowait()
                worker.end()
                self._idle.put(worker)

    def decode(self, data: bytes, **settings: Any) -> Pixels:
        """Decode an image in a worker process, with settings of :func:`decode`; wait for one if all are busy."""
        if not ISOLATED:
            return decode(data, max_pixels=self.max_pixels, **settings)
        worker = self._idle.get()
        try:
            if self._closed:
                raise DecoderClosed("the decoder is closed")
            limits = {"max_pixels": self.max_pixels, "seconds": self.seconds}
            answer, pixels = worker.ask({**settings, **limits}, data, self.wall_seconds)
        except OSError as error:
            code = worker.end()
            if self._closed:
                raise DecoderClosed("the decoder is closed") from None
            worker.start()  # at once, so that the next image does not wait for it
            if isinstance(error, TimeoutError) or code == -signal.SIGPROF:
                limit = self.wall_seconds if isinstance(error, TimeoutError) else self.seconds
                raise SlowImage(f"decoding took more than {limit:g} seconds") from None
            raise BadImage(f"the decoder crashed with exit code {code}") from None
        finally:
            self._idle.put(worker)
        if "shape" in answer:
            return np.frombuffer(pixels, dtype=np.uint8).reshape(answer["shape"])
        raise BadImage(answer["reason"])


@cache
def shared_decoder() -> Decoder:
    """Return the decoder that all datasets and indexes of this process share. Its processes start when first used."""
    decoder = Decoder()
    atexit.register(decoder.close)
    return decoder


if ISOLATED:  # a forked process must not talk to the workers of its parent
    os.register_at_fork(after_in_child=shared_decoder.cache_clear)


def work() -> None:
    """Decode the images that arrive at standard input, until it is closed. Worker processes run this."""
    import resource

    memory = int(sys.argv[1])
    os.nice(int(sys.argv[2]))
    for limit, value in ((resource.RLIMIT_AS, memory), (resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_CORE, 0)):
        with suppress(ValueError, OSError):  # not every system has every limit
            resource.setrlimit(limit, (value, value))
    for kind in ("Jpeg", "Png", "WebP"):  # others are imported when they are needed
        importlib.import_module(f"PIL.{kind}ImagePlugin")
    connection = socket.socket(fileno=0)
    with suppress(OSError):
        _send(connection, {}, b"")  # ready
        while True:
            settings, data = _receive(connection, None)
            signal.setitimer(signal.ITIMER_PROF, settings.pop("seconds"))  # SIGPROF ends this process
            pixels = np.empty(0, dtype=np.uint8)
            try:
                pixels = decode(bytes(data), **settings)
                answer: dict[str, Any] = {"shape": pixels.shape}
            except BadImage as error:
                answer = {"reason": error.reason}
            signal.setitimer(signal.ITIMER_PROF, 0)
            _send(connection, answer, pixels.reshape(-1).data)


# --- one image ------------------------------------------------------------------------------------------------


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


def _framed(pixels: Pixels, box: tuple[int, int, int, int] | None, pad: bool) -> Pixels:
    """Cut pixels to a box, or to its nearest pixel if it is outside, and pad them to a square."""
    if box is not None:
        top, left, height, width = box
        bottom, right = np.clip((top + height, left + width), 1, pixels.shape[:2]).tolist()
        pixels = pixels[min(max(top, 0), bottom - 1) : bottom, min(max(left, 0), right - 1) : right]
    return np.ascontiguousarray(pad_to_square(pixels) if pad else pixels)


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


# --- worker processes -----------------------------------------------------------------------------------------


class _Worker:
    """One process and the socket to talk to it. Only ``kill`` may be called while another thread uses it."""

    def __init__(self, memory: int, nice: int) -> None:
        self._arguments = (str(memory), str(nice))
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._ready = False

    def start(self) -> None:
        """Start the process."""
        self._socket, theirs = socket.socketpair()
        environment = {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-W", "ignore", "-c", COMMAND, *self._arguments, *sys.path],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={**environment, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
                start_new_session=True,  # Ctrl-C is for the parent
            )
        self._ready = False

    def ask(self, settings: dict[str, Any], data: bytes, seconds: float | None) -> tuple[dict[str, Any], bytearray]:
        """Send a request and return the answer; OSError if the process ends, TimeoutError if it takes too long."""
        if self._socket is None:
            self.start()
        assert self._socket is not None
        if not self._ready:  # imports do not count
            _receive(self._socket, None)
            self._ready = True
        deadline = None if seconds is None else time.monotonic() + seconds
        _send(self._socket, settings, data)
        return _receive(self._socket, deadline)

    def kill(self) -> None:
        """Kill the process; a thread that waits for its answer gets an error."""
        if self._process is not None:
            self._process.kill()

    def end(self) -> int | None:
        """Kill the process and return its exit code, which tells whether it had ended by itself."""
        self.kill()
        if self._socket is not None:
            self._socket.close()
        return None if self._process is None else self._process.wait()


def _send(connection: socket.socket, settings: dict[str, Any], data: bytes | memoryview) -> None:
    head = json.dumps(settings).encode()
    connection.settimeout(None)
    connection.sendall(LENGTHS.pack(len(head), len(data)) + head)
    connection.sendall(data)


def _receive(connection: socket.socket, deadline: float | None) -> tuple[dict[str, Any], bytearray]:
    head, body = LENGTHS.unpack(_read(connection, LENGTHS.size, deadline))
    return json.loads(_read(connection, head, deadline)), _read(connection, body, deadline)


def _read(connection: socket.socket, length: int, deadline: float | None) -> bytearray:
    data = bytearray(length)
    view, done = memoryview(data), 0
    while done < length:
        connection.settimeout(None if deadline is None else max(1e-3, deadline - time.monotonic()))
        received = connection.recv_into(view[done:])
        if not received:
            raise ConnectionResetError("the other process ended")
        done += received
    return data
