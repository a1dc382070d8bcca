"""The command line: parses, calls, prints. One file for each command.

Bad input ends in one readable line and an exit code other than 0; ``--debug`` shows the traceback.
"""

# In the order of `nearfar --help`.
from nearfar.cli import (
    bench,
    bench_compare,
    bench_pack,
    bench_report,
    data,
    demo,
    embed,
    evaluate,
    export,
    index,
    losses,
    recipe,
    report,
    search,
    serve,
    tournament,
    train,
    tune,
    weights,
)
from nearfar.cli.app import app, main

__all__ = [
    "app",
    "bench",
    "bench_compare",
    "bench_pack",
    "bench_report",
    "data",
    "demo",
    "embed",
    "evaluate",
    "export",
    "index",
    "losses",
    "main",
    "recipe",
    "report",
    "search",
    "serve",
    "tournament",
    "train",
    "tune",
    "weights",
]
