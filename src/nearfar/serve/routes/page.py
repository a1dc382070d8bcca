"""The files of the page. No request can reach any other file."""

from __future__ import annotations

import mimetypes
from typing import Any

from fastapi import FastAPI, Request, Response
from starlette.staticfiles import StaticFiles

FOLDER = "/page/"
mimetypes.add_type("text/javascript", ".js")  # which some systems do not know


class PageFiles(StaticFiles):
    """Files that browsers keep and ask for again: the answer is 304 if they have not changed."""

    def file_response(self, *arguments: Any, **settings: Any) -> Response:
        """Answer with a file."""
        response = super().file_response(*arguments, **settings)
        response.headers["cache-control"] = "no-cache"
        return response


def add_page(app: FastAPI) -> None:
    """Add the page and its files to an application."""
    files = PageFiles(packages=[("nearfar.serve", "page")])

    @app.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
    async def show_page(request: Request) -> Response:
        return await files.get_response("index.html", request.scope)

    app.mount(FOLDER, files)
