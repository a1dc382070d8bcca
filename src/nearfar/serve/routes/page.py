"""The page: files of this package, read once; a request chooses among them by name and reaches no other."""

from __future__ import annotations

import hashlib
from importlib.resources import files

from fastapi import APIRouter, Request, Response

KINDS = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
INDEX = "index.html"


def read() -> dict[str, tuple[bytes, str]]:
    """Content and kind of each file, by its path on the server.

    >>> found = read()
    >>> found["/"][1], "/page/app.js" in found
    ('text/html; charset=utf-8', True)
    """
    found = {}
    for file in files("nearfar.serve").joinpath("page").iterdir():
        kind = KINDS.get("." + file.name.rpartition(".")[2])
        if kind is not None:
            found["/" if file.name == INDEX else f"/page/{file.name}"] = (file.read_bytes(), kind)
    return found


def router() -> APIRouter:
    """One route for each file."""
    routes = APIRouter(include_in_schema=False)
    for path, (content, kind) in read().items():
        _route(routes, path, content, kind)
    return routes


def _route(routes: APIRouter, path: str, content: bytes, kind: str) -> None:
    tag = f'"{hashlib.sha256(content).hexdigest()[:16]}"'
    headers = {"etag": tag, "cache-control": "no-cache"}

    async def serve(request: Request) -> Response:
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        return Response(content, media_type=kind, headers=headers)

    routes.add_api_route(path, serve, methods=["GET", "HEAD"])
