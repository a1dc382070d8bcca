"""Decoding of uploaded images, and cleaning of their names."""

from __future__ import annotations

import asyncio
import unicodedata
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from fastapi import UploadFile
from numpy.typing import NDArray
from PIL import Image

from nearfar.data.store.decode import BadImage, decode
from nearfar.serve.errors import ApiError
from nearfar.serve.limits import Limits
from nearfar.serve.prometheus import ServerMetrics

Pixels = NDArray[np.uint8]

SIDE = 768  # pixels of the shorter side that are kept: more than networks and thumbnails use
LONGEST = 8 * SIDE  # pixels of the longer side that are kept
MAX_ASPECT = 100  # longer side divided by shorter side
THREADS = 2
MAX_TEXT = 200
INVISIBLE = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")  # Unicode categories
JOINERS = "\u200c\u200d"  # needed by Persian, Indic scripts and emoji


class UploadDecoder:
    """Decodes uploads in its own threads, so that an image that is slow to decode does not delay other searches.

    Args:
        limits: Limits of pixels, seconds and waiting uploads.
        metrics: Where refused uploads are counted.
    """

    def __init__(self, limits: Limits, metrics: ServerMetrics) -> None:
        self._limits, self._metrics = limits, metrics
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="decode")
        self._waiting = 0

    async def read(self, upload: UploadFile) -> Pixels:
        """Decode an upload.

        Args:
            upload: An uploaded image file of any supported format.

        Returns:
            Pixels [height, width, 3] of an upright image; large images are shrunk.

        Raises:
            ApiError: If the upload is not an image, is too large or takes too long, or too many uploads are waiting.
        """
        if self._waiting >= self._limits.waiting:
            raise ApiError(
                503, "too many images are waiting to be decoded; try again later", headers={"retry-after": "1"}
            )
        data = await upload.read()
        self._waiting += 1
        try:
            work = asyncio.get_running_loop().run_in_executor(self._threads, self._decode, data)
            return await asyncio.wait_for(work, self._limits.seconds)
        except BadImage as error:
            self._metrics.uploads_refused.inc()
            raise ApiError(422, f"cannot read the image: {error.reason}", code="bad_image") from None
        except TimeoutError:
            message = f"decoding the image took more than {self._limits.seconds:g} seconds"
            raise ApiError(422, message, code="bad_image") from None
        finally:
            self._waiting -= 1

    def _decode(self, data: bytes) -> Pixels:
        pixels = decode(data, max_pixels=self._limits.pixels, side=SIDE)
        longer, shorter = max(pixels.shape[:2]), min(pixels.shape[:2])
        if longer > MAX_ASPECT * shorter:
            raise BadImage(f"one side is more than {MAX_ASPECT} times as long as the other")
        if longer > LONGEST:
            image = Image.fromarray(pixels)
            image.thumbnail((LONGEST, LONGEST), Image.Resampling.BILINEAR, reducing_gap=None)
            pixels = np.asarray(image)
        return pixels

    def close(self) -> None:
        """Stop the threads; waiting uploads are dropped."""
        self._threads.shutdown(cancel_futures=True)


def file_name(name: str | None) -> str:
    """Return the last part of an uploaded file's path, without invisible characters.

    Example:
        >>> file_name("../../etc/passwd"), file_name("C:\\\\me\\\\cat\\n.jpg"), file_name(None)
        ('passwd', 'cat.jpg', 'upload')
    """
    last = (name or "").replace("\\", "/").rsplit("/", 1)[-1]
    return visible(last) or "upload"


def visible(text: str) -> str:
    """Return at most 200 characters of a text, without control, formatting and other invisible characters.

    Example:
        >>> visible("cat\\u202egpj.exe"), len(visible("\U0001f469\\u200d\U0001f680"))
        ('catgpj.exe', 3)
    """
    kept = "".join(letter for letter in text if letter in JOINERS or unicodedata.category(letter) not in INVISIBLE)
    return kept.strip()[:MAX_TEXT].strip()
