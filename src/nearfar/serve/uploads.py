"""Decoding of uploaded images, and cleaning of their names."""

from __future__ import annotations

import unicodedata

import numpy as np
from fastapi import UploadFile
from numpy.typing import NDArray
from PIL import Image

from nearfar.data.store.decode import BadImage, Decoder, DecoderClosed, SlowImage
from nearfar.serve.batching import ServerBusy
from nearfar.serve.costly import CostlyWork
from nearfar.serve.errors import ApiError
from nearfar.serve.limits import Limits
from nearfar.serve.prometheus import ServerMetrics

Pixels = NDArray[np.uint8]

SIDE = 768  # pixels of the shorter side that are kept: more than networks and thumbnails use
LONGEST = 8 * SIDE  # pixels of the longer side that are kept
QUICK_SECONDS = 0.5  # of CPU time, which JPEGs of 50 million pixels do not need
QUICK_WORKERS = 2  # processes
SLOW_WAITING = 8  # slow uploads that may wait
LOW_PRIORITY = 10
PIXEL_BYTES = 256  # of a file for each pixel; animations of few colors have 100
WAITING_SECONDS = 120.0  # for an image to be decoded, with those of the same client before it
MAX_TEXT = 200
INVISIBLE = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")  # Unicode categories
JOINERS = "\u200c\u200d"  # needed by Persian, Indic scripts and emoji


class UploadDecoder:
    """Decodes uploads in worker processes, so that no image can delay searches, exhaust memory or crash the server.

    An image that takes more than half a second of CPU time in the quick lane is tried once more in the slow lane, one
    image of each client at a time. Meanwhile, other images of the client pass another quick lane than those of others.
    """

    def __init__(self, limits: Limits, metrics: ServerMetrics) -> None:
        self._metrics = metrics
        self._quick = _Lane(limits, QUICK_SECONDS, workers=QUICK_WORKERS)
        self._next = _Lane(limits, QUICK_SECONDS, nice=LOW_PRIORITY)
        self._slow = _Lane(limits, limits.seconds, waiting=SLOW_WAITING, nice=LOW_PRIORITY)

    def start(self) -> None:
        """Start the worker processes of the quick lane now, instead of with the first upload."""
        self._quick.decoder.start()

    def close(self) -> None:
        """Kill the worker processes; waiting uploads are answered with an error."""
        for lane in (self._quick, self._next, self._slow):
            lane.close()

    async def read(self, upload: UploadFile, client: str) -> Pixels:
        """Decode an upload."""
        data = await upload.read()
        try:
            lane = self._next if client in self._slow.turns else self._quick
            try:
                return await lane.decode(data, client)
            except SlowImage:
                return await self._slow.decode(data, client)
        except BadImage as error:
            self._metrics.uploads_refused.inc()
            raise ApiError(422, f"cannot read the image: {error.reason}", code="bad_image") from None


class _Lane:
    """Worker processes, and as many threads that wait for them; each client has one image decoded at a time."""

    def __init__(
        self, limits: Limits, seconds: float, *, workers: int = 1, waiting: int | None = None, nice: int = 0
    ) -> None:
        self.decoder = Decoder(
            workers, seconds=seconds, wall_seconds=limits.seconds, max_pixels=limits.pixels, nice=nice
        )
        self.turns = CostlyWork(seconds=WAITING_SECONDS, threads=workers, most=waiting or limits.waiting)
        self._formats = limits.formats

    async def decode(self, data: bytes, client: str) -> Pixels:
        try:
            return await self.turns(client, object(), lambda: self._decode(data))
        except DecoderClosed:
            raise ServerBusy("the server is stopping") from None

    def close(self) -> None:
        self.decoder.close()
        self.turns.close()

    def _decode(self, data: bytes) -> Pixels:
        pixels = self.decoder.decode(data, side=SIDE, formats=self._formats, max_pixel_bytes=PIXEL_BYTES)
        if max(pixels.shape[:2]) <= LONGEST:
            return pixels
        image = Image.fromarray(pixels)
        image.thumbnail((LONGEST, LONGEST), Image.Resampling.BILINEAR, reducing_gap=None)
        return np.asarray(image)


def file_name(name: str | None) -> str:
    """Return the last part of an uploaded file's path, without invisible characters."""
    last = (name or "").replace("\\", "/").rsplit("/", 1)[-1]
    return visible(last) or "upload"


def visible(text: str) -> str:
    """Return at most 200 characters of a text, without control, formatting and other invisible characters."""
    kept = "".join(letter for letter in text if letter in JOINERS or unicodedata.category(letter) not in INVISIBLE)
    return kept.strip()[:MAX_TEXT].strip()
