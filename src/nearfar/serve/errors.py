"""How a request is refused: a status, a word for programs, and a sentence for people."""

from __future__ import annotations

import json
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException as StarletteError
from starlette.routing import compile_path

from nearfar.serve.batching import Busy

WORDS = {
    400: "bad_request",
    401: "no_token",
    404: "not_found",
    405: "wrong_method",
    408: "too_slow",
    413: "too_large",
    422: "bad_value",
    503: "busy",
}


class Refusal(HTTPException):
    """What a request gets instead of an answer.

    Args:
        status: Such as 404.
        message: What is wrong and what is allowed.
        word: For programs, "not_found"; the usual one of the status unless given.
    """

    def __init__(
        self, status: int, message: str, *, word: str | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(status, message, dict(headers) if headers else None)
        self.word = word or WORDS.get(status, "refused")


def body(word: str, message: str) -> dict[str, Any]:
    """The JSON of every error.

    >>> body("busy", "come back later")
    {'error': {'code': 'busy', 'message': 'come back later'}}
    """
    return {"error": {"code": word, "message": message}}


def encoded(word: str, message: str) -> bytes:
    return json.dumps(body(word, message), ensure_ascii=False).encode()


def answer_in_words(app: FastAPI) -> None:
    """Let every error of an application have this one shape."""

    @app.exception_handler(StarletteError)
    async def refused(request: Request, error: StarletteError) -> JSONResponse:
        word = error.word if isinstance(error, Refusal) else WORDS.get(error.status_code, "refused")
        message = str(error.detail)
        if not isinstance(error, Refusal) and message == HTTPStatus(error.status_code).phrase:
            message = _plain(request, error.status_code, message)
        headers = dict(error.headers or {})
        if error.status_code == 405:
            headers["allow"] = ", ".join(_methods(app, request.url.path)) or headers.get("allow", "GET")
        return JSONResponse(body(word, message), error.status_code, headers=headers)

    @app.exception_handler(Busy)
    async def busy(request: Request, error: Busy) -> JSONResponse:
        return JSONResponse(body("busy", str(error)), 503, headers={"retry-after": "1"})

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        return JSONResponse(body("bad_value", "; ".join(map(_in_words, error.errors()[:3]))), 422)


def _methods(app: FastAPI, path: str) -> list[str]:
    """What is allowed there; a router by itself names the methods of its first route alone."""
    ways = app.openapi()["paths"].items()
    return sorted({method.upper() for known, each in ways if compile_path(known)[0].match(path) for method in each})


def _plain(request: Request, status: int, phrase: str) -> str:
    if status == 404:
        return f"there is nothing at {request.url.path!r}"
    if status == 405:
        return f"{request.method} is not allowed at {request.url.path!r}"
    return phrase


def _in_words(problem: Mapping[str, Any]) -> str:
    """A finding of pydantic as one line: where, what was given, what is wrong.

    >>> _in_words({"loc": ("query", "k"), "msg": "Input should be greater than or equal to 1", "input": "0"})
    "k is '0'; input should be greater than or equal to 1"
    """
    place = ".".join(str(each) for each in problem["loc"][1:]) or str(problem["loc"][0])
    said = str(problem["msg"])
    said = said[:1].lower() + said[1:]
    if problem.get("type") == "missing":
        return f"{place} is missing"
    given = repr(problem.get("input"))
    return f"{place} is {given if len(given) <= 80 else given[:77] + '…'}; {said}"
