"""The command line: parses, calls, prints. One file for each command.

Bad input ends in one readable line and an exit code other than 0; ``--debug`` shows the traceback.
"""

# In the order of `nearfar --help`.
from nearfar.cli import demo, train, evaluate, report, losses, export, data, weights  # isort: skip
from nearfar.cli.app import app, main

__all__ = ["app", "data", "demo", "evaluate", "export", "losses", "main", "report", "train", "weights"]
