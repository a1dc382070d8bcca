"""The command line: parses, calls, prints. A file for each group of commands.

Bad input ends in one readable line and an exit code other than 0; ``--debug`` shows the traceback.
"""

# Importing a module adds its commands, in the order of `nearfar --help`.
from nearfar.cli import (  # noqa: F401
    bench,
    calibrate,
    data,
    embed,
    evaluate,
    export,
    index,
    papers,
    recipe,
    search,
    serve,
    train,
)
from nearfar.cli.app import app, main

__all__ = ["app", "main"]
