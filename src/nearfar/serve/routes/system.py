"""Routes about the server itself: health, facts, metrics, the session of a browser."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.openapi.utils import get_openapi
from fastapi.responses import PlainTextResponse

from nearfar.serve import token as tokens
from nearfar.serve.errors import Refusal
from nearfar.serve.routes.common import API, refusals
from nearfar.serve.schemas import Health, Info, Login
from nearfar.serve.state import Room

PUBLIC = (f"{API}/health", f"{API}/session")
WEEK = 7 * 24 * 3600


def router(room: Room, *, name: str, token: str | None, runs: bool) -> APIRouter:
    """What the page asks first."""
    routes = APIRouter(tags=["server"])

    @routes.get(f"{API}/health", responses=refusals())
    async def health() -> Health:
        """Whether the server is up."""
        return Health(status="ok", token_needed=token is not None)

    @routes.post(f"{API}/session", status_code=204, response_class=Response, responses=refusals(408, 413))
    async def begin_session(login: Login, request: Request) -> Response:
        """Trade the token for a cookie, for browsers."""
        if token is None or not tokens.same(login.token, token):
            raise Refusal(401, "this is not the token" if token else "this server has no token and needs none")
        response = Response(status_code=204)
        name = tokens.cookie(request.headers.get("host", ""))
        response.set_cookie(name, tokens.session(token), max_age=WEEK, httponly=True, samesite="strict", path="/")
        return response

    @routes.get(f"{API}/info", responses=refusals())
    def info() -> Info:
        """What is served, and what may be asked for."""
        view, limits = room.catalogue.view(), room.limits
        return Info(
            name=name,
            count=len(view.items),
            labels=len(view.labels),
            dim=room.dim,
            pictures=room.has_model,
            read_only=room.read_only,
            runs=runs,
            version=view.version,
            limits={
                "bytes": limits.upload_bytes,
                "pixels": limits.pixels,
                "seconds": limits.seconds,
                "neighbours": limits.neighbours,
            },
            index=_plain(room.index.info()),
        )

    @routes.get("/metrics", response_class=PlainTextResponse, responses=refusals())
    def metrics() -> PlainTextResponse:
        """Counts and times for Prometheus."""
        return PlainTextResponse(room.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    return routes


def fit_schema(app: FastAPI, room: Room) -> None:
    """Let the schema say how long a vector is, and that errors have one shape."""

    def schema() -> dict[str, Any]:
        if app.openapi_schema is None:
            found = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
            vector = found["components"]["schemas"]["Vector"]["properties"]["vector"]
            vector["minItems"] = vector["maxItems"] = room.dim
            for name in ("HTTPValidationError", "ValidationError"):
                found["components"]["schemas"].pop(name, None)
            app.openapi_schema = found
        return app.openapi_schema

    app.openapi = schema  # type: ignore[method-assign]


def _plain(value: Any) -> Any:
    """What JSON has a word for; paths and the like as text."""
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)
