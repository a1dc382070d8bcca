"""nearfar train"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from nearfar.cli.app import app


@app.command(name="train", short_help="Train what a recipe says, or go on with a run.")
def train_recipe(
    recipe: Annotated[
        Path | None, typer.Argument(metavar="[RECIPE]", help="A TOML file; may be left out with --resume.")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Change the recipe, as in loss.alpha=32; repeatable."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="The run folder; runs/NAME of the recipe unless told.")
    ] = None,
    resume: Annotated[Path | None, typer.Option(metavar="RUN", help="Go on with the run in this folder.")] = None,
    data: Annotated[
        list[str] | None, typer.Option(metavar="ROOT", help="Where the data lies, data.root; repeat for archives.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="Where to compute: auto, cpu, cuda, cuda:1, …")] = None,
    cache: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Where decoded pictures are kept.")] = None,
    log: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Tell tensorboard or mlflow as well; repeatable.")
    ] = None,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Say only where the run is and what it reached.")
    ] = False,
) -> None:
    """Train what a recipe says, and measure it on classes it has never seen. Ctrl-C saves and stops.

    Example: nearfar train recipes/digits/proxy_anchor.toml --set loss.alpha=16 --out runs/first

    Example: torchrun --nproc-per-node 4 -m nearfar train recipes/cub/fast_proxy_anchor.toml --data CUB_200_2011
    """
    from nearfar.training.api import start
    from nearfar.training.recipe.overrides import parse_override
    from nearfar.training.run import console

    overrides = dict(map(parse_override, settings or ()))
    if data:
        overrides["data.root"] = data[0] if len(data) == 1 else data
    if device is not None:
        overrides["training.device"] = device
    main = os.environ.get("RANK", "0") == "0"  # of many processes one speaks
    display = console.create(quiet=quiet or not main)
    try:
        result = start(
            recipe, out=out, resume=resume, overrides=overrides, display=display, loggers=log or (), cache=cache
        )
    finally:
        display.close()
    if main:
        measured = {part: values for part, values in result.metrics.items() if isinstance(values, Mapping)}
        print(f"{result.folder}: {'  '.join(console.shown(measured))}")
