"""Routes for the server itself: health, info, metrics, sessions, and the OpenAPI schema."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.openapi.utils import get_openapi
from fastapi.responses import PlainTextResponse

from nearfar.serve import security
from nearfar.serve.errors import ApiError, error_responses
from nearfar.serve.routes import API
from nearfar.serve.schemas import HealthResponse, InfoResponse, LoginRequest
from nearfar.serve.state import ServerState

PUBLIC = (f"{API}/health", f"{API}/session")
WEEK = 7 * 24 * 3600  # seconds


def router(state: ServerState, *, name: str, token: str | None, runs: bool) -> APIRouter:
    """Create the routes for health, sessions, info and metrics."""
    routes = APIRouter(tags=["server"])

    @routes.get(f"{API}/health", responses=error_responses(503))
    async def health() -> HealthResponse:
        """Return whether the server is running."""
        if state.problem:
            raise ApiError(503, state.problem, code="index_gone")
        return HealthResponse(status="ok", token_needed=token is not None)

    @routes.post(f"{API}/session", status_code=204, response_class=Response, responses=error_responses(408, 413))
    async def begin_session(login: LoginRequest, request: Request) -> Response:
        """Exchange the token for a session cookie."""
        if token is None:
            raise ApiError(401, "this server does not use a token")
        if not security.equal(login.token, token):
            raise ApiError(401, "the token is wrong")
        response = Response(status_code=204)
        name = security.cookie_name(request.headers.get("host", ""))
        response.set_cookie(
            name,
            security.session_value(token),
            max_age=WEEK,
            httponly=True,
            samesite="strict",
            path="/",
            secure=request.url.scheme == "https",
        )
        return response

    @routes.get(f"{API}/info", responses=error_responses())
    def info() -> InfoResponse:
        """Return the properties of the index and the limits of the server."""
        snapshot, limits = state.snapshot(), state.limits
        return InfoResponse(
            name=name,
            count=len(snapshot.items),
            labels=len(snapshot.labels),
            dim=state.dim,
            pictures=state.takes_images,
            read_only=state.read_only,
            runs=runs,
            version=snapshot.version,
            limits={
                "bytes": limits.upload_bytes,
                "pixels": limits.pixels,
                "seconds": limits.seconds,
                "neighbors": limits.neighbors,
            },
            index=state.index.info(),
        )

    @routes.get("/metrics", response_class=PlainTextResponse, responses=error_responses())
    def metrics() -> PlainTextResponse:
        """Return metrics in the Prometheus text format."""
        return PlainTextResponse(state.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    return routes


def customize_schema(app: FastAPI, state: ServerState) -> None:
    """Add the length of vectors to the OpenAPI schema and remove FastAPI's own error schemas."""

    def schema() -> dict[str, Any]:
        if app.openapi_schema is None:
            found = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
            for name in ("HTTPValidationError", "ValidationError"):
                found["components"]["schemas"].pop(name, None)
            app.openapi_schema = found
        vector = app.openapi_schema["components"]["schemas"]["VectorSearchRequest"]["properties"]["vector"]
        vector["minItems"] = vector["maxItems"] = state.vector_dim or state.dim
        return app.openapi_schema

    app.openapi = schema  # type: ignore[method-assign]
