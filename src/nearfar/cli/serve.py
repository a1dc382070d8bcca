"""nearfar serve"""

from __future__ import annotations

import socket
import sys
import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from nearfar.cli.app import app


@app.command(name="serve", short_help="Open an index in the browser: search by picture, look at the map.")
def serve_index(
    index: Annotated[Path, typer.Argument(metavar="INDEX", help="A folder that `nearfar index build` wrote.")],
    runs: Annotated[
        list[Path] | None,
        typer.Option(metavar="FOLDER", help="Runs to compare in tabs of their own; repeatable."),
    ] = None,
    host: Annotated[
        str, typer.Option(help="Where to listen. Anything but this machine alone needs --token.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes any that is free.")] = 8000,
    token: Annotated[
        str | None,
        typer.Option(envvar="NEARFAR_TOKEN", help='Needed by every request; "new" makes one up and prints it.'),
    ] = None,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="A name that the server is reached by, as behind a proxy; repeatable."),
    ] = None,
    read_only: Annotated[bool, typer.Option("--read-only", help="Refuse to add and remove.")] = False,
    open_page: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
    max_upload: Annotated[float, typer.Option(metavar="MIB", help="The largest upload.")] = 20.0,
    max_pixels: Annotated[float, typer.Option(metavar="MILLIONS", help="The largest picture.")] = 50.0,
    device: Annotated[str, typer.Option(help="Where to compute: auto, cpu, cuda, cuda:1, …")] = "auto",
) -> None:
    """Open an index in the browser: search by picture, look at the map, add and remove. Ctrl-C stops.

    Example: nearfar serve my.index --runs runs/ --open
    """
    from nearfar.search import Index
    from nearfar.serve import Limits, create, server
    from nearfar.serve import token as tokens

    if token == "new":
        token = tokens.new()
        print(f"token: {token}", flush=True)
    server.check_exposure(host, token)
    limits = Limits(upload_bytes=int(max_upload * 2**20), pixels=int(max_pixels * 1e6))
    for place in runs or ():
        if not place.is_dir():
            raise FileNotFoundError(f"--runs is {str(place)!r}; there is no such folder")
    with server.listen(host, port) as listening:  # before the model is loaded: a port in use is told at once
        local = tokens.is_loopback(host)
        application = create(
            Index.open(index, read_only=read_only, device=device),
            name=index.absolute().name,
            runs=runs or (),
            token=token,
            read_only=read_only,
            limits=limits,
            hosts=[*(allow_host or ()), *(() if local else (host, socket.gethostname(), socket.getfqdn()))],
            addresses=not local,
        )
        address = server.address_of(listening)

        def started() -> None:
            print(f"{index} is served at {address}  (Ctrl-C stops)", flush=True)
            if not local:
                print("other machines reach it, without encryption: see docs/serve.md", file=sys.stderr, flush=True)
            if open_page:
                webbrowser.open(server.link(address, token))

        server.run(application, listening, started=started)
