"""The command line: parses, calls, prints. One file for each command.

Bad input ends in one readable line and an exit code other than 0; ``--debug`` shows the traceback.
"""

# In the order of `nearfar --help`.
from nearfar.cli import demo, train, evaluate, report  # isort: skip
from nearfar.cli import bench, bench_compare, bench_report, tournament, tune  # isort: skip
from nearfar.cli import index, search, embed, serve  # isort: skip
from nearfar.cli import losses, export, data, weights  # isort: skip
from nearfar.cli.app import app, main

__all__ = [
    "app",
    "bench",
    "bench_compare",
    "bench_report",
    "data",
    "demo",
    "embed",
    "evaluate",
    "export",
    "index",
    "losses",
    "main",
    "report",
    "search",
    "serve",
    "tournament",
    "train",
    "tune",
    "weights",
]
