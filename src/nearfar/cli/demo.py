"""nearfar demo: train on some characters, retrieve others."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Option

from nearfar.cli.app import app
from nearfar.cli.options import Seed


@app.command(short_help="Train on some characters, retrieve others.")
def demo(
    losses: Annotated[str, Option(help="Names of losses, separated by commas.")] = "multi_similarity,sup_con,triplet",
    epochs: Annotated[int, Option(help="Epochs of 150 steps for each loss.")] = 2,
    seed: Seed = 0,
    out: Annotated[
        Path | None,
        Option(
            "-o",
            "--out",
            metavar="FOLDER",
            help="Folder for runs and index; by default runs/demo or the next free one.",
        ),
    ] = None,
) -> None:
    """Train on 200 characters and retrieve 200 others: a ranking of losses, a report, and an index to search.

    Example: nearfar demo --losses raw,nra --epochs 1
    """
    from nearfar import demo as characters

    keys = [key.strip() for key in losses.split(",") if key.strip()]
    characters.show(keys, out, epochs=epochs, seed=seed)
