"""nearfar bench, tournament and tune: compare losses, and search for settings."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from nearfar.cli import complete
from nearfar.cli.app import app, group
from nearfar.cli.derive import derived
from nearfar.cli.options import (
    Anyway,
    Cache,
    ChartFormat,
    Force,
    Metric,
    OtherCode,
    Out,
    Quiet,
    RecipeDevice,
    Roots,
    Runs,
    Seed,
    Settings,
    recipe_overrides,
)
from nearfar.cli.output import output_file, print_table, print_text, say
from nearfar.utils.formatting import command
from nearfar.utils.progress import Console, Display, bars
from nearfar.utils.validation import one_of

if TYPE_CHECKING:
    from nearfar.bench.grid import Cell
    from nearfar.bench.tuning.results import StudyResults
    from nearfar.bench.tuning.tuner import TuningPlan

bench = group(
    "bench",
    "Compare losses fairly: run a grid, rank its runs, write a report.",
    example="run digits",
)


@bench.command(name="run", short_help="Train all cells of a grid that are not finished yet.")
@derived("nearfar.bench.runner:run", positional={"grid": "GRID"}, leave_out=("roots", "overrides", "display"))
def run_grid(
    grid: Path,
    out: Annotated[
        Path, Option("-o", "--out", metavar="FOLDER", help="Folder that the folder of the grid is created in.")
    ] = Path("bench"),
    data: Annotated[
        list[str] | None,
        Option(metavar="[LABEL=]ROOT", help="Location of the data; repeat for several archives or datasets."),
    ] = None,
    only: Annotated[
        list[str] | None, Option(metavar="LABEL", help="Train only cells with this label; repeatable.")
    ] = None,
    settings: Settings = None,
    dry_run: Annotated[bool, Option("--dry-run", help="Only list the cells and their state.")] = False,
    quiet: Quiet = False,
    **given: Any,
) -> None:
    """Train all cells of a grid, each in a process of its own.

    A cell is one run: one loss with one network, dimension, dataset, setting and seed of the grid.

    Finished cells are skipped if their data and code are the present ones. Damaged metrics are measured again from the
    checkpoint; a cell with more damage is moved to NAME.damaged-1 and trained again. A cell that fails does not stop
    the others. Ctrl-C saves the running cells and stops; the same command resumes.

    Example: nearfar bench run digits --jobs 2

    Example: nearfar bench run cub --data CUB_200_2011 --per-gpu 4 --only proxy_anchor
    """
    from nearfar.bench import display as displays
    from nearfar.bench import plan, run

    chosen: dict[str, Any] = {"roots": data or (), "only": only or (), "overrides": settings or ()}
    if dry_run:
        cells = plan(grid, out, **chosen)
        print_table(("cell", "state", "folder"), [(cell.name, cell.state, cell.folder.name) for cell in cells])
        say(f"{len(cells)} cells, folders in {cells[0].folder.parent}")
        return
    display = displays.create(quiet=quiet)
    try:
        cells = run(grid, out, **chosen, **given, display=display)
    finally:
        display.close()
    _print(cells)
    if not quiet:
        say(f"Next: {command('bench', 'compare', cells[0].grid)}, or {command('bench', 'report', cells[0].grid)}")


def _print(cells: list[Cell]) -> None:
    """Print the results and exit with the code that fits them."""
    rows = []
    for cell in cells:
        seconds = cell.metrics().get("seconds")
        rows.append((cell.name, cell.score_text() or cell.state, "–" if seconds is None else f"{seconds:.1f}"))
    print_table(("cell", "recall@1", "seconds"), rows, right=(1, 2))
    finished = sum(cell.state == "finished" for cell in cells)
    failed = [cell for cell in cells if cell.state == "failed"]
    for cell in failed:
        say(f"failed: {cell.name}: {cell.error} ({cell.output})")
    if finished + len(failed) < len(cells):
        say(f"stopped after {finished} of {len(cells)} cells; resume with the same command")
        raise typer.Exit(130)
    say(f"{finished} of {len(cells)} cells are finished in {cells[0].grid}")
    if failed:
        raise typer.Exit(1)


@bench.command(name="compare", short_help="Rank losses, if their runs differ in the loss alone.")
@derived("nearfar.bench.comparison.ranking:compare", leave_out=("intervals",))
def compare_runs(
    runs: Runs,
    folds: Annotated[
        str, Option(help="Folds of a seed: separated (the mean of their tests), or concatenated (their embeddings).")
    ] = "separated",
    format: ChartFormat = "text",
    out: Out = None,
    force: Force = False,
    **given: Any,
) -> None:
    """Rank losses by a metric of the test classes. Runs that differ only in seed or fold make one row.

    Losses that cannot be told apart share a rank. That takes at least three seeds and five test classes; with fewer,
    the table has neither ranks nor p-values, and says why.

    If runs differ in more than the loss and its own settings, the table is printed without ranks, with the differences
    that make the comparison unfair, and the exit code is 1. --anyway ranks them and marks the table UNFAIR.

    Example: nearfar bench compare bench/digits

    Example: nearfar bench compare runs/one runs/two --metric map@r --format latex -o table.tex

    Example: nearfar bench compare docs/results/cub_mining.zip --part validation

    Example: nearfar bench compare docs/results/cub.zip --format svg -o cub.svg

    Example: nearfar bench compare bench/digits bench/more --other-code "only the search page changed"
    """
    from nearfar.bench import find
    from nearfar.bench.comparison.folds import FOLDS, concatenated
    from nearfar.bench.comparison.ranking import compare
    from nearfar.utils.validation import one_of

    out = table_file(out, format, runs, force=force)
    found = find(*runs)
    if one_of("folds", folds, FOLDS) == "concatenated":
        with bars() as watch:
            found = concatenated(found, watch=watch)
    show(compare(found, **given), runs, format, out)


def table_file(out: Path | None, format: str, runs: Sequence[Path], *, force: bool) -> Path | None:
    """The path of a file for a table; only pages and charts say that they are ours."""
    from nearfar.reports.table_page import FORMATS

    kinds = {"html": "table", "svg": "chart"}
    return output_file(out, kinds.get(one_of("format", format, (*FORMATS, "svg"))), *runs, force=force)


def show(found: object, runs: list[Path], format: str, out: Path | None) -> None:
    """Write a ranking or a tournament, and name unfinished runs; exit code 1 if the comparison is not ranked."""
    from nearfar.bench import unfinished
    from nearfar.bench.comparison.ranking import Ranking
    from nearfar.bench.comparison.tournament import Tournament
    from nearfar.reports import charts, leaderboard
    from nearfar.reports.table_page import write

    assert isinstance(found, (Ranking, Tournament))
    if format == "svg" and found.ranked:
        chart = leaderboard.ranking_chart(found) if isinstance(found, Ranking) else leaderboard.tournament_chart(found)
        print_text(out, charts.as_file(chart))
    else:
        print_text(out, write(found.table, "text" if format == "svg" else format))
    for folder in unfinished(*runs):
        print(f"nearfar: left out {folder}: the run is not finished", file=sys.stderr)
    if not found.ranked:
        print("nearfar: not ranked, as the comparison is unfair; --anyway ranks it nevertheless", file=sys.stderr)
        raise typer.Exit(1)


@bench.command(name="pack", short_help="Pack the results of a grid into one file.")
@derived("nearfar.training.run.packed:pack", positional={"folder": "GRID"})
def pack_grid(
    folder: Path,
    out: Annotated[
        Path | None, Option("-o", "--out", metavar="FILE", help="The file to write; GRID.zip by default.")
    ] = None,
    **given: Any,
) -> None:
    """Pack the run folders of a grid into one zip file that compare, report and tournament read directly.

    The file holds recipes, manifests, metrics, logs and the metrics of each query, without weights and embeddings.

    Example: nearfar bench pack bench/digits --out results/digits.zip
    """
    from nearfar.training.run.packed import SUFFIX, pack

    file = out or folder.with_name(folder.name + SUFFIX)
    count = pack(folder, file, **given)
    say(f"wrote {file} with {count} runs")


@bench.command(name="report", short_help="Write a leaderboard page: ranks, charts, curves, time and memory.")
def report_runs(
    places: Runs,
    out: Annotated[
        Path | None,
        Option("-o", "--out", metavar="FILE", help="The page; leaderboard.html in the first folder by default."),
    ] = None,
    title: Annotated[str | None, Option(help="The title; the name of the first folder by default.")] = None,
    metric: Metric = "recall@1",
    anyway: Anyway = False,
    other_code: OtherCode = None,
    force: Force = False,
) -> None:
    """Write a leaderboard of many runs: a single HTML file that needs no network.

    Losses are ranked within each experiment (dataset, network, size, protocol), and only if the runs differ in nothing
    but the loss and its own settings. Otherwise they are listed without ranks, with the reasons.

    Example: nearfar bench report bench/digits -o digits.html
    """
    from nearfar.reports import leaderboard

    with bars() as watch:
        file = leaderboard.write(
            places,
            out,
            title=title,
            metric=metric,
            anyway=anyway,
            other_code=other_code,
            force=force,
            watch=watch,
        )
    say(f"wrote {file}")


@app.command(name="tournament", short_help="Rank losses over many experiments and datasets.")
@derived("nearfar.bench.comparison.tournament:tournament", leave_out=("entries", "data"))
def hold_tournament(
    runs: Runs, format: ChartFormat = "text", out: Out = None, force: Force = False, **given: Any
) -> None:
    """Rank losses in each experiment (dataset, network, size of the embedding) and average their ranks.

    Each experiment has to be fair by itself. Scores are means over seeds and folds. Equal scores share the middle of
    their ranks. The Friedman test and the critical difference of Nemenyi are over datasets: experiments on one dataset
    are averaged first. "beats" and "loses" count significant differences within experiments.

    Example: nearfar tournament bench/digits

    Example: nearfar tournament bench/cub bench/cars196 bench/sop --format svg -o ranks.svg

    Example: nearfar tournament bench/cub bench/cub_dims --style thesis --format csv -o tournament.csv
    """
    from nearfar.bench import find
    from nearfar.bench.comparison.tournament import tournament

    out = table_file(out, format, runs, force=force)
    show(tournament(find(*runs), **given), runs, format, out)


PAGE = "tuning.html"


@app.command(name="tune", short_help="Search for the best settings of a recipe on its validation classes.")
def tune_recipe(
    recipe: Annotated[
        Path,
        Argument(
            metavar="RECIPE",
            help="A recipe with validation classes: TOML file, or name.",
            autocompletion=complete.recipes,
        ),
    ],
    space: Annotated[
        Path,
        Option(
            metavar="SPACE",
            help="Keys to tune and their values: TOML file, or name of a space.",
            autocompletion=complete.spaces,
        ),
    ],
    trials: Annotated[
        int | None,
        Option(metavar="N", help="Number of trials, including earlier ones; by default 50, or all of a grid."),
    ] = None,
    sampler: Annotated[
        str, Option(help="tpe, random, grid (every combination) or in_turn (one key after the other).")
    ] = "tpe",
    storage: Annotated[
        str | None,
        Option(metavar="URL", help="Database that workers share, such as postgresql://…; by default SQLite in OUT."),
    ] = None,
    study: Annotated[
        str | None, Option(metavar="NAME", help="Name of the study in the database; by default that of OUT.")
    ] = None,
    jobs: Annotated[int, Option(metavar="N", help="Trials at a time, each in a process of its own.")] = 1,
    out: Annotated[
        Path | None,
        Option("-o", "--out", metavar="FOLDER", help="Folder of the results; by default tuning/NAME of the recipe."),
    ] = None,
    settings: Settings = None,
    data: Roots = None,
    device: RecipeDevice = None,
    cache: Cache = None,
    prune: Annotated[
        bool | None,
        Option(
            "--prune/--no-prune",
            help="End trials early that are worse than the median of the others; default: unless --sampler in_turn.",
        ),
    ] = None,
    keep: Annotated[bool, Option("--keep", help="Keep all files of the trials, including checkpoints.")] = False,
    seed: Seed = 0,
    quiet: Quiet = False,
) -> None:
    """Search for the best settings of a recipe on its validation classes. The test classes are never used.

    Writes best.toml (a complete recipe), trials.json and tuning.html to OUT. The same command resumes an interrupted
    search, and a larger --trials extends it. With split.name=k_fold, each trial is the mean of all folds. Several
    workers can share a --storage, on one machine or on many.

    Example: nearfar tune digits/proxy_anchor --space proxy_anchor --trials 20 --set
    split.name=fixed_validation --set split.share=0.4 --set sampler.classes=3 --set evaluation.every=1
    """
    from nearfar.bench.tuning import results, tuner, workers

    overrides = recipe_overrides(settings, data, device)
    plan = tuner.plan(
        recipe,
        space,
        out or Path("tuning") / f"{recipe.absolute().parent.name}-{recipe.stem}",
        sampler=sampler,
        trials=trials,
        storage=storage,
        study=study,
        prune=prune,
        keep=keep,
        seed=seed,
        cache=cache,
        overrides=overrides,
    )
    display = Display() if quiet else Console(bars=None if jobs == 1 else False)
    if plan.prune and plan.recipe.evaluation.every == 0:
        display.say("evaluation.every is 0, so no trial can be pruned; --set evaluation.every=1 evaluates every epoch")
    try:
        found = workers.run(plan, jobs=jobs, display=display, on_update=write_page)
    finally:
        display.close()
    best = found.best
    if best is None:
        raise RuntimeError(f"no trial has finished; see {plan.out / results.LIST}")
    say(f"trial {best.number} of {len(found.trials)}: validation {found.metric} {best.value:.4f}")
    say(f"  {results.settings_text(best.values)}")
    say(f"wrote {plan.out / results.BEST} and {plan.out / PAGE}")
    if not quiet:
        say(f"Train the best settings and test them once with: {command('train', plan.out / results.BEST)}")


def write_page(plan: TuningPlan, found: StudyResults) -> None:
    """Write the page of a study; workers call this after each trial."""
    from nearfar.reports import tuning_page
    from nearfar.utils.atomic import write_text

    write_text(plan.out / PAGE, tuning_page.html(found, plan.space, title=plan.study, sampler=plan.sampler))
