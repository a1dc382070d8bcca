"""Pictures from strangers."""

from __future__ import annotations

import asyncio
import unicodedata
from concurrent.futures import ThreadPoolExecutor

from fastapi import UploadFile
from PIL import Image

from nearfar.data.store.decode import BadImage, decode
from nearfar.serve.errors import Refusal
from nearfar.serve.limits import Limits
from nearfar.serve.prometheus import Metrics

SIDE = 768  # pixels of the shorter side that are kept: more than networks and thumbnails use
LONGEST = 8 * SIDE  # pixels of the longer side that are kept
THIN = 100  # times the shorter side: what is longer is no picture of anything
THREADS = 2
LONGEST_NAME = 200
UNSEEN = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")  # categories of Unicode
JOINERS = "\u200c\u200d"  # parts of words in Persian, of Indian scripts and of emoji


class Pictures:
    """Decodes uploads in threads of its own, a few at a time: whoever sends a hard one holds up nobody else's search.

    Args:
        limits: Pixels and seconds, and how many may wait.
        metrics: Where refusals are counted.
    """

    def __init__(self, limits: Limits, metrics: Metrics) -> None:
        self._limits, self._metrics = limits, metrics
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="decode")
        self._waiting = 0

    async def read(self, upload: UploadFile) -> Image.Image:
        """The picture, upright, in colour, large ones shrunk; or a refusal that says why."""
        if self._waiting >= self._limits.waiting:
            raise Refusal(
                503, "too many pictures are being decoded; come back in a moment", headers={"retry-after": "1"}
            )
        data = await upload.read()
        self._waiting += 1
        try:
            work = asyncio.get_running_loop().run_in_executor(self._threads, self._decode, data)
            return await asyncio.wait_for(work, self._limits.seconds)
        except BadImage as error:
            self._metrics.count("uploads_refused_total", "Uploads that were no picture.")
            raise Refusal(
                422, f"this is no picture that can be searched with: {error.reason}", word="bad_image"
            ) from None
        except TimeoutError:
            raise Refusal(
                422, f"the picture took more than {self._limits.seconds:g} seconds to decode", word="bad_image"
            ) from None
        finally:
            self._waiting -= 1

    def _decode(self, data: bytes) -> Image.Image:
        picture = Image.fromarray(decode(data, max_pixels=self._limits.pixels, side=SIDE))
        if max(picture.size) > THIN * min(picture.size):
            raise BadImage(f"one side is more than {THIN} times as long as the other")
        picture.thumbnail((LONGEST, LONGEST), Image.Resampling.BILINEAR, reducing_gap=None)
        return picture

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)


def cleaned(name: str | None) -> str:
    """What an upload is called in the index: the last part of its name, without what cannot be read.

    >>> cleaned("../../etc/passwd"), cleaned("C:\\\\me\\\\cat\\n.jpg"), cleaned(None)
    ('passwd', 'cat.jpg', 'upload')
    """
    last = (name or "").replace("\\", "/").rsplit("/", 1)[-1]
    return readable(last) or "upload"


def readable(text: str) -> str:
    """Text of at most 200 characters, none of which turns around or breaks what stands beside it.

    >>> readable("cat\\u202egpj.exe"), len(readable("\U0001f469\\u200d\U0001f680"))
    ('catgpj.exe', 3)
    """
    kept = "".join(letter for letter in text if letter in JOINERS or unicodedata.category(letter) not in UNSEEN)
    return kept.strip()[:LONGEST_NAME].strip()
