"""Running the application in a uvicorn server that shuts down gracefully."""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from nearfar.serve.security import is_loopback

if TYPE_CHECKING:
    from fastapi import FastAPI

SHUTDOWN_SECONDS = 10  # that running requests have to finish


def check_exposure(host: str, token: str | None) -> None:
    """Raise an error if a server would be reachable by other machines without a token.

    Example:
        >>> check_exposure("0.0.0.0", None)
        Traceback (most recent call last):
        ValueError: host is '0.0.0.0', which other machines can reach; this requires a token: --token new
    """
    if token is None and not is_loopback(host):
        raise ValueError(f"host is {host!r}, which other machines can reach; this requires a token: --token new")


def listen(host: str, port: int) -> socket.socket:
    """Open a listening socket.

    Args:
        host: Name or address to bind to.
        port: Port to bind to; 0 for any free port.

    Returns:
        The socket, for ``run``.

    Raises:
        ValueError: If the host is unknown or the port is in use.
    """
    try:
        address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[4][:2], family=address[0], backlog=512, reuse_port=False)
    except socket.gaierror:
        raise ValueError(f"host is {host!r}; no such name or address is known") from None
    except OSError as error:
        raise ValueError(f"cannot listen on {host} port {port}: {error.strerror or error}; try --port 0") from None


def url_of(listening: socket.socket) -> str:
    """Return the URL of a listening socket.

    Example:
        >>> with listen("127.0.0.1", 0) as listening:
        ...     url_of(listening).startswith("http://127.0.0.1:")
        True
    """
    host, port = listening.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = socket.gethostname()
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def page_url(url: str, token: str | None) -> str:
    """Return the URL of the page with its token in the fragment, which browsers do not send to servers.

    Example:
        >>> page_url("http://127.0.0.1:8000", "100%/sure")
        'http://127.0.0.1:8000/#token=100%25%2Fsure'
    """
    return f"{url}/#token={quote(token, safe='')}" if token else url


def run(app: FastAPI, listening: socket.socket, *, started: Callable[[], None] = lambda: None) -> None:
    """Serve until Ctrl-C or SIGTERM; running requests are finished first.

    Args:
        app: An application made by ``create``.
        listening: A socket opened by ``listen``.
        started: Called when the server accepts requests.
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
        timeout_graceful_shutdown=SHUTDOWN_SECONDS,
        h11_max_incomplete_event_size=64 * 1024,
        ws="none",
    )
    with _ignored_signals():
        Server(config).run(sockets=[listening])


@contextmanager
def _ignored_signals() -> Iterator[None]:
    """Ignore the signal that uvicorn raises again after it was stopped by it."""
    before = {each: signal.signal(each, lambda *_: None) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
