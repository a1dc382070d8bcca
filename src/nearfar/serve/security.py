"""What every request passes before anything looks at it, and every answer on its way out."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, MutableMapping
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response

from nearfar.serve import errors, token
from nearfar.serve.errors import Refusal
from nearfar.serve.limits import Limits
from nearfar.serve.prometheus import SECONDS, Metrics

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

SAFE = ("GET", "HEAD", "OPTIONS")
# Without scripts, styles or pictures from elsewhere, without frames, without forms: the page needs none.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=()",
}
log = logging.getLogger("nearfar.serve")


class Guard:
    """Refuses strangers, floods and what comes from other pages; counts; sees that answers carry their headers.

    Args:
        app: What is guarded.
        limits: Of a request's body, in bytes and seconds.
        metrics: Where requests are counted.
        secret: The token; None lets everybody in who reaches the server.
        public: Paths that need no token.
        names: Host names that this server answers to, beside those of the loopback.
        addresses: Whether it answers to any address in numbers.
    """

    def __init__(
        self,
        app: App,
        *,
        limits: Limits,
        metrics: Metrics,
        secret: str | None,
        public: Collection[str],
        names: Collection[str],
        addresses: bool,
    ) -> None:
        self.app, self.limits, self.metrics, self.secret = app, limits, metrics, secret
        self.public, self.names, self.addresses = frozenset(public), frozenset(names), addresses

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began, status = time.perf_counter(), [0]

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                status[0] = message["status"]
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
                headers.setdefault("cache-control", "no-store")
            await send(message)

        try:
            self._admit(scope)
            await self.app(scope, self._limited(scope, receive), guarded)
        except Refusal as refusal:
            await _refuse(refusal, scope, receive, guarded)
        except Exception:
            log.exception("%s %s failed", scope["method"], scope["path"])
            if status[0]:  # too late for words
                raise
            failure = Refusal(500, "the server failed at this; its log says more", word="failed")
            await _refuse(failure, scope, receive, guarded)
        finally:
            route = getattr(scope.get("route"), "path", "other")
            method = scope["method"] if scope["method"] in (*SAFE, "POST", "DELETE", "PUT", "PATCH") else "other"
            labels = {"method": method, "route": route}
            self.metrics.count("requests_total", "Requests.", **labels, status=str(status[0] or 499))
            spent = time.perf_counter() - began
            self.metrics.observe("request_seconds", "Time of requests.", spent, SECONDS, **labels)

    def _admit(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        if not token.known_host(headers.get("host", ""), self.names, addresses=self.addresses):
            raise Refusal(
                403,
                f"this server does not answer to the name {headers.get('host', '')!r}; see --allow-host",
                word="host",
            )
        if scope["method"] not in SAFE and not _same_origin(headers):
            raise Refusal(403, "a page from elsewhere asked for this; only this server's own page may", word="origin")
        if self.secret and scope["path"] not in self.public and not token.allowed(headers, self.secret):
            raise Refusal(401, "a token is needed here", headers={"www-authenticate": "Bearer"})
        length = headers.get("content-length", "0")
        if not length.isdecimal() or not length.isascii():
            raise Refusal(400, f"content-length is {length!r}; a whole number is needed")
        if int(length[:20]) > self.limits.upload_bytes:
            raise self._too_large()

    def _limited(self, scope: Scope, receive: Receive) -> Receive:
        """The body as it comes in, as long as it is neither too long nor too slow."""
        deadline = time.perf_counter() + self.limits.seconds
        count, complete = 0, False

        async def limited() -> Message:
            nonlocal count, complete
            if complete:  # what comes now is that the client went away
                return await receive()
            try:
                message = await asyncio.wait_for(receive(), max(0.001, deadline - time.perf_counter()))
            except TimeoutError:
                raise Refusal(
                    408,
                    f"the request did not arrive within {self.limits.seconds:g} seconds",
                    headers={"connection": "close"},
                ) from None
            count += len(message.get("body", b""))
            complete = not message.get("more_body", False)
            if count > self.limits.upload_bytes:
                raise self._too_large()
            return message

        return limited

    def _too_large(self) -> Refusal:
        most = self.limits.upload_bytes / 2**20
        return Refusal(
            413, f"the upload is too large; at most {most:.4g} MiB are taken", headers={"connection": "close"}
        )


def _same_origin(headers: Headers) -> bool:
    """Browsers say where a request that changes something comes from; programs say nothing."""
    origin = headers.get("origin")
    if origin is not None and origin.partition("://")[2].lower() != headers.get("host", "").lower():
        return False
    return headers.get("sec-fetch-site", "none") in ("same-origin", "none")


async def _refuse(refusal: Refusal, scope: Scope, receive: Receive, send: Send) -> None:
    body = errors.encoded(refusal.word, str(refusal.detail))
    response = Response(body, refusal.status_code, dict(refusal.headers or {}), "application/json")
    await response(scope, receive, send)
