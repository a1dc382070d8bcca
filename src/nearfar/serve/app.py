"""The ASGI application: an index behind a JSON API and a search page."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from nearfar.serve.limits import Limits

if TYPE_CHECKING:
    from fastapi import FastAPI

    from nearfar.search import Index


def check_dependencies() -> None:
    """Raise an ImportError that names the extra to install if a package for serving is missing."""
    try:
        import fastapi  # noqa: F401
        import prometheus_client  # noqa: F401
        import python_multipart  # noqa: F401
        import uvicorn  # noqa: F401
    except ModuleNotFoundError as error:  # another ImportError is of a package that is broken, and says so itself
        raise ImportError(f"serving needs {error.name}; install it with: pip install 'nearfar[serve]'") from error


def create(
    index: Index,
    *,
    name: str = "index",
    runs: Sequence[str | Path] = (),
    token: str | None = None,
    read_only: bool = False,
    limits: Limits | None = None,
    hosts: Sequence[str] = (),
    addresses: bool = False,
) -> FastAPI:
    """Create an application to run with uvicorn or another ASGI server. It closes the index on shutdown.

    Args:
        index: An open ``nearfar.Index``.
        name: Name of the index on the page.
        runs: Run folders, or folders that contain them, for the tabs that compare runs.
        token: Token of at least 128 bits that every request except those for the page's files must carry; None for no
            authentication.
        read_only: Refuse to add and remove items.
        limits: Limits of requests; None for the defaults.
        hosts: Host names of the server in addition to localhost.
        addresses: Accept any IP address as host name, not only those of the loopback interface.

    Returns:
        A FastAPI application.

    Example:
        >>> import tempfile
        >>> import numpy as np
        >>> from nearfar.search import Index
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with Index.from_vectors(np.eye(3), out=f"{folder}/my.index") as index:
        ...         create(index, name="three vectors").title
        'nearfar'
    """
    check_dependencies()
    import fastapi

    from nearfar.serve.errors import add_error_handlers
    from nearfar.serve.routes import API, items, page, search, system
    from nearfar.serve.routes import runs as run_routes
    from nearfar.serve.security import SecurityMiddleware, check_token
    from nearfar.serve.state import ServerState

    token = None if token is None else check_token(token)
    state = ServerState(index, limits or Limits(), read_only=read_only)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        state.start()
        yield
        state.stop()

    app = fastapi.FastAPI(
        title="nearfar",
        description="Search images by image.",
        version="1",
        lifespan=lifespan,
        openapi_url=f"{API}/openapi.json",
        docs_url=None,  # FastAPI's documentation pages load scripts from other servers
        redoc_url=None,
        redirect_slashes=False,
    )
    add_error_handlers(app)
    app.include_router(system.router(state, name=name, token=token, runs=bool(runs)))
    app.include_router(search.router(state))
    app.include_router(items.router(state))
    if runs:
        app.include_router(run_routes.router(runs, state.costly))
    page.add_page(app)
    system.customize_schema(app, state)
    app.add_middleware(
        SecurityMiddleware,
        limits=state.limits,
        metrics=state.metrics,
        token=token,
        bodies={
            f"{API}/search": lambda: state.limits.upload_bytes,
            f"{API}/items": lambda: state.limits.upload_bytes,
            f"{API}/search/vector": lambda: min(
                state.limits.upload_bytes, search.vector_bytes(state.vector_dim or state.dim)
            ),
        },
        public=["/", *system.PUBLIC],
        public_folder=page.FOLDER,
        names=hosts,
        addresses=addresses,
    )
    app.state.server = state
    return app
