"""Errors of the HTTP API: a status, a code for programs and a message for people."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException as StarletteError
from starlette.routing import compile_path

from nearfar.search.items import MissingItem
from nearfar.serve.batching import ServerBusy
from nearfar.serve.schemas import ErrorResponse
from nearfar.utils.atomic import FULL_DISK

CODES = {
    400: "bad_request",
    401: "no_token",
    404: "not_found",
    405: "wrong_method",
    408: "too_slow",
    413: "too_large",
    422: "bad_value",
    429: "too_many",
    503: "busy",
    507: "disk_full",
}
DESCRIPTIONS = {
    400: "The request is malformed.",
    401: "A token is required.",
    403: "The host or origin is not allowed, or the server is read-only.",
    404: "Not found.",
    408: "The request arrived too slowly.",
    409: "The index has no model and cannot embed images.",
    413: "The request is too large.",
    422: "A value is invalid.",
    429: "The client sent too many requests.",
    503: "Too many requests are waiting.",
    507: "The disk of the server is full.",
}


class ApiError(HTTPException):
    """An error response of the API."""

    def __init__(
        self, status: int, message: str, *, code: str | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(status, message, dict(headers) if headers else None)
        self.code = code or CODES.get(status, "refused")


def error_body(code: str, message: str) -> dict[str, Any]:
    """Return the JSON body of an error response."""
    return {"error": {"code": code, "message": message}}


def error_responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Describe the error responses of a route for the OpenAPI schema."""
    return {
        status: {"model": ErrorResponse, "description": DESCRIPTIONS[status]}
        for status in (400, 401, 403, 422, 429, *statuses)
    }


def add_error_handlers(app: FastAPI) -> None:
    """Give every error response of an application the same JSON shape."""

    @app.exception_handler(StarletteError)
    async def handle_http_error(request: Request, error: StarletteError) -> JSONResponse:
        if isinstance(error.__cause__, OSError):  # a large upload is kept in a temporary file while it arrives
            return await handle_storage(request, error.__cause__)
        code = error.code if isinstance(error, ApiError) else CODES.get(error.status_code, "refused")
        message = str(error.detail)
        if not isinstance(error, ApiError) and message == HTTPStatus(error.status_code).phrase:
            message = _message(request, error.status_code, message)
        headers = dict(error.headers or {})
        if error.status_code == 405:
            headers["Allow"] = ", ".join(_methods(app, request.url.path)) or headers.get("Allow", "GET")
        return JSONResponse(error_body(code, message), error.status_code, headers=headers)

    @app.exception_handler(MissingItem)
    async def handle_missing(request: Request, error: MissingItem) -> JSONResponse:
        return JSONResponse(error_body("not_found", str(error)), 404)

    @app.exception_handler(OSError)
    async def handle_storage(request: Request, error: OSError) -> JSONResponse:
        if error.errno in FULL_DISK:
            return JSONResponse(error_body("disk_full", "the disk of the server is full; nothing was changed"), 507)
        if isinstance(error, FileNotFoundError):
            message = f"{error.strerror or error}; nothing was changed"
            return JSONResponse(error_body("index_gone", message), 404)
        raise error

    @app.exception_handler(ServerBusy)
    async def handle_busy(request: Request, error: ServerBusy) -> JSONResponse:
        return JSONResponse(error_body("busy", str(error)), 503, headers={"retry-after": "1"})

    @app.exception_handler(RequestValidationError)
    async def handle_invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        return JSONResponse(error_body("bad_value", "; ".join(map(_validation_message, error.errors()[:3]))), 422)


def _methods(app: FastAPI, path: str) -> list[str]:
    """Return the methods allowed at a path. The router itself reports only those of its first route."""
    paths = app.openapi()["paths"].items()
    return sorted({method.upper() for known, each in paths if compile_path(known)[0].match(path) for method in each})


def _message(request: Request, status: int, phrase: str) -> str:
    if status == 404:
        return f"there is nothing at {request.url.path!r}"
    if status == 405:
        return f"{request.method} is not allowed at {request.url.path!r}"
    return phrase


def _validation_message(problem: Mapping[str, Any]) -> str:
    """Format a pydantic error as one line: field, given value, what is wrong.

    >>> _validation_message({"loc": ("query", "k"), "msg": "Input should be greater than or equal to 1", "input": "0"})
    "k is '0'; input should be greater than or equal to 1"
    """
    field = ".".join(str(each) for each in problem["loc"][1:]) or str(problem["loc"][0])
    reason = str(problem["msg"])
    reason = reason[:1].lower() + reason[1:]
    if problem.get("type") == "missing":
        return f"{field} is missing"
    value = repr(problem.get("input"))
    return f"{field} is {value if len(value) <= 80 else value[:77] + '…'}; {reason}"
