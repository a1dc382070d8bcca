"""nearfar bench: run a grid, compare its runs, write reports."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nearfar.cli.app import app
from nearfar.cli.output import print_table, say

if TYPE_CHECKING:
    from nearfar.bench.grid.runner import GridResult

bench = typer.Typer(rich_markup_mode=None, context_settings={"help_option_names": ["-h", "--help"]})
app.add_typer(bench, name="bench", short_help="Compare losses fairly: run a grid, rank its runs, write a report.")


@bench.callback(invoke_without_command=True)
def bench_root(context: typer.Context) -> None:
    """Compare losses fairly: run a grid, rank its runs, write a report.

    Example: nearfar bench run recipes/grids/digits.toml
    """
    if context.invoked_subcommand is None:
        print(context.get_help())


@bench.command(name="run", short_help="Train all cells of a grid that are not finished yet.")
def run_grid(
    grid: Annotated[
        Path, typer.Argument(metavar="GRID", help="TOML file of the grid, such as recipes/grids/digits.toml.")
    ],
    out: Annotated[
        Path, typer.Option(metavar="FOLDER", help="Folder that the folder of the grid is created in.")
    ] = Path("bench"),
    engine: Annotated[
        str, typer.Option(help="local (processes), inline (this process; fastest for small cells) or ray.")
    ] = "local",
    jobs: Annotated[
        int | None, typer.Option(metavar="N", help="Cells at a time; by default 1 on the CPU, as many as fit on GPUs.")
    ] = None,
    per_gpu: Annotated[int, typer.Option(metavar="N", help="Cells that share a GPU.")] = 1,
    data: Annotated[
        list[str] | None,
        typer.Option(metavar="[LABEL=]ROOT", help="Location of the data; repeat for several archives or datasets."),
    ] = None,
    device: Annotated[str | None, typer.Option(help="Device: auto, cpu, cuda, cuda:1, …")] = None,
    cache: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Folder of decoded images.")] = None,
    only: Annotated[
        list[str] | None, typer.Option(metavar="LABEL", help="Train only cells with this label; repeatable.")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Change the recipe of every cell; repeatable."),
    ] = None,
    ray_address: Annotated[str | None, typer.Option(metavar="ADDRESS", help="Address of a Ray cluster.")] = None,
    lean: Annotated[
        bool, typer.Option("--lean", help="Delete weights and embeddings of a cell once its metrics are written.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list the cells and their state.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print only the results.")] = False,
) -> None:
    """Train all cells of a grid, each in a process of its own.

    A cell is one run: one loss with one network, dimension, dataset, setting and seed of the grid.

    Finished cells are skipped, and a cell that fails does not stop the others. Ctrl-C saves the running cells and
    stops; the same command resumes.

    Example: nearfar bench run recipes/grids/digits.toml --jobs 2

    Example: nearfar bench run recipes/grids/cub.toml --data CUB_200_2011 --per-gpu 4 --only proxy_anchor
    """
    from nearfar.bench.grid import console, runner
    from nearfar.bench.grid.records import CELLS

    roots, labels, overrides = data or (), only or (), settings or ()
    if dry_run:
        planned = runner.plan(grid, out, roots=roots, only=labels, overrides=overrides)
        print_table(("cell", "state", "folder"), [(one.name, one.state, one.folder.name) for one in planned.records])
        say(f"{len(planned.records)} cells, folders in {planned.folder / CELLS}")
        return
    display = console.create(quiet=quiet)
    try:
        result = runner.run(
            grid,
            out,
            engine=engine,
            jobs=jobs,
            per_gpu=per_gpu,
            device=device,
            cache=cache,
            roots=roots,
            only=labels,
            overrides=overrides,
            ray_address=ray_address,
            lean=lean,
            display=display,
        )
    finally:
        display.close()
    _print(result)


def _print(result: GridResult) -> None:
    """Print the results and exit with the code that fits them."""
    rows = []
    for record in result.records:
        seconds = record.metrics().get("seconds")
        rows.append((record.name, record.score_text() or record.state, "–" if seconds is None else f"{seconds:.1f}"))
    print_table(("cell", "recall@1", "seconds"), rows, right=(1, 2))
    finished, failed = result.in_state("finished"), result.in_state("failed")
    for record in failed:
        say(f"failed: {record.name}: {record.error} ({record.output})")
    if result.in_state("stopped", "new", "begun"):
        say(f"stopped after {len(finished)} of {len(result.records)} cells; resume with the same command")
        raise typer.Exit(130)
    say(f"{len(finished)} of {len(result.records)} cells are finished in {result.folder}")
    if failed:
        raise typer.Exit(1)
