"""nearfar train"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from nearfar.cli import complete
from nearfar.cli.app import app
from nearfar.cli.options import Cache, Quiet, RecipeDevice, Roots, Settings, recipe_overrides
from nearfar.cli.output import bad_files
from nearfar.utils.formatting import command


@app.command(name="train", short_help="Train a recipe, or resume a run.")
def train_recipe(
    recipe: Annotated[
        Path | None,
        Argument(
            metavar="[RECIPE]",
            help="A TOML file, or a name of nearfar recipe list; not needed with --resume.",
            autocompletion=complete.recipes,
        ),
    ] = None,
    settings: Settings = None,
    out: Annotated[
        Path | None, Option("-o", "--out", metavar="FOLDER", help="The run folder; runs/NAME of the recipe by default.")
    ] = None,
    resume: Annotated[
        Path | None, Option(metavar="RUN", help="Resume the run in this folder.", autocompletion=complete.runs)
    ] = None,
    data: Roots = None,
    device: RecipeDevice = None,
    cache: Cache = None,
    log: Annotated[
        list[str] | None, Option(metavar="NAME", help="Also log to tensorboard, mlflow or wandb; repeatable.")
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Train a recipe and evaluate the model on unseen classes. Ctrl-C saves a checkpoint and stops.

    Example: nearfar train digits/proxy_anchor --set loss.alpha=16 --out runs/first

    Example: nearfar train folder --data photos/

    Example: torchrun --nproc-per-node 4 -m nearfar train cub/fast_proxy_anchor --data CUB_200_2011
    """
    from nearfar.training.api import start
    from nearfar.training.run import console

    overrides = recipe_overrides(settings, data, device)
    main = os.environ.get("RANK", "0") == "0"  # only one of several processes prints
    display = console.create(quiet=quiet or not main)
    try:
        with bad_files("--set data.on_error=skip"):
            result = start(
                recipe, out=out, resume=resume, overrides=overrides, display=display, loggers=log or (), cache=cache
            )
    finally:
        display.close()
    if main:
        measured = {part: values for part, values in result.metrics.items() if isinstance(values, Mapping)}
        print(f"{result.folder}: {'  '.join(console.shown(measured))}")
        if not quiet:
            report, build = command("report", result.folder), command("index", "build", result.folder)
            print(f"Next: {report}, or {build} IMAGES")
