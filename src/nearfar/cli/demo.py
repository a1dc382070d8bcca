"""nearfar demo"""

from __future__ import annotations

from typing import Annotated

import typer

from nearfar.cli.app import app


@app.command(short_help="Learn some digits, look for others.")
def demo(
    losses: Annotated[
        str, typer.Option(help="Keys of losses, separated by commas.")
    ] = "contrastive,triplet,multi_similarity,ranked_list",
    steps: Annotated[int, typer.Option(help="Training steps for each loss.")] = 400,
    seed: Annotated[int, typer.Option(help="Seed of everything random.")] = 0,
) -> None:
    """Learn embeddings of the digits 0 to 4, look for the unseen digits 5 to 9.

    Example: nearfar demo --losses raw,nra --steps 200
    """
    from nearfar import demo as digits

    keys = [key.strip() for key in losses.split(",") if key.strip()]
    digits.show(keys, steps=steps, seed=seed)
