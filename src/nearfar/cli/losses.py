"""The command ``nearfar losses``: list, explain or draw losses."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

import nearfar
from nearfar.cli import complete
from nearfar.cli.app import app
from nearfar.cli.options import Force
from nearfar.cli.output import print_table, say
from nearfar.cli.values import setting
from nearfar.utils.validation import one_of

KINDS = ("weights", "transfer", "ranks")


@app.command(name="losses", short_help="List, explain or draw the losses.")
def list_losses(
    keys: Annotated[
        list[str] | None, Argument(metavar="KEY", help="Losses to explain or draw.", autocompletion=complete.losses)
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
    one_of("--kind", kind, KINDS)
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
        print("\n".join([nearfar.losses.describe(key) for key in keys or nearfar.losses.names()]), end="")
    else:
        rows = [(key, nearfar.losses.summary(key), nearfar.losses.get(key).source) for key in nearfar.losses.names()]
        print_table(("loss", "what it does", "source"), rows)
        say("Formula, settings, reference and example of a loss: nearfar losses KEY; of all: nearfar losses --all")


def _draw(kind: str, keys: list[str] | None, settings: dict[str, object], file: Path, force: bool) -> Path:
    from nearfar import plots

    plots.check_file(file, force=force)
    if kind == "weights":
        chosen = {key: plots.create(key, **settings) for key in keys} if keys else plots.classic()
        return plots.draw_weights(chosen, file, force=force)
    loss = nearfar.losses.create("nra", **settings)
    assert isinstance(loss, nearfar.losses.NRA)
    draw = plots.draw_ranks if kind == "ranks" else plots.draw_transfer
    return draw(loss, file, force=force)
