"""The dearest accepted request of each route of the server."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from fake_index import DIM, encoded, picture

API = "/api/v1"
PLAIN = ("POST", f"{API}/search/id/1")


class Dearest(NamedTuple):
    """The dearest request of a route, in as many variants as are asked for, and whether it is costly work."""

    costly: bool
    settings: Callable[[int], dict[str, Any]] = lambda number: {}
    path: Callable[[int], str] | None = None
    status: int = 200


def searched(body):
    """With the largest filter, as many neighbors as are allowed, expansion and re-ranking."""

    def settings(number):
        names = ",".join(f"{name}.png" for name in range(49))
        where = [f"name!=x{number},{names}"] * 20
        return {"params": {"k": 200, "where": where, "expand": 200, "rerank": "k_reciprocal"}, **body(number)}

    return settings


def image(number):
    return {"files": {"image": encoded(picture(number))}}


def vector(number):
    return {"json": {"vector": [number + 0.5] * DIM}}


ROUTES = {
    ("POST", f"{API}/search"): Dearest(True, searched(image)),
    ("POST", f"{API}/search/id/{{id}}"): Dearest(True, searched(lambda number: {})),
    ("POST", f"{API}/search/vector"): Dearest(True, searched(vector)),
    ("GET", f"{API}/map"): Dearest(True),
    ("GET", f"{API}/runs"): Dearest(True),
    ("GET", "/leaderboard"): Dearest(True),
    ("GET", f"{API}/items"): Dearest(False, lambda number: {"params": {"limit": 1000, "shuffle": number}}),
    ("POST", f"{API}/items"): Dearest(False, image, status=201),
    ("DELETE", f"{API}/items/{{id}}"): Dearest(False, path=lambda number: f"{API}/items/{number + 30}"),
    ("GET", f"{API}/items/{{id}}"): Dearest(False),
    ("GET", f"{API}/items/{{id}}/thumbnail"): Dearest(False),
    ("GET", f"{API}/labels"): Dearest(False),
    ("GET", f"{API}/info"): Dearest(False),
    ("GET", f"{API}/health"): Dearest(False),
    ("GET", f"{API}/openapi.json"): Dearest(False),
    ("POST", f"{API}/session"): Dearest(False, lambda number: {"json": {"token": "x" * 1000}}, status=401),
    ("GET", "/metrics"): Dearest(False),
    ("GET", "/"): Dearest(False),
    ("GET", "/page"): Dearest(False, path=lambda number: "/page/app.js"),
}
