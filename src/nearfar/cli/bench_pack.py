"""nearfar bench pack"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from nearfar.cli.bench import bench
from nearfar.cli.output import say


@bench.command(name="pack", short_help="Pack the results of a grid into one file.")
def pack_grid(
    grid: Annotated[Path, typer.Argument(metavar="GRID", help="The folder of a grid, such as bench/digits.")],
    out: Annotated[
        Path | None, typer.Option("-o", "--out", metavar="FILE", help="The file to write; GRID.zip by default.")
    ] = None,
) -> None:
    """Pack the run folders of a grid into one zip file that compare, report and tournament read directly.

    The file holds recipes, manifests, metrics, logs and the metrics of each query, without weights and embeddings.

    Example: nearfar bench pack bench/digits --out results/digits.zip
    """
    from nearfar.bench.comparison.packed import SUFFIX, pack

    file = out or grid.with_name(grid.name + SUFFIX)
    count = pack(grid, file)
    say(f"wrote {file} with {count} runs")
