"""nearfar train"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from nearfar.cli.app import app


@app.command(name="train", short_help="Train a recipe, or resume a run.")
def train_recipe(
    recipe: Annotated[
        Path | None, typer.Argument(metavar="[RECIPE]", help="A TOML file; not needed with --resume.")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Change the recipe, as in loss.alpha=32; repeatable."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="The run folder; runs/NAME of the recipe by default.")
    ] = None,
    resume: Annotated[Path | None, typer.Option(metavar="RUN", help="Resume the run in this folder.")] = None,
    data: Annotated[
        list[str] | None, typer.Option(metavar="ROOT", help="Location of the data, data.root; repeat for archives.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="Device: auto, cpu, cuda, cuda:1, …")] = None,
    cache: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Cache of decoded images.")] = None,
    log: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Also log to tensorboard or mlflow; repeatable.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print only the run folder and the metrics.")] = False,
) -> None:
    """Train a recipe and evaluate the model on unseen classes. Ctrl-C saves a checkpoint and stops.

    Example: nearfar train recipes/digits/proxy_anchor.toml --set loss.alpha=16 --out runs/first

    Example: torchrun --nproc-per-node 4 -m nearfar train recipes/cub/fast_proxy_anchor.toml --data CUB_200_2011
    """
    from nearfar.training.api import start
    from nearfar.training.recipe.files import parse_override
    from nearfar.training.run import console

    overrides = dict(map(parse_override, settings or ()))
    if data:
        overrides["data.root"] = data[0] if len(data) == 1 else data
    if device is not None:
        overrides["training.device"] = device
    main = os.environ.get("RANK", "0") == "0"  # only one of several processes prints
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
