"""The command ``nearfar serve``."""

from __future__ import annotations

import os
import socket
import sys
import webbrowser
from pathlib import Path
from typing import Annotated

from typer import Option

from nearfar.cli.app import app
from nearfar.cli.options import Device, IndexFolder
from nearfar.cli.output import output_file


@app.command(name="serve", short_help="Serve an index in the browser: search by image, view the map.")
def serve_index(
    index: IndexFolder,
    runs: Annotated[
        list[Path] | None, Option(metavar="FOLDER", help="Folder of runs to compare on the page; repeatable.")
    ] = None,
    host: Annotated[
        str, Option(help="Address to listen on. Other than the loopback interface needs a token.")
    ] = "127.0.0.1",
    port: Annotated[int, Option(min=0, max=65535, help="Port to listen on; 0 for any free port.")] = 8000,
    token: Annotated[
        str | None,
        Option(envvar="NEARFAR_TOKEN", help='Token that requests must carry; "new" generates and prints one.'),
    ] = None,
    allow_host: Annotated[
        list[str] | None,
        Option(metavar="NAME", help="Host name that a proxy uses; repeatable. Needs a token."),
    ] = None,
    proxy: Annotated[
        str | None,
        Option(metavar="ADDRESS", help="Reverse proxy whose X-Forwarded-For header names the client."),
    ] = None,
    certificate: Annotated[
        Path | None, Option(metavar="PEM", help="Certificate chain for HTTPS; requires --key.")
    ] = None,
    key: Annotated[Path | None, Option(metavar="PEM", help="Private key of the certificate.")] = None,
    access_log: Annotated[
        Path | None, Option(metavar="FILE", help="Append a line for each request; - for stderr.")
    ] = None,
    read_only: Annotated[bool, Option("--read-only", help="Refuse to add and remove items.")] = False,
    open_page: Annotated[bool, Option("--open", help="Open the page in a browser.")] = False,
    max_upload: Annotated[float, Option(metavar="MIB", help="Largest upload.")] = 20.0,
    max_pixels: Annotated[float, Option(metavar="MILLIONS", help="Largest image in pixels.")] = 50.0,
    allow_format: Annotated[
        list[str] | None,
        Option(
            metavar="NAME",
            help='Format of images to accept besides JPEG, PNG, WebP, GIF and AVIF, such as "TIFF"; repeatable.',
        ),
    ] = None,
    max_rate: Annotated[
        float, Option(metavar="NUMBER", help="Requests per second of a client on another machine.")
    ] = 50.0,
    device: Device = "auto",
) -> None:
    """Serve an index in the browser: search by image, view the map, add and remove images. Ctrl-C stops.

    Example: nearfar serve my.index --runs runs/ --open
    """
    from nearfar.serve.app import check_dependencies

    check_dependencies()
    from nearfar.search import Index
    from nearfar.serve import Limits, create, server
    from nearfar.serve.limits import WEB_FORMATS
    from nearfar.serve.security import is_loopback, new_token

    if token is None and "NEARFAR_TOKEN" in os.environ:
        raise ValueError("NEARFAR_TOKEN is set and empty; unset it to serve without a token")
    if token == "new" or (token is None and server.needs_token(host, allow_host or ())):
        token = new_token()
        print(f"token: {token}", flush=True)
    if (certificate is None) != (key is None):
        raise ValueError("HTTPS requires both --certificate and --key")
    output_file(access_log, "access log", index, force=None)
    limits = Limits(
        upload_bytes=int(max_upload * 2**20),
        pixels=int(max_pixels * 1e6),
        formats=(*WEB_FORMATS, *(allow_format or ())),
        client_rate=max_rate,
    )
    for place in runs or ():
        if not place.is_dir():
            raise FileNotFoundError(f"--runs is {str(place)!r}; there is no such folder")
    with server.listen(host, port) as listening:  # before the model is loaded, to report a used port at once
        local = is_loopback(host)
        try:
            opened = Index.open(index, read_only=read_only, device=device)
        except PermissionError as error:
            if read_only:
                raise
            raise PermissionError(f"{index} cannot be written to; serve it with --read-only") from error
        application = create(
            opened,
            name=index.absolute().name,
            runs=runs or (),
            token=token,
            read_only=read_only,
            limits=limits,
            hosts=[*(allow_host or ()), *(() if local else (host, socket.gethostname(), socket.getfqdn()))],
            addresses=not local,
        )
        url = server.url_of(listening, "http" if certificate is None else "https")
        config = server.configure(application, certificate=certificate, key=key, proxy=proxy)
        if access_log is not None:
            server.write_access_log(access_log)

        def started() -> None:
            print(f"{index} is served at {url}  (Ctrl-C stops)", flush=True)
            if not local and certificate is None:
                print("other machines can reach it, without encryption: see docs/serve.md", file=sys.stderr, flush=True)
            if open_page:
                webbrowser.open(server.page_url(url, token))

        server.run(application, config, listening, started=started)
