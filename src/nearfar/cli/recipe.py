"""nearfar recipe"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from nearfar.cli.app import app
from nearfar.cli.output import STDOUT, print_json, say

recipe = typer.Typer(rich_markup_mode=None, context_settings={"help_option_names": ["-h", "--help"]})
app.add_typer(recipe, name="recipe", short_help="Check and complete recipes; print their JSON schema.")

Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Change the recipe, as in loss.alpha=32; repeatable."),
]


@recipe.callback(invoke_without_command=True)
def recipe_root(context: typer.Context) -> None:
    """Check and complete recipes; print their JSON schema.

    Example: nearfar recipe check recipes/folder.toml
    """
    if context.invoked_subcommand is None:
        print(context.get_help())


@recipe.command(name="check", short_help="Check recipes, and name every problem.")
def check_recipes(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="TOML files, or run folders.")],
    settings: Settings = None,
) -> None:
    """Check recipes, and name every problem. The exit code is 1 if any recipe has one.

    Example: nearfar recipe check recipes/folder.toml recipes/digits/nra.toml
    """
    from nearfar.training.recipe.files import RecipeError, load

    failed = False
    for file in files:
        try:
            load(file, overrides=settings or ())
        except (RecipeError, FileNotFoundError) as error:
            failed = True
            for problem in getattr(error, "problems", (str(error),)):
                say(problem if problem.startswith(str(file)) else f"{file}: {problem}")
        else:
            say(f"{file}: ok")
    if failed:
        raise typer.Exit(1)


@recipe.command(name="show", short_help="Print a recipe with the defaults of everything that is not given.")
def show_recipe(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A TOML file, or a run folder.")],
    settings: Settings = None,
) -> None:
    """Print a complete recipe, with the defaults of everything that is not given.

    Example: nearfar recipe show recipes/digits/nra.toml --set loss.alpha=2
    """
    from nearfar.training.recipe.files import load, to_toml

    print(to_toml(load(file, overrides=settings or ())), end="")


@recipe.command(name="schema", short_help="Print the JSON schema of recipes, for editors.")
def print_schema(
    out: Annotated[Path, typer.Option(metavar="FILE", help="Write it to this file.")] = STDOUT,
) -> None:
    """Print the JSON schema of recipes, with which editors complete and check them.

    Losses, networks and datasets of files given with --use are included. A recipe names its schema in its first line:
    #:schema recipe.schema.json

    Example: nearfar recipe schema --out recipe.schema.json
    """
    from nearfar.training.recipe.schema import json_schema

    print_json(out, json_schema())
