"""nearfar bench"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nearfar.cli.app import app
from nearfar.cli.output import print_table, say

if TYPE_CHECKING:
    from nearfar.bench.grid.runner import Ran

bench = typer.Typer(rich_markup_mode=None, context_settings={"help_option_names": ["-h", "--help"]})
app.add_typer(bench, name="bench", short_help="Compare losses fairly: run a grid, rank its runs, show them.")


@bench.callback(invoke_without_command=True)
def bench_root(context: typer.Context) -> None:
    """Compare losses fairly: run a grid, rank its runs, show them.

    Example: nearfar bench run recipes/grids/digits.toml
    """
    if context.invoked_subcommand is None:
        print(context.get_help())


@bench.command(name="run", short_help="Train all cells of a grid that are not finished yet.")
def run_grid(
    grid: Annotated[Path, typer.Argument(metavar="GRID", help="A TOML file, such as recipes/grids/digits.toml.")],
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Where the folder of the grid is made.")] = Path("bench"),
    engine: Annotated[
        str, typer.Option(help="local (processes), inline (this process, quickest for small cells) or ray.")
    ] = "local",
    jobs: Annotated[
        int | None, typer.Option(metavar="N", help="Cells at a time; on processors 1, on GPUs as many as fit.")
    ] = None,
    per_gpu: Annotated[int, typer.Option(metavar="N", help="Cells that share a GPU.")] = 1,
    data: Annotated[
        list[str] | None,
        typer.Option(metavar="[LABEL=]ROOT", help="Where the data lies; repeat for archives and data sets."),
    ] = None,
    device: Annotated[str | None, typer.Option(help="Where to compute: auto, cpu, cuda, cuda:1, …")] = None,
    cache: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Where decoded pictures are kept.")] = None,
    only: Annotated[
        list[str] | None, typer.Option(metavar="LABEL", help="Only cells with this label; repeatable.")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Change the recipe of every cell; repeatable."),
    ] = None,
    ray_address: Annotated[str | None, typer.Option(metavar="ADDRESS", help="Of a Ray cluster.")] = None,
    lean: Annotated[
        bool, typer.Option("--lean", help="Throw weights and embeddings of a cell away once its numbers are there.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list the cells and how they stand.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Say only what came out.")] = False,
) -> None:
    """Train all cells of a grid, each in a process of its own. Ctrl-C saves and stops; run it again to go on.

    What is finished is skipped, and a cell that fails does not stop the others.

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
    watcher = console.create(quiet=quiet)
    try:
        ran = runner.run(
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
            watcher=watcher,
        )
    finally:
        watcher.close()
    _tell(ran)


def _tell(ran: Ran) -> None:
    """What came out, and how it ends."""
    rows = []
    for record in ran.records:
        seconds = record.metrics().get("seconds")
        rows.append((record.name, record.told() or record.state, "–" if seconds is None else f"{seconds:.1f}"))
    print_table(("cell", "recall@1", "seconds"), rows, right=(1, 2))
    failed, stopped = ran.having("failed"), ran.having("stopped") + ran.having("new") + ran.having("begun")
    for record in failed:
        say(f"failed: {record.name}: {record.error} ({record.output})")
    if stopped:
        finished = len(ran.having("finished"))
        say(f"stopped after {finished} of {len(ran.records)} cells; the same command goes on with the rest")
        raise typer.Exit(130)
    say(f"{len(ran.having('finished'))} of {len(ran.records)} cells are finished in {ran.folder}")
    if failed:
        raise typer.Exit(1)
