"""nearfar recipe and nearfar losses: list, check and explain recipes and losses."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

import nearfar as nf
from nearfar.cli.app import app, group
from nearfar.cli.options import Force, Settings, complete_losses, complete_recipes
from nearfar.cli.output import STDOUT, output_file, print_json, print_table, say, setting
from nearfar.utils.validation import one_of

recipe = group("recipe", "List, check and complete recipes; print JSON schemas.", example="check mine.toml")

KINDS = ("recipe", "grid", "space")
Kind = Annotated[str, Argument(metavar="[KIND]", help="recipe, grid or space.")]


@recipe.command(name="list", short_help="List the recipes, grids or spaces that come with nearfar.")
def list_recipes(kind: Kind = "recipe") -> None:
    """List the recipes, grids or spaces that come with nearfar. Commands take their names in place of files.

    Example: nearfar recipe list

    Example: nearfar recipe list grid
    """
    from nearfar.utils import shipped

    for name in shipped.names(one_of("KIND", kind, KINDS)):
        say(f"{name:42} {shipped.summary(name, kind)}")
    say(f"The files are in {shipped.folder(kind)}")


@recipe.command(name="check", short_help="Check recipes, grids and spaces, and name every problem.")
def check_recipes(
    files: Annotated[list[Path], Argument(metavar="FILE...", help="TOML files, or run folders.")],
    settings: Settings = None,
) -> None:
    """Check recipes, grids and spaces, and name every problem. The exit code is 1 if any file has one.

    A file with [losses] is a grid, of which the recipes of all cells are checked; a file with ranges or choices is a
    space.

    Example: nearfar recipe check mine.toml grid.toml space.toml
    """
    failed = False
    for file in files:
        try:
            _check(file, settings or ())
        except (ValueError, FileNotFoundError) as error:
            failed = True
            for problem in getattr(error, "problems", (str(error),)):
                say(problem if problem.startswith(str(file)) else f"{file}: {problem}")
        else:
            say(f"{file}: ok")
    if failed:
        raise typer.Exit(1)


def _check(file: Path, overrides: Sequence[str]) -> None:
    from nearfar.bench import grid
    from nearfar.bench.tuning import space
    from nearfar.training.recipe.files import load
    from nearfar.utils.shipped import read

    table = {} if file.is_dir() else read(file, "a recipe, a grid or a space")
    if "losses" in table and "sampler" not in table:
        grid.expand(grid.load(file), overrides=overrides)
    elif space.is_space(table):
        space.load(file)
    else:
        load(file, overrides=overrides)


@recipe.command(name="show", short_help="Print a recipe with the defaults of everything that is not given.")
def show_recipe(
    file: Annotated[
        Path,
        Argument(
            metavar="FILE",
            help="A TOML file, a name of nearfar recipe list, or a run folder.",
            autocompletion=complete_recipes,
        ),
    ],
    settings: Settings = None,
    diff: Annotated[bool, Option("--diff", help="Print only what differs from the base of the recipe.")] = False,
) -> None:
    """Print a complete recipe: with what it has from its base, and with the defaults of everything that is not given.

    Example: nearfar recipe show digits/nra --set loss.alpha=2

    Example: nearfar recipe show sop/ranked_list --diff
    """
    from nearfar.training.recipe.files import changes, load, to_toml

    complete = load(file, overrides=settings or ())
    if not diff:
        print(to_toml(complete), end="")
        return
    for change in changes(file, settings or ()):
        say(change)


@recipe.command(name="schema", short_help="Print the JSON schema of recipes, grids or spaces, for editors.")
def print_schema(
    kind: Kind = "recipe",
    out: Annotated[Path, Option("-o", "--out", metavar="FILE", help="Write it to this file.")] = STDOUT,
    force: Force = False,
) -> None:
    """Print the JSON schema of recipes, grids or spaces, with which editors complete and check them.

    Losses, networks and datasets of files given with --use are included. A file names its schema in its first line:
    #:schema recipe.schema.json

    Example: nearfar recipe schema --out recipe.schema.json
    """
    from nearfar.bench import grid
    from nearfar.bench.tuning import space
    from nearfar.training.recipe import schema

    schemas = {"recipe": schema.json_schema, "grid": grid.json_schema, "space": space.json_schema}
    output_file(out, "schema", force=force)
    print_json(out, schemas[one_of("KIND", kind, KINDS)]())


PLOTS = ("weights", "transfer", "ranks")


@app.command(name="losses", short_help="List, explain or draw the losses.")
def list_losses(
    keys: Annotated[
        list[str] | None, Argument(metavar="KEY", help="Losses to explain or draw.", autocompletion=complete_losses)
    ] = None,
    everything: Annotated[bool, Option("--all", help="Explain all of them.")] = False,
    plot: Annotated[
        Path | None,
        Option(metavar="FILE", help="Draw pair weights, or the plot of --kind, to a .png, .svg or .pdf file."),
    ] = None,
    kind: Annotated[
        str, Option(metavar="KIND", help="The plot: weights, or for nra also transfer or ranks.")
    ] = "weights",
    force: Force = False,
    settings: Annotated[
        list[str] | None, Option("--set", metavar="NAME=VALUE", help="Set a setting of the losses to draw.")
    ] = None,
) -> None:
    """List the losses, explain some of them, or draw their pair weights.

    Example: nearfar losses raw --plot raw.svg --set mining=valid_triplet

    Example: nearfar losses nra --plot ranks.png --kind ranks --set alpha=2
    """
    one_of("--kind", kind, PLOTS)
    if everything and (keys or plot):
        raise ValueError("--all explains every loss; it cannot be combined with KEY or --plot")
    if settings and not (keys and plot):
        raise ValueError("--set needs a loss to draw, as in: nearfar losses raw --plot raw.svg --set alpha=4")
    if kind != "weights" and not (keys == ["nra"] and plot):
        raise ValueError(f"--kind {kind} exists for nra only, as in: nearfar losses nra --plot nra.svg --kind {kind}")
    if plot is not None:
        given = dict(setting(text) for text in settings or ())
        print(f"wrote {_draw(kind, keys, given, plot, force)}")
    elif keys or everything:
        print("\n".join([nf.losses.describe(key) for key in keys or nf.losses.names()]), end="")
    else:
        rows = [(key, nf.losses.summary(key), nf.losses.get(key).source) for key in nf.losses.names()]
        print_table(("loss", "what it does", "source"), rows)
        say("Formula, settings, reference and example of a loss: nearfar losses KEY; of all: nearfar losses --all")


def _draw(kind: str, keys: list[str] | None, settings: dict[str, object], file: Path, force: bool) -> Path:
    nf.plots.check_file(file, force=force)
    if kind == "weights":
        chosen = {key: nf.plots.create(key, **settings) for key in keys} if keys else nf.plots.classic()
        return nf.plots.draw_weights(chosen, file, force=force)
    loss = nf.losses.create("nra", **settings)
    assert isinstance(loss, nf.losses.NRA)
    draw = nf.plots.draw_ranks if kind == "ranks" else nf.plots.draw_transfer
    return draw(loss, file, force=force)
