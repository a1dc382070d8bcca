"""How much one request may ask for."""

from __future__ import annotations

from dataclasses import dataclass

from nearfar.utils.validation import positive, whole

MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a server takes, and what it refuses in words.

    Args:
        upload_bytes: Of a whole request; 20 MiB.
        pixels: Of a picture, by its header, before anything is decoded; 50 million.
        seconds: For a request's body to arrive, and again for its picture to be decoded; 20.
        neighbours: The most that one search finds; 200.
        batch: The most pictures that pass the network at once; 32.
        waiting: Requests that may stand in line for one piece of work; the next is told to come back later; 256.

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
