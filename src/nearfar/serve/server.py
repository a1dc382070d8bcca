"""Running the application in a uvicorn server that limits connections and shuts down gracefully."""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import logging.handlers
import os
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from nearfar.serve.limits import Limits
from nearfar.serve.security import client_name, is_loopback

if TYPE_CHECKING:
    from fastapi import FastAPI

COSTLY_SECONDS = 2  # that images and costly requests have to finish when the server is stopped
SHUTDOWN_SECONDS = 10  # that other requests have to finish
END_SECONDS = 13  # until the process ends, whatever its threads are doing
SWITCH_SECONDS = 0.0005  # that a thread may keep others from running, ten times less than usual
STALL_SECONDS = 30  # that a client may take to read the next part of a response
HANDSHAKE_SECONDS = 10  # that a client may take to begin an encrypted connection
BACKLOG = 128  # connections that are accepted at once
# Open files beyond the counted connections: 64 of other kinds, and connections on their way. The event loop accepts up
# to a backlog in each round. A connection is counted two rounds later, and the one it replaces is closed in the third.
OTHER_FILES = 64 + 3 * BACKLOG
MOST_FILES = 8192
LOG_SECONDS = 60  # between two lines about too many connections
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, *((signal.SIGHUP,) if hasattr(signal, "SIGHUP") else ()))
BUSY = b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"

log = logging.getLogger("nearfar.serve")


def needs_token(host: str, names: Sequence[str] = ()) -> bool:
    """Return whether other machines can reach a server."""
    return bool(names) or not is_loopback(host)


def listen(host: str, port: int) -> socket.socket:
    """Open a listening socket."""
    try:
        address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.create_server(address[4][:2], family=address[0], backlog=BACKLOG, reuse_port=False)
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # connections inherit it: no wait of 40 ms
        return listening
    except socket.gaierror:
        raise ValueError(f"host is {host!r}; no such name or address is known") from None
    except OSError as error:
        raise ValueError(f"cannot listen on {host} port {port}: {error.strerror or error}; try --port 0") from None


def url_of(listening: socket.socket, scheme: str = "http") -> str:
    """Return the URL of a listening socket."""
    host, port = listening.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = socket.gethostname()
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def page_url(url: str, token: str | None) -> str:
    """Return the URL of the page with its token in the fragment, which browsers do not send to servers."""
    return f"{url}/#token={quote(token, safe='')}" if token else url


class SeldomLog:
    """Logs at most one line a minute, however often something happens."""

    def __init__(self) -> None:
        self._count, self._logged = 0, -float(LOG_SECONDS)

    def warn(self, message: str) -> None:
        """Count an event, and log it unless one was logged within the last minute."""
        self._count += 1
        if time.monotonic() - self._logged >= LOG_SECONDS:
            log.warning("%s (%d times since the last message)", message, self._count)
            self._count, self._logged = 0, time.monotonic()


class Connections:
    """The open connections of a server."""

    def __init__(self, limits: Limits, proxy: str | None = None) -> None:
        self.limits, self.proxy = limits, proxy  # a reverse proxy may have any number of connections
        self.most = min(limits.connections, max(1, _open_files() - OTHER_FILES))
        self._clients: Counter[str] = Counter()
        self._waiting: dict[Connection, None] = {}  # for a request, the longest first
        self._log = SeldomLog()

    def add(self, connection: Connection) -> bool:
        """Count a new connection; return whether it is accepted."""
        client = connection.client_name
        self._clients[client] += 1
        limited = client not in ("localhost", self.proxy) and self._clients[client] > self.limits.client_connections
        if limited:
            self._log.warn("too many connections; some were refused or closed")
            return False
        if self._clients.total() > self.most:
            self._log.warn("too many connections; some were refused or closed")
            if not self._waiting:
                return False
            oldest = next(iter(self._waiting))
            self._waiting.pop(oldest)
            oldest.transport.abort()
        self.set_waiting(connection)
        return True

    def set_waiting(self, connection: Connection) -> None:
        """Note that a connection waits for a request from now on."""
        self._waiting[connection] = None

    def set_busy(self, connection: Connection) -> None:
        """Note that the request of a connection has arrived."""
        self._waiting.pop(connection, None)

    def remove(self, connection: Connection) -> None:
        """Forget a closed connection."""
        self._waiting.pop(connection, None)
        self._clients[connection.client_name] -= 1
        if not self._clients[connection.client_name]:
            del self._clients[connection.client_name]


class Connection(H11Protocol):
    """A connection that is closed if a header arrives too slowly or a response is read too slowly."""

    connections: Any  # uvicorn's own set of connections
    limiter: Connections  # of a subclass
    client_name = "unknown"
    _timer: asyncio.TimerHandle | None = None
    _stall: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept the connection, or answer at once that the server is busy."""
        super().connection_made(transport)
        self.client_name = client_name(self.client[0]) if self.client else "unknown"
        if self.limiter.add(self):
            self._watch()
        else:
            transport.write(BUSY)
            transport.close()

    def data_received(self, data: bytes) -> None:
        """Receive a part of a request."""
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        super().on_response_complete()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        for timer in (self._timer, self._stall):
            if timer is not None:
                timer.cancel()
        self.limiter.remove(self)
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Wait for the client to read, but not forever."""
        super().pause_writing()
        if self._stall is None:
            self._stall = self.loop.call_later(STALL_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        """Go on writing."""
        super().resume_writing()
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None

    def _watch(self) -> None:
        """Start the clock for a header when the connection waits for one, and stop it when it is complete."""
        is_busy = self.cycle is not None and not self.cycle.response_complete
        if is_busy and self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self.limiter.set_busy(self)
        elif not is_busy and self._timer is None and not self.transport.is_closing():
            self._timer = self.loop.call_later(self.limiter.limits.header_seconds, self.transport.abort)
            self.limiter.set_waiting(self)


def configure(
    app: FastAPI, *, certificate: Path | None = None, key: Path | None = None, proxy: str | None = None
) -> uvicorn.Config:
    """Return the settings of a server."""
    limits: Limits = app.state.server.limits

    class LimitedConnection(Connection):
        limiter = Connections(limits, proxy)

    return uvicorn.Config(
        app,
        http=LimitedConnection,
        log_level="error",
        access_log=False,
        server_header=False,
        proxy_headers=proxy is not None,
        forwarded_allow_ips=proxy,
        backlog=BACKLOG,
        timeout_keep_alive=int(limits.header_seconds) + 1,  # our own limit comes first
        timeout_graceful_shutdown=SHUTDOWN_SECONDS,
        h11_max_incomplete_event_size=64 * 1024,
        ws="none",
        ssl_certfile=certificate,
        ssl_keyfile=key,
    )


def write_access_log(file: Path) -> None:
    """Append a line for each request to a file, which may be moved away at any time; "-" is the standard error stream.

    It has neither headers nor the query, so that it cannot have a token.
    """
    to_stream = str(file) == "-"
    handler = logging.StreamHandler() if to_stream else logging.handlers.WatchedFileHandler(file, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))

    def drop_query(record: logging.LogRecord) -> bool:
        client, method, path, *rest = record.args or ()
        record.args = (client, method, str(path).partition("?")[0], *rest)
        return True

    handler.addFilter(drop_query)
    requests = logging.getLogger("uvicorn.access")
    requests.addHandler(handler)
    requests.setLevel(logging.INFO)


def run(app: FastAPI, config: uvicorn.Config, listening: socket.socket, *, started: Callable[[], None]) -> None:
    """Serve until Ctrl-C, SIGTERM or SIGHUP. The process ends 13 seconds later at the latest."""
    state = app.state.server

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            if state.takes_images:
                state.uploads.start()
            await super().startup(sockets)
            if self.started:
                started()

        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            end = threading.Timer(END_SECONDS, os._exit, [0])  # threads that cannot be stopped would keep the process
            end.daemon = True
            end.start()
            super().handle_exit(sig, frame)

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            asyncio.get_running_loop().call_later(COSTLY_SECONDS, state.give_up)
            await super().shutdown(sockets)

    server = Server(config)
    sys.setswitchinterval(SWITCH_SECONDS)
    gc.freeze()  # a collection that goes through all that is loaded by now stops everything for half a second
    with _stopped_by_signals(server), asyncio.Runner(loop_factory=_Loop) as runner:
        runner.run(server.serve(sockets=[listening]))
    if state.is_stuck:
        os._exit(0)  # the interpreter cannot end well while a thread is inside of a library


class _Loop(asyncio.SelectorEventLoop):
    """An event loop that does not wait long for the handshake of an encrypted connection, and logs full tables once."""

    def __init__(self) -> None:
        super().__init__()
        self._log = SeldomLog()

    def default_exception_handler(self, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
            self._log.warn("too many open files; connections have to wait")
        else:
            super().default_exception_handler(context)

    async def create_server(self, *args: Any, **settings: Any) -> Any:
        seconds = HANDSHAKE_SECONDS if settings.get("ssl") else None
        return await super().create_server(*args, ssl_handshake_timeout=seconds, **settings)


def _open_files() -> int:
    """Return the number of files that this process may open, after raising it as far as is allowed and useful."""
    try:
        import resource
    except ImportError:
        return MOST_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_FILES if hard == resource.RLIM_INFINITY else min(MOST_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        return wanted
    return MOST_FILES if soft == resource.RLIM_INFINITY else soft


@contextmanager
def _stopped_by_signals(server: uvicorn.Server) -> Iterator[None]:
    """Stop the server on SIGHUP as on SIGTERM, and ignore the signals that uvicorn raises again afterwards."""
    before = {each: signal.signal(each, lambda *_: None) for each in STOP_SIGNALS}
    if hasattr(signal, "SIGHUP"):  # uvicorn itself handles the others
        signal.signal(signal.SIGHUP, server.handle_exit)
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
