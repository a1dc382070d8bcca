"""Limits on what one request may contain, and on what one client may do."""

from __future__ import annotations

from dataclasses import dataclass

from nearfar.data.store.decode import FORMATS
from nearfar.utils.validation import one_of, positive, whole

MIB = 2**20
WEB_FORMATS = ("JPEG", "PNG", "WebP", "GIF", "AVIF")  # that browsers show, with decoders that are tested most


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of a server. Requests beyond them are refused with an error message.

    Args:
        upload_bytes: Size of a request body in bytes.
        uploads: Request bodies of this size that the server holds at once, in bytes together. A client
            other than a program on this machine may take a quarter. Further ones are answered with status 503.
        pixels: Size of an image in pixels, read from its header before anything is decoded.
        formats: Formats of images, such as "JPEG" or "TIFF".
        seconds: Time for a request body to arrive, and again for its image to be decoded.
        neighbors: Largest ``k`` of one search.
        costly_seconds: Time for a filtered, expanded or re-ranked search, the map, the runs and the leaderboard, with
            the waiting for earlier work of the client; then the status is 503.
        batch: Number of images that pass the network at once.
        waiting: Length of each queue; further requests are answered with status 503.
        header_seconds: Time for the header of a request to arrive, on a new connection or after a response.
        connections: Open connections. A further one replaces the connection that has waited longest for a request.
        client_connections: Open connections of one client, other than a program on this machine.
        client_rate: Requests per second of one client, other than a program on this machine; ten times as many at once.

    Example:
        >>> Limits(upload_bytes=0)
        Traceback (most recent call last):
        ValueError: upload_bytes is 0; it must be ≥ 1
    """

    upload_bytes: int = 20 * MIB
    uploads: int = 12
    pixels: int = 50_000_000
    formats: tuple[str, ...] = WEB_FORMATS
    seconds: float = 20.0
    neighbors: int = 200
    costly_seconds: float = 10.0
    batch: int = 32
    waiting: int = 256
    header_seconds: float = 15.0
    connections: int = 1000
    client_connections: int = 100
    client_rate: float = 50.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name != "formats":
                (whole if isinstance(getattr(Limits, name), int) else positive)(name, value)
        for name in self.formats:
            one_of("formats", name, FORMATS)
