"""The application: an index behind an API and a page."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from nearfar.serve.limits import Limits
from nearfar.serve.protocols import Searchable

if TYPE_CHECKING:
    from fastapi import FastAPI


def create(
    index: Searchable,
    *,
    name: str = "index",
    runs: Sequence[str | Path] = (),
    token: str | None = None,
    read_only: bool = False,
    limits: Limits | None = None,
    hosts: Sequence[str] = (),
    addresses: bool = False,
) -> FastAPI:
    """An application to serve with uvicorn or any other ASGI server. It owns the index and closes it at the end.

    Args:
        index: An open ``nearfar.Index``.
        name: What the page calls it.
        runs: Run folders, or folders of them, for the tabs that compare.
        token: Needed by every request but for the page itself; None lets everybody in who reaches the server.
        read_only: Refuse to add and remove.
        limits: Of uploads; the usual ones unless given.
        hosts: Names that the server is reached by, beside localhost.
        addresses: Whether it is reached by addresses in numbers other than the loopback's.
    """
    try:
        import fastapi
        import python_multipart  # noqa: F401
    except ImportError as error:
        raise ImportError("serving needs fastapi; install it with: pip install 'nearfar[serve]'") from error
    from nearfar.serve import token as tokens
    from nearfar.serve.errors import answer_in_words
    from nearfar.serve.routes import common, items, page, search, system
    from nearfar.serve.routes import runs as comparing
    from nearfar.serve.security import Guard
    from nearfar.serve.state import Room

    if token is not None:
        tokens.check(token)
    room = Room(index, limits or Limits(), read_only=read_only)

    @asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        room.start()
        yield
        room.stop()

    app = fastapi.FastAPI(
        title="nearfar",
        description="Search pictures by pictures.",
        version="1",
        lifespan=life,
        openapi_url=f"{common.API}/openapi.json",
        docs_url=None,  # their pages would fetch scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,
    )
    answer_in_words(app)
    app.include_router(system.router(room, name=name, token=token, runs=bool(runs)))
    app.include_router(search.router(room))
    app.include_router(items.router(room))
    if runs:
        app.include_router(comparing.router(runs))
    app.include_router(page.router())
    system.fit_schema(app, room)
    app.add_middleware(
        Guard,
        limits=room.limits,
        metrics=room.metrics,
        secret=token,
        public=[*page.read(), *system.PUBLIC],
        names=hosts,
        addresses=addresses,
    )
    app.state.room = room
    return app
