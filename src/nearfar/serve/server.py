"""Starting a server, and stopping it without losing anything."""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from nearfar.serve.token import is_loopback

if TYPE_CHECKING:
    from fastapi import FastAPI

PATIENCE = 10  # seconds that requests under way have to finish when the server stops


def check_exposure(host: str, token: str | None) -> None:
    """That nobody opens an index to a network without a token.

    >>> check_exposure("0.0.0.0", None)
    Traceback (most recent call last):
    ValueError: host is '0.0.0.0', which other machines reach; that needs a token: --token new
    """
    if token is None and not is_loopback(host):
        raise ValueError(f"host is {host!r}, which other machines reach; that needs a token: --token new")


def listen(host: str, port: int) -> socket.socket:
    """A socket to serve on; port 0 is any that is free."""
    try:
        address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[4][:2], family=address[0], backlog=512, reuse_port=False)
    except socket.gaierror:
        raise ValueError(f"host is {host!r}; no such name or address is known") from None
    except OSError as error:
        raise ValueError(f"cannot listen at {host} port {port}: {error.strerror or error}; try --port 0") from None


def address_of(listening: socket.socket) -> str:
    """What to type into a browser.

    >>> with listen("127.0.0.1", 0) as listening:
    ...     address_of(listening).startswith("http://127.0.0.1:")
    True
    """
    host, port = listening.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = socket.gethostname()
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def link(address: str, token: str | None) -> str:
    """The page, and the token that it needs: behind the #, which browsers send to nobody.

    >>> link("http://127.0.0.1:8000", "100%/sure")
    'http://127.0.0.1:8000/#token=100%25%2Fsure'
    """
    return f"{address}/#token={quote(token, safe='')}" if token else address


def run(app: FastAPI, listening: socket.socket, *, started: Callable[[], None] = lambda: None) -> None:
    """Serve until Ctrl-C or a signal asks to stop; requests under way are finished first.

    Args:
        app: What ``create`` made.
        listening: From ``listen``.
        started: Called when requests are answered.
    """
    import uvicorn

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            if self.started:
                started()

    config: Any = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        server_header=False,
        limit_concurrency=1024,
        timeout_keep_alive=15,
        timeout_graceful_shutdown=PATIENCE,
        h11_max_incomplete_event_size=64 * 1024,
        ws="none",
    )
    with _quiet_signals():
        Server(config).run(sockets=[listening])


@contextmanager
def _quiet_signals() -> Iterator[None]:
    """Uvicorn sends itself the signal again that stopped it; being stopped is no failure."""
    before = {each: signal.signal(each, lambda *_: None) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
