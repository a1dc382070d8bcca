"""nearfar papers: the tables and figures of the papers, and the commands that make them."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from nearfar.cli.app import HELP, app
from nearfar.cli.output import say

papers = typer.Typer(rich_markup_mode=None, context_settings=HELP)
app.add_typer(papers, name="papers", short_help="List the experiments of the papers, or run one.")


@papers.callback(invoke_without_command=True)
def list_experiments(context: typer.Context) -> None:
    """List the tables and figures of the papers, the data they need, and where our result is.

    Example: nearfar papers

    Example: nearfar papers run group:table2 --data cub=CUB_200_2011
    """
    if context.invoked_subcommand is not None:
        return
    from nearfar.bench.papers.experiments import experiments

    for one in experiments():
        state = one.result or (f"none, as it {one.reason}" if one.reason else "none yet")
        needs = f"data: {', '.join(one.datasets)}; " if one.datasets else ""
        say(f"{one.id:22} {one.title}\n{'':22} {needs}our result: {state}")
    say("Print the commands of one: nearfar papers run EXPERIMENT --dry-run")


@papers.command(name="run", short_help="Run the commands of a table or figure.")
def run_experiment(
    name: Annotated[str, Argument(metavar="EXPERIMENT", help="Paper and number, such as group:table2.")],
    data: Annotated[
        list[str] | None,
        Option(metavar="[NAME=]ROOT", help="Location of a dataset; without NAME if the experiment needs only one."),
    ] = None,
    out: Annotated[Path | None, Option(metavar="FOLDER", help="Folder of the results; papers/NAME by default.")] = None,
    dry_run: Annotated[bool, Option("--dry-run", help="Only print the commands.")] = False,
) -> None:
    """Run the commands of a table or figure, those whose data is given, one after the other.

    A command that fails ends the run; its exit code is passed on.

    Example: nearfar papers run group:table2 --data cub=CUB_200_2011

    Example: nearfar papers run nra:figure4 --data MNIST --dry-run
    """
    from nearfar.bench.papers.experiments import experiment

    found = experiment(name)
    roots = {name: name.upper() for name in found.datasets} if dry_run and not data else _roots(found.datasets, data)
    folder = out or Path("papers", name.replace(":", "-"))
    commands = found.commands(out=str(folder), data=roots)
    if not dry_run:
        folder.mkdir(parents=True, exist_ok=True)
    for words in commands:
        say(f"nearfar {shlex.join(words)}")
        if not dry_run:
            code = subprocess.run([sys.executable, "-m", "nearfar", *words], check=False).returncode
            if code:
                raise typer.Exit(code)


def _roots(datasets: tuple[str, ...], given: list[str] | None) -> dict[str, str]:
    """Locations by name of the dataset."""
    found = {}
    for text in given or ():
        name, equals, root = text.partition("=")
        if not equals and len(datasets) == 1:
            name, root = datasets[0], text
        elif not equals:
            raise ValueError(f"--data is {text!r}; needed is NAME=ROOT, with one of {', '.join(datasets) or 'none'}")
        found[name] = root
    return found
