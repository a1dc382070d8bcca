"""nearfar recipe"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from nearfar.cli import complete
from nearfar.cli.app import group
from nearfar.cli.options import Force, Settings
from nearfar.cli.output import STDOUT, output_file, print_json, say

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
    from nearfar.utils.validation import one_of

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
            autocompletion=complete.recipes,
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
    from nearfar.utils.validation import one_of

    schemas = {"recipe": schema.json_schema, "grid": grid.json_schema, "space": space.json_schema}
    output_file(out, "schema", force=force)
    print_json(out, schemas[one_of("KIND", kind, KINDS)]())
