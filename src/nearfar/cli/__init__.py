"""The command line: parses, calls, prints. A file for each group of commands.

Bad input ends in one readable line and an exit code other than 0; ``--debug`` shows the traceback.
"""

# Importing a module adds its commands.
from nearfar.cli import bench, data, recipe, search, serve, train  # noqa: F401
from nearfar.cli.app import app, main

__all__ = ["app", "main"]
