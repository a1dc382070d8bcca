"""The command line: parses, calls, prints. One file for each command or group of commands.

Bad input ends in one readable line and an exit code other than 0; ``--debug`` shows the traceback.
"""

# Importing a module adds its commands, in the order of `nearfar --help`.
from nearfar.cli import (  # noqa: F401
    bench,
    calibrate,
    data,
    demo,
    embed,
    evaluate,
    export,
    index,
    init,
    losses,
    papers,
    recipe,
    report,
    search,
    serve,
    tournament,
    train,
    tune,
    verify,
    weights,
)
from nearfar.cli.app import app, main

__all__ = ["app", "main"]
