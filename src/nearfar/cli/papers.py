"""nearfar papers: the tables and figures of the papers, and the commands that make them."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from string import digits as DIGITS
from typing import Annotated

import typer
from typer import Argument, Option

from nearfar.cli.app import HELP, app
from nearfar.cli.output import say

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

    for key, found in groupby(experiments(), key=lambda one: one.document):
        say(f"{document(key)['title']} ({key})")
        for one in found:
            say(f"  {_numbers((one.id, *one.also))}  {one.title}")
            if one.reason is None:
                roots = "".join(f" --data {name}={name.upper()}" for name in one.datasets)
                say(f"      nearfar papers run {one.id}{roots}")
            else:
                say(f"      no command: it {one.reason}")
            if one.result or one.reason is None:
                say(f"      our result: {one.result or 'none yet'}")
    say("Print what one runs: nearfar papers run EXPERIMENT --dry-run")


def _numbers(ids: Sequence[str]) -> str:
    """Ids of one paper in short, such as "thesis:figure3 to figure13, table2"."""
    parts: list[list[str]] = []
    for one in (id.partition(":")[2] for id in ids):
        word, number = one.rstrip(DIGITS), one[len(one.rstrip(DIGITS)) :]
        if parts and number and parts[-1][-1] == f"{word}{int(number) - 1}":
            parts[-1].append(one)
        else:
            parts.append([one])
    texts = [" to ".join((run[0], run[-1])) if len(run) > 2 else ", ".join(run) for run in parts]
    return f"{ids[0].partition(':')[0]}:{', '.join(texts)}"


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

    found = experiment(name)
    roots = {name: name.upper() for name in found.datasets} if dry_run and not data else _roots(found.datasets, data)
    folder = out or Path("papers", found.id.replace(":", "-"))
    commands = found.commands(out=str(folder), data=roots)
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
    found = {}
    for text in given or ():
        name, equals, root = text.partition("=")
        if not equals and len(datasets) == 1:
            name, root = datasets[0], text
        elif not equals:
            raise ValueError(f"--data is {text!r}; needed is NAME=ROOT, with one of {', '.join(datasets) or 'none'}")
        found[name] = root
    return found
