"""nearfar demo: train on some digits, retrieve others."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Option

from nearfar.cli.app import app
from nearfar.cli.options import Seed


@app.command(short_help="Train on some digits, retrieve others.")
def demo(
    losses: Annotated[
        str, Option(help="Names of losses, separated by commas.")
    ] = "contrastive,multi_similarity,proxy_anchor",
    epochs: Annotated[int, Option(help="Epochs of 200 steps for each loss.")] = 2,
    seed: Seed = 0,
    out: Annotated[
        Path | None,
        Option(metavar="FOLDER", help="Folder for runs and index; by default runs/demo or the next free one."),
    ] = None,
) -> None:
    """Train on the digits 0 to 4 and retrieve 5 to 9: a ranking of losses, a report, and an index to search.

    Example: nearfar demo --losses raw,nra --epochs 1
    """
    from nearfar import demo as digits

    keys = [key.strip() for key in losses.split(",") if key.strip()]
    digits.show(keys, out, epochs=epochs, seed=seed)
