"""Who may come in: the token, and the session that a browser gets for it."""

from __future__ import annotations

import hmac
import ipaddress
import secrets
from collections.abc import Iterable, Mapping

SHORTEST = 16  # characters of a token that somebody makes up
COOKIE = "nearfar_session"


def new() -> str:
    """A token that nobody guesses.

    >>> len(new())
    32
    """
    return secrets.token_urlsafe(24)


def check(token: str) -> str:
    """A token somebody chose, if it is long enough."""
    if len(token) < SHORTEST:
        raise ValueError(f"token has {len(token)} characters; needed are at least {SHORTEST}")
    if not (token.isascii() and token.isprintable()) or " " in token:
        raise ValueError("token has characters other than ASCII letters, digits and signs; it goes into a header")
    return token


def session(token: str) -> str:
    """What a browser keeps as a cookie; the token cannot be computed from it."""
    return hmac.new(token.encode(), b"nearfar session", "sha256").hexdigest()


def cookie(host: str) -> str:
    """The name of that cookie: browsers send it to all ports of a machine, and each may have a server of its own.

    >>> cookie("127.0.0.1:8000"), cookie("photos.example"), cookie("[::1]")
    ('nearfar_session_8000', 'nearfar_session', 'nearfar_session')
    """
    port = host.rpartition(":")[2]
    return f"{COOKIE}_{port}" if port.isdecimal() else COOKIE


def same(given: str, wanted: str) -> bool:
    """Equality in a time that tells nothing about where they differ.

    >>> same("open", "open"), same("sesame", "open")
    (True, False)
    """
    return hmac.compare_digest(given.encode("utf-8", "surrogateescape"), wanted.encode())


def allowed(headers: Mapping[str, str], token: str) -> bool:
    """Whether a request carries the token (``Authorization: Bearer …``) or the session of one."""
    kind, _, given = headers.get("authorization", "").partition(" ")
    if kind.lower() == "bearer" and same(given.strip(), token):
        return True
    from starlette.requests import cookie_parser  # of the standard library's, one odd cookie makes all others disappear

    found = cookie_parser(headers.get("cookie", "")).get(cookie(headers.get("host", "")))
    return found is not None and same(found, session(token))


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a server bound there.

    >>> is_loopback("127.0.0.1"), is_loopback("localhost"), is_loopback("0.0.0.0")
    (True, True, False)
    """
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def known_host(header: str, names: Iterable[str], *, addresses: bool) -> bool:
    """Whether a Host header names this server.

    A page elsewhere can let its own name point to this machine and then speak to it as its own; it cannot change the
    name in the header.

    Args:
        names: That are allowed beside those of the loopback.
        addresses: Allow any address in numbers: those cannot be pointed elsewhere.

    >>> known_host("localhost:8000", (), addresses=False), known_host("evil.example", (), addresses=True)
    (True, False)
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
