"""Limits on what one request may contain."""

from __future__ import annotations

from dataclasses import dataclass

from nearfar.utils.validation import positive, whole

MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of a server. Requests beyond them are refused with an error message.

    Args:
        upload_bytes: Size of a request body in bytes.
        pixels: Size of an image in pixels, read from its header before anything is decoded.
        seconds: Time for a request body to arrive, and again for its image to be decoded.
        neighbours: Largest ``k`` of one search.
        batch: Number of images that pass the network at once.
        waiting: Length of each queue; further requests are answered with status 503.

    Example:
        >>> Limits(upload_bytes=0)
        Traceback (most recent call last):
        ValueError: upload_bytes is 0; it must be ≥ 1
    """

    upload_bytes: int = 20 * MIB
    pixels: int = 50_000_000
    seconds: float = 20.0
    neighbours: int = 200
    batch: int = 32
    waiting: int = 256

    def __post_init__(self) -> None:
        for name in ("upload_bytes", "pixels", "neighbours", "batch", "waiting"):
            whole(name, getattr(self, name))
        positive("seconds", self.seconds)
