"""Routes for the files of the page, which are read once at startup. No request can reach any other file."""

from __future__ import annotations

import hashlib
from importlib.resources import files

from fastapi import APIRouter, Request, Response

MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
INDEX = "index.html"


def read_files() -> dict[str, tuple[bytes, str]]:
    """Return the content and media type of each file by its URL path."""
    found = {}
    for file in files("nearfar.serve").joinpath("page").iterdir():
        media_type = MEDIA_TYPES.get("." + file.name.rpartition(".")[2])
        if media_type is not None:
            found["/" if file.name == INDEX else f"/page/{file.name}"] = (file.read_bytes(), media_type)
    return found


def router() -> APIRouter:
    """Create one route per file."""
    routes = APIRouter(include_in_schema=False)
    for path, (content, media_type) in read_files().items():
        _add_route(routes, path, content, media_type)
    return routes


def _add_route(routes: APIRouter, path: str, content: bytes, media_type: str) -> None:
    tag = f'"{hashlib.sha256(content).hexdigest()[:16]}"'
    headers = {"etag": tag, "cache-control": "no-cache"}

    async def serve(request: Request) -> Response:
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        return Response(content, media_type=media_type, headers=headers)

    routes.add_api_route(path, serve, methods=["GET", "HEAD"])
