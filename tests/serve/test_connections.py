"""Limits of connections: of slow headers, of slow readers, in all and of one client."""

import asyncio
import logging
import os
import socket
import threading
import time
from contextlib import ExitStack, suppress
from urllib.parse import urlsplit

import httpx
import pytest
from fake_index import FakeIndex
from waiting import result_of

from nearfar.serve import Limits, create, server

API = "/api/v1"
HALF = b"GET /api/v1/health HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: "


class Transport(asyncio.Transport):
    """A transport that goes nowhere."""

    def __init__(self, address):
        super().__init__({"peername": (address, 1), "sockname": ("127.0.0.1", 2)})
        self.written, self.open = b"", True

    def write(self, data):
        self.written += bytes(data)

    def close(self):
        self.open = False

    def abort(self):
        self.open = False

    def is_closing(self):
        return not self.open


def connect(config, *addresses):
    """Connect from addresses, one after the other."""

    async def connected():
        made = []
        for address in addresses:
            transport = Transport(address)
            state = server.uvicorn.server.ServerState()
            config.http_protocol_class(config=config, server_state=state, app_state={}).connection_made(transport)
            made.append(transport)
        return made

    return result_of(connected())


def configured(**limits):
    config = server.configure(create(FakeIndex(1), limits=Limits(**limits)), proxy="10.0.0.1")
    config.load()
    return config


def test_one_client_has_few_connections(caplog):
    config = configured(client_connections=2)
    with caplog.at_level(logging.WARNING):
        connected = connect(config, *["203.0.113.7"] * 5, "203.0.113.8", *["127.0.0.1", "10.0.0.1"] * 4)
    assert [transport.open for transport in connected] == [True] * 2 + [False] * 3 + [True] * 9
    assert connected[2].written.startswith(b"HTTP/1.1 503 ")
    assert len(caplog.records) == 1  # and not one for each


@pytest.mark.parametrize(
    ("limit", "addresses", "stay"),
    [  # the network of an address of IPv6 is one client, and a new connection replaces the one that waited longest
        ("client_connections", ["2001:db8::1", "2001:db8::2", "2001:db8:0:1::1"], [True, False, True]),
        ("connections", [f"203.0.113.{number}" for number in range(3)], [False, False, True]),
    ],
)
def test_which_connections_stay(limit, addresses, stay):
    assert [transport.open for transport in connect(configured(**{limit: 1}), *addresses)] == stay


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="open files cannot be counted")
def test_files_are_kept_free_for_connections_on_their_way():
    """As many new connections in each round of the event loop as it accepts at once."""
    config, backlog = configured(connections=1), 16

    def protocol():
        return config.http_protocol_class(config=config, server_state=server.uvicorn.server.ServerState(), app_state={})

    async def peak():
        listening, most = server.listen("127.0.0.1", 0), 0
        with ExitStack() as stack:
            async with await asyncio.get_running_loop().create_server(protocol, sock=listening, backlog=backlog):
                listening.listen(8 * backlog)  # so that nobody waits to connect
                before = len(os.listdir("/proc/self/fd"))
                for _ in range(8):
                    for _ in range(backlog):
                        stack.enter_context(socket.create_connection(listening.getsockname(), timeout=20))
                        before += 1
                    await asyncio.sleep(0)
                    most = max(most, len(os.listdir("/proc/self/fd")) - before)
        return most

    most = result_of(peak())
    assert backlog < most <= 1 + 3 * (backlog + 1)  # newer versions of Python accept one more
    assert server.OTHER_FILES > 3 * server.BACKLOG


def test_a_header_that_does_not_arrive_is_given_up(site):
    place = urlsplit(site(FakeIndex(4), limits=Limits(header_seconds=0.5)))
    for first in (b"", HALF, b"GET /api/v1/health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" + HALF):
        began = time.monotonic()
        with socket.create_connection((place.hostname, place.port), timeout=20) as connection:
            connection.sendall(first)
            answer = b""
            with suppress(ConnectionError):
                while part := connection.recv(4096):
                    answer += part
                    connection.sendall(b"x")  # new bytes do not extend the time
        assert 0.4 < time.monotonic() - began < 10
        assert answer.count(b"HTTP/1.1 200 ") == first.count(b"\r\n\r\n")


def test_a_response_that_is_not_read_is_given_up(site, monkeypatch):
    monkeypatch.setattr(server, "STALL_SECONDS", 0.3)
    given_up, forget = threading.Event(), server.Connection.connection_lost

    def tell(self, exc):
        if self._stall is not None:
            given_up.set()
        forget(self, exc)

    monkeypatch.setattr(server.Connection, "connection_lost", tell)
    index = FakeIndex(4)
    index.thumbnail = lambda id: bytes(30_000_000)
    address = site(index)
    place = urlsplit(address)
    with socket.create_connection((place.hostname, place.port), timeout=20) as connection:
        connection.sendall(b"GET /api/v1/items/1/thumbnail HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        assert given_up.wait(10)
        received = 0
        with suppress(ConnectionError):
            while part := connection.recv(1 << 20):
                received += len(part)
    assert 0 < received < 30_000_000
    assert httpx.get(f"{address}{API}/health").status_code == 200


def test_responses_do_not_wait_for_the_acknowledgement_of_the_client():
    with server.listen("127.0.0.1", 0) as listening, socket.create_connection(listening.getsockname()):
        connection = listening.accept()[0]
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        connection.close()
