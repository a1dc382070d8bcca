"""Access control: tokens, sessions, host names, origins, limits of requests, and response headers."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import logging
import math
import secrets
import string
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, MutableMapping
from functools import lru_cache
from typing import Any

from starlette.datastructures import Headers
from starlette.requests import cookie_parser
from starlette.responses import JSONResponse

from nearfar.serve.errors import ApiError, error_body
from nearfar.serve.limits import Limits
from nearfar.serve.prometheus import ServerMetrics

MIN_TOKEN_BITS = 128
BURST_SECONDS = 10  # of the allowed rate that a client may use at once
MAX_CLIENTS = 20_000  # that are remembered
SMALL_BODY = 16_384  # bytes of a request, unless its path has another limit
COOKIE = "nearfar_session"
SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
OTHER_METHODS = ("POST", "DELETE", "PUT", "PATCH")
# No scripts, styles or images from other servers, no frames, no forms: the page needs none of them.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
RESPONSE_HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=()",
    "cache-control": "no-store",
}
RAW_HEADERS = [(name.encode(), value.encode()) for name, value in RESPONSE_HEADERS.items()]
ENCRYPTED_HEADERS = [(b"strict-transport-security", b"max-age=31536000")]  # in addition, over HTTPS

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

log = logging.getLogger("nearfar.serve")


def new_token() -> str:
    """Return a random token."""
    return secrets.token_urlsafe(24)


def check_token(token: str) -> str:
    """Return a token if nobody can guess it and it fits into an HTTP header."""
    letters = 10 if token.isdecimal() else 16 if set(token) <= set(string.hexdigits) else 64
    bits = int(len(token) * math.log2(letters))
    if bits < MIN_TOKEN_BITS:
        raise ValueError(
            f"token has {len(token)} characters, at most {bits} bits; {MIN_TOKEN_BITS} are required: --token new"
        )
    if not (token.isascii() and token.isprintable()) or " " in token:
        raise ValueError("token has characters other than printable ASCII without spaces; it is sent in a header")
    return token


def session_value(token: str) -> str:
    """Return the value of a session cookie. The token cannot be computed from it."""
    return hmac.new(token.encode(), b"nearfar session", "sha256").hexdigest()


def cookie_name(host: str) -> str:
    """Return the name of the session cookie for a Host header.

    It contains the port, because browsers send cookies to all ports of a host and each may have its own server.
    """
    port = host.rpartition(":")[2]
    return f"{COOKIE}_{port}" if port.isdecimal() else COOKIE


def equal(given: str, expected: str) -> bool:
    """Compare two secrets in constant time."""
    return hmac.compare_digest(given.encode("utf-8", "surrogateescape"), expected.encode())


def is_authorized(headers: Mapping[str, str], token: str) -> bool:
    """Return whether a request carries the token (``Authorization: Bearer …``) or its session cookie."""
    scheme, _, given = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and equal(given.strip(), token):
        return True
    # The parser of the standard library drops all cookies if one of them is malformed.
    cookie = cookie_parser(headers.get("cookie", "")).get(cookie_name(headers.get("host", "")))
    return cookie is not None and equal(cookie, session_value(token))


def is_loopback(host: str) -> bool:
    """Return whether a server bound to this host is reachable from this machine only."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_known_host(header: str, names: Iterable[str], *, addresses: bool) -> bool:
    """Return whether a Host header names this server.

    This prevents DNS rebinding: another site can make its own name resolve to this machine, but it cannot change the
    name in the header.
    """
    name = header.strip().lower()
    if name.startswith("["):
        name, bracket, rest = name[1:].partition("]")
        if not bracket or (rest and not rest.startswith(":")):
            return False
    elif name.count(":") <= 1:
        name = name.partition(":")[0]
    if is_loopback(name) or name in {each.lower() for each in names}:
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return addresses


@lru_cache(maxsize=4096)
def client_name(host: str) -> str:
    """Return the name under which an address is counted: itself, or the /64 network that one IPv6 customer has."""
    if is_loopback(host):
        return "localhost"
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv6Address):
        mapped = address.ipv4_mapped
        return str(mapped) if mapped else str(ipaddress.ip_network((address.packed, 64), strict=False))
    return host


def client_of(scope: Scope) -> str:
    """Return the name of the client of a request."""
    client = scope.get("client")
    return client_name(client[0]) if client else "unknown"


class RateLimit:
    """Counts what clients do, and says how long a client has to wait that does too much."""

    def __init__(self, rate: float, burst: float) -> None:
        self._interval, self._slack = 1 / rate, (burst - 1) / rate
        self._due: dict[str, float] = {}  # when all that a client did would have been due at this rate

    def wait(self, client: str, now: float | None = None) -> float:
        """Count an action of a client and return 0, or return the seconds until it may act again."""
        now = time.monotonic() if now is None else now
        seconds = self._due.get(client, now) - self._slack - now
        if seconds > 0:
            return seconds
        if len(self._due) >= MAX_CLIENTS:
            self._due = {each: due for each, due in self._due.items() if due > now}
            if len(self._due) > MAX_CLIENTS // 2:
                self._due.clear()
        self._due[client] = max(self._due.get(client, now), now) + self._interval
        return 0.0


class SecurityMiddleware:
    """Checks each request, limits its body, adds security headers to the response and records metrics."""

    def __init__(
        self,
        app: App,
        *,
        limits: Limits,
        metrics: ServerMetrics,
        token: str | None,
        bodies: Mapping[str, Callable[[], int]],  # sizes by path; others may have a few KiB
        public: Collection[str],  # paths that need no token
        public_folder: str,  # beginning of further ones
        names: Collection[str],
        addresses: bool,  # accept any IP address as host name
    ) -> None:
        self.app, self.limits, self.metrics, self.token = app, limits, metrics, token
        self.bodies, self.rate = bodies, RateLimit(limits.client_rate, BURST_SECONDS * limits.client_rate)
        self.public, self.public_folder = frozenset(public), public_folder
        self.names, self.addresses = frozenset(names), addresses
        self._received: Counter[str] = Counter()  # bytes of the bodies of unfinished requests, by client

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request as an ASGI application."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began, status, received, client = time.perf_counter(), [0], [0], client_of(scope)
        always = RAW_HEADERS + (ENCRYPTED_HEADERS if scope.get("scheme") == "https" else [])
        largest = self.bodies.get(scope["path"], lambda: SMALL_BODY)()

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                status[0] = message["status"]
                given = {name for name, _ in message["headers"]}
                message["headers"] += [header for header in always if header[0] not in given]
            await send(message)

        try:
            self._check(scope, largest)
            await self.app(scope, self._limited(receive, largest, client, received), send_with_headers)
        except ApiError as error:
            await _send_error(error, scope, receive, send_with_headers)
        except asyncio.CancelledError:  # the server stops, and the request took longer than it may
            if status[0]:
                raise
            stopping = ApiError(503, "the server is stopping; try again", headers={"connection": "close"})
            await _send_error(stopping, scope, receive, send_with_headers)
        except Exception:
            log.exception("%s %s failed", scope["method"], scope["path"])
            if status[0]:  # the response has begun
                raise
            failure = ApiError(500, "internal server error; see the log of the server", code="failed")
            await _send_error(failure, scope, receive, send_with_headers)
        finally:
            self._received -= Counter({client: received[0]})
            route = getattr(scope.get("route"), "path", "other")
            method = scope["method"] if scope["method"] in (*SAFE_METHODS, *OTHER_METHODS) else "other"
            self.metrics.requests.labels(method, route, str(status[0] or 499)).inc()
            self.metrics.request_seconds.labels(method, route).observe(time.perf_counter() - began)

    def _check(self, scope: Scope, largest: int) -> None:
        headers, client = Headers(scope=scope), client_of(scope)
        if client != "localhost":
            seconds = math.ceil(self.rate.wait(client))
            if seconds:
                raise ApiError(429, "too many requests; send fewer", headers={"retry-after": str(seconds)})
        host = headers.get("host", "")
        if not is_known_host(host, self.names, addresses=self.addresses):
            raise ApiError(403, f"host is {host!r}, which is not a name of this server; see --allow-host", code="host")
        # Neither header is sent by programs, and a page of another site cannot change them.
        origin = headers.get("origin", f"://{host}").partition("://")[2]
        is_foreign = origin.lower() != host.lower() or headers.get("sec-fetch-site") not in (
            None,
            "same-origin",
            "none",
        )
        if scope["method"] not in SAFE_METHODS and is_foreign:
            raise ApiError(403, "cross-origin requests are not allowed", code="origin")
        is_public = scope["path"] in self.public or scope["path"].startswith(self.public_folder)
        if self.token and not is_public and not is_authorized(headers, self.token):
            raise ApiError(401, "this server requires a token", headers={"www-authenticate": "Bearer"})
        length = headers.get("content-length", "0")
        if not length.isdecimal() or not length.isascii():
            raise ApiError(400, f"content-length is {length!r}; it must be a whole number")
        if int(length[:20]) > largest:
            raise _too_large(largest)

    def _limited(self, receive: Receive, largest: int, client: str, received: list[int]) -> Receive:
        """Return a ``receive`` that raises an error for a body that is too large, too slow, or one of too many."""
        deadline = time.perf_counter() + self.limits.seconds
        complete = False
        total = self.limits.uploads * self.limits.upload_bytes
        share = total if client == "localhost" else max(1, self.limits.uploads // 4) * self.limits.upload_bytes

        async def limited() -> Message:
            nonlocal complete
            if complete:  # the next message is a disconnect
                return await receive()
            try:
                message = await asyncio.wait_for(receive(), max(0.001, deadline - time.perf_counter()))
            except TimeoutError:
                words = f"the request did not arrive within {self.limits.seconds:g} seconds"
                raise ApiError(408, words, headers={"connection": "close"}) from None
            size = len(message.get("body", b""))
            received[0] += size
            self._received[client] += size
            complete = not message.get("more_body", False)
            if received[0] > largest:
                raise _too_large(largest)
            if received[0] > SMALL_BODY and (self._received[client] > share or self._received.total() > total):
                headers = {"retry-after": "1", "connection": "close"}
                raise ApiError(503, "too many uploads are arriving; try again later", headers=headers)
            return message

        return limited


def _too_large(largest: int) -> ApiError:
    size = f"{largest / 2**20:.4g} MiB" if largest >= 2**20 else f"{largest / 2**10:.4g} KiB"
    return ApiError(413, f"the request is too large; at most {size} are allowed", headers={"connection": "close"})


async def _send_error(error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
    response = JSONResponse(error_body(error.code, str(error.detail)), error.status_code, dict(error.headers or {}))
    await response(scope, receive, send)
