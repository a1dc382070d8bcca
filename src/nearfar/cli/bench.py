"""nearfar bench, tournament, tune and papers: compare losses, search for settings, repeat experiments."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from string import digits as DIGITS
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

import nearfar as nf
from nearfar.cli.app import HELP, app, group
from nearfar.cli.options import (
    Cache,
    ChartFormat,
    Force,
    Format,
    Metric,
    Out,
    Quiet,
    RecipeDevice,
    Roots,
    Runs,
    Settings,
    derived,
    recipe_overrides,
)
from nearfar.cli.output import output_file, print_table, print_text, say
from nearfar.utils.formatting import command
from nearfar.utils.progress import Console, Display, bars
from nearfar.utils.validation import one_of

if TYPE_CHECKING:
    from nearfar.bench.comparison.tables import Table
    from nearfar.bench.grid import Cell
    from nearfar.bench.tuning.results import StudyResults

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

    chosen: dict[str, Any] = {"roots": data or (), "only": only or (), "overrides": settings or ()}
    if dry_run:
        cells = nf.bench.plan(grid, out, **chosen)
        print_table(("cell", "state", "folder"), [(cell.name, cell.state, cell.folder.name) for cell in cells])
        say(f"{len(cells)} cells, folders in {cells[0].folder.parent}")
        return
    display = Display() if quiet else Console()
    try:
        cells = nf.bench.run(grid, out, **chosen, **given, display=display)
    finally:
        display.close()
    _print(cells)
    if not quiet:
        words = command("bench", "compare", cells[0].grid), f", or {command('bench', 'report', cells[0].grid)}"
        say(f"Next: {words[0]}{words[1] if 'test' in cells[0].metrics() else ' --part validation'}")


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
    from nearfar.bench.comparison.folds import FOLDS, concatenated
    from nearfar.utils.validation import one_of

    out = table_file(out, format, runs, force=force)
    finished = nf.bench.find(*runs)
    if one_of("folds", folds, FOLDS) == "concatenated":
        with bars() as watch:
            finished = concatenated(finished, watch=watch)
    show(nf.bench.compare(finished, **given), runs, format, out)


def table_file(out: Path | None, format: str, runs: Sequence[Path], *, force: bool) -> Path | None:
    """The path of a file for a table; only pages and charts say that they are ours."""
    from nearfar.reports.pages import FORMATS

    kinds = {"html": "table", "svg": "chart"}
    return output_file(out, kinds.get(one_of("format", format, (*FORMATS, "svg"))), *runs, force=force)


def show(comparison: object, runs: list[Path], format: str, out: Path | None) -> None:
    """Write a ranking or a tournament, and name unfinished runs; exit code 1 if the comparison is not ranked."""
    from nearfar.reports import charts, leaderboard
    from nearfar.reports.pages import write_table

    assert isinstance(comparison, (nf.bench.Ranking, nf.bench.Tournament))
    if format == "svg" and comparison.ranked:
        chart = (
            leaderboard.ranking_chart(comparison)
            if isinstance(comparison, nf.bench.Ranking)
            else leaderboard.tournament_chart(comparison)
        )
        print_text(out, charts.as_file(chart))
    else:
        print_text(out, write_table(comparison.table, "text" if format == "svg" else format))
    for folder in nf.bench.unfinished(*runs):
        print(f"nearfar: left out {folder}: the run is not finished", file=sys.stderr)
    if not comparison.ranked:
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
    from nearfar.training.run.packed import SUFFIX

    file = out or folder.with_name(folder.name + SUFFIX)
    count = nf.bench.pack(folder, file, **given)
    say(f"wrote {file} with {count} runs")


@bench.command(name="report", short_help="Write a leaderboard page: ranks, charts, curves, time and memory.")
@derived(
    "nearfar.reports.leaderboard:write",
    leave_out=("watch",),
    texts={
        "out": "The page; leaderboard.html in the first folder by default.",
        "title": "The title; the name of the first folder by default.",
        "anyway": "Rank unfair comparisons as well, marked UNFAIR.",
        "other_code": "Accept runs of different code; the reason is printed with the ranking.",
    },
)
def report_runs(places: Runs, **given: Any) -> None:
    """Write a leaderboard of many runs: a single HTML file that needs no network.

    Losses are ranked within each experiment (dataset, network, size, protocol), and only if the runs differ in nothing
    but the loss and its own settings. Otherwise they are listed without ranks, with the reasons.

    Example: nearfar bench report bench/digits -o digits.html
    """
    from nearfar.reports import leaderboard

    with bars() as watch:
        file = leaderboard.write(places, watch=watch, **given)
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

    out = table_file(out, format, runs, force=force)
    show(nf.bench.tournament(nf.bench.find(*runs), **given), runs, format, out)


PAGE = "tuning.html"


@app.command(name="tune", short_help="Search for the best settings of a recipe on its validation classes.")
@derived(
    "nearfar.bench.tuning.tuner:tune",
    positional={"recipe": "RECIPE"},
    leave_out=("overrides", "first", "display", "on_update"),
    texts={
        "recipe": "A recipe with validation classes: TOML file, or name.",
        "space": "Keys to tune and their values: TOML file, or name of a space.",
    },
)
def tune_recipe(
    recipe: Path,
    out: Annotated[
        Path | None,
        Option("-o", "--out", metavar="FOLDER", help="Folder of the results; by default tuning/NAME of the recipe."),
    ] = None,
    settings: Settings = None,
    data: Roots = None,
    device: RecipeDevice = None,
    cache: Cache = None,
    quiet: Quiet = False,
    **given: Any,
) -> None:
    """Search for the best settings of a recipe on its validation classes. The test classes are never used.

    Writes best.toml (a complete recipe), trials.json and tuning.html to OUT. The same command resumes an interrupted
    search, and a larger --trials extends it. With split.name=k_fold, each trial is the mean of all folds. Several
    workers can share a --storage, on one machine or on many.

    Example: nearfar tune digits/proxy_anchor --space proxy_anchor --trials 20 --set
    split.name=fixed_validation --set split.share=0.4 --set sampler.classes=3 --set evaluation.every=1
    """
    from nearfar.bench.tuning import results

    out = out or Path("tuning") / f"{recipe.absolute().parent.name}-{recipe.stem}"
    display = Display() if quiet else Console(bars=None if given["jobs"] == 1 else False)
    overrides = recipe_overrides(settings, data, device)
    try:
        study = nf.bench.tune(
            recipe, out=out, overrides=overrides, cache=cache, display=display, on_update=write_page, **given
        )
    finally:
        display.close()
    best = study.best
    if best is None:
        raise RuntimeError(f"no trial has finished; see {out / results.LIST}")
    say(f"trial {best.number} of {len(study.trials)}: validation {study.plan.metric} {best.value:.4f}")
    say(f"  {results.settings_text(best.values)}")
    say(f"wrote {out / results.BEST} and {out / PAGE}")
    if not quiet:
        say(f"Train the best settings and test them once with: {command('train', out / results.BEST)}")


def write_page(study: StudyResults) -> None:
    """Write the page of a study; workers call this after each trial."""
    from nearfar.reports import tuning_page
    from nearfar.utils.atomic import write_text

    write_text(study.plan.out / PAGE, tuning_page.html(study))


papers = typer.Typer(rich_markup_mode=None, context_settings=HELP)
app.add_typer(papers, name="papers", short_help="List the experiments of the papers, or run one.")


@papers.callback(invoke_without_command=True)
def list_experiments(context: typer.Context) -> None:
    """List the tables and figures of the papers, the command that makes each of them, and where our result is.

    Example: nearfar papers

    Example: nearfar papers run group:table2 --data cub=CUB_200_2011
    """
    if context.invoked_subcommand is not None:
        return
    from itertools import groupby

    from nearfar.bench.papers import document
    from nearfar.bench.papers.experiments import experiments

    for key, of_paper in groupby(experiments(), key=lambda made: made.document):
        say(f"{document(key)['title']} ({key})")
        for made in of_paper:
            say(f"  {_numbers((made.id, *made.also))}  {made.title}")
            if made.reason is None:
                roots = "".join(f" --data {name}={name.upper()}" for name in made.datasets)
                say(f"      nearfar papers run {made.id}{roots}")
            else:
                say(f"      no command: it {made.reason}")
            if made.result or made.reason is None:
                say(f"      our result: {made.result or 'none yet'}")
    say("Print what one runs: nearfar papers run EXPERIMENT --dry-run")


def _numbers(ids: Sequence[str]) -> str:
    """Ids of one paper in short, such as "thesis:figure3 to figure13, table2"."""
    parts: list[list[str]] = []
    for name in (id.partition(":")[2] for id in ids):
        word, number = name.rstrip(DIGITS), name[len(name.rstrip(DIGITS)) :]
        if parts and number and parts[-1][-1] == f"{word}{int(number) - 1}":
            parts[-1].append(name)
        else:
            parts.append([name])
    texts = [" to ".join((run[0], run[-1])) if len(run) > 2 else ", ".join(run) for run in parts]
    return f"{ids[0].partition(':')[0]}:{', '.join(texts)}"


@papers.command(name="table", short_help="Print a published table, or the list of all.")
def print_paper_table(
    name: Annotated[
        str | None, Argument(metavar="[TABLE]", help="Paper and number, such as thesis:7c; without it, all are listed.")
    ] = None,
    format: Format = "text",
    out: Out = None,
    force: Force = False,
) -> None:
    """Print a published table, or the list of all.

    Example: nearfar papers table thesis:7c
    """
    from nearfar.bench.comparison import published

    _print_published(published.catalog() if name is None else published.printed(name), (), format, out, force)


@papers.command(name="compare", short_help="Compare runs with published numbers.")
def compare_with_papers(
    runs: Runs, metric: Metric = "recall@1", format: Format = "text", out: Out = None, force: Force = False
) -> None:
    """Compare runs with the published numbers of the same loss, dataset, network and size.

    Example: nearfar papers compare bench/cub
    """
    from nearfar.bench.comparison import published

    _print_published(published.beside(nf.bench.find(*runs), metric=metric), runs, format, out, force)


def _print_published(table: Table, runs: Sequence[Path], format: str, out: Path | None, force: bool) -> None:
    from nearfar.reports.pages import write_table

    out = output_file(out, "table" if format == "html" else None, *runs, force=force)
    print_text(out, write_table(table, format))


@papers.command(name="run", short_help="Run the commands of a table or figure.")
def run_experiment(
    name: Annotated[str, Argument(metavar="EXPERIMENT", help="Paper and number, such as group:table2.")],
    data: Annotated[
        list[str] | None,
        Option(metavar="[NAME=]ROOT", help="Location of a dataset; without NAME if the experiment needs only one."),
    ] = None,
    out: Annotated[
        Path | None, Option("-o", "--out", metavar="FOLDER", help="Folder of the results; papers/NAME by default.")
    ] = None,
    dry_run: Annotated[bool, Option("--dry-run", help="Only print the commands.")] = False,
) -> None:
    """Run the commands of a table or figure, those whose data is given, one after the other.

    A command that fails ends the run; its exit code is passed on. The same command resumes: finished runs are kept.

    Example: nearfar papers run group:table2 --data cub=CUB_200_2011

    Example: nearfar papers run nra:figure4 --data MNIST --dry-run
    """
    from nearfar.bench.papers.experiments import experiment

    chosen = experiment(name)
    roots = {name: name.upper() for name in chosen.datasets} if dry_run and not data else _roots(chosen.datasets, data)
    folder = out or Path("papers", chosen.id.replace(":", "-"))
    commands = chosen.commands(out=str(folder), data=roots)
    if not dry_run:
        folder.mkdir(parents=True, exist_ok=True)
    for given in commands:
        words = given if dry_run else _resumed(given)
        if words is None:
            say(f"finished already: nearfar {shlex.join(given)}")
            continue
        say(f"nearfar {shlex.join(words)}")
        if not dry_run:
            code = subprocess.run([sys.executable, "-m", "nearfar", *words], check=False).returncode
            if code:
                raise typer.Exit(code)


def _resumed(words: tuple[str, ...]) -> tuple[str, ...] | None:
    """The command, or that which resumes its run; None if the run has finished. Grids and searches resume anyway."""
    from nearfar.training.run.folder import RunFolder

    if words[0] != "train":
        return words
    run = RunFolder(words[words.index("--out") + 1])
    if run.metrics.is_file():
        return None
    return ("train", "--resume", str(run.folder)) if run.recipe.is_file() else words


def _roots(datasets: tuple[str, ...], given: list[str] | None) -> dict[str, str]:
    """Locations by name of the dataset."""
    roots = {}
    for text in given or ():
        name, equals, root = text.partition("=")
        if not equals and len(datasets) == 1:
            name, root = datasets[0], text
        elif not equals:
            raise ValueError(f"--data is {text!r}; needed is NAME=ROOT, with one of {', '.join(datasets) or 'none'}")
        roots[name] = root
    return roots
