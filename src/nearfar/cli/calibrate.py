"""nearfar calibrate"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Option

from nearfar.cli.app import app
from nearfar.cli.options import Cache, Device, Force, Json, Model, OnError
from nearfar.cli.output import STDOUT, bad_files, output_file, print_json, say
from nearfar.utils.formatting import command
from nearfar.utils.progress import bars


@app.command(name="calibrate", short_help="Choose the similarity from which on two images match.")
def calibrate_model(
    model: Model,
    data: Annotated[
        str | None,
        Option(metavar="NAME:ROOT", help="Labeled images of other classes, as in folder:photos, for validation."),
    ] = None,
    criterion: Annotated[str, Option(help="f1, accuracy, or the highest false accept rate, such as 0.001.")] = "f1",
    index: Annotated[Path | None, Option(metavar="INDEX", help="Store it in this index of MODEL, too.")] = None,
    out: Annotated[
        Path | None,
        Option("-o", "--out", metavar="FILE", help="Write it to this JSON file instead of threshold.json of MODEL."),
    ] = None,
    json: Json = None,
    device: Device = "auto",
    on_error: OnError = None,
    cache: Cache = None,
    force: Force = False,
) -> None:
    """Choose the similarity from which on two images match, on the validation classes of a run.

    It is stored with the run, for verify and for every index that is built with it. Test classes are never used. A
    run without validation classes, or a network, needs --data. A network that is given by name has no folder and needs
    --out.

    Example: nearfar calibrate runs/birds

    Example: nearfar calibrate runs/birds --criterion 0.001 --data folder:more_birds/

    Example: nearfar calibrate efficientnet_lite0 --data folder:birds/ -o birds.json
    """
    from nearfar.search import Index
    from nearfar.training import calibrate

    json = output_file(json, "threshold", model, force=force)
    with bars() as watch:
        chosen = _criterion(criterion)
        with bad_files("--on-error skip"):
            found = calibrate(
                model,
                data,
                criterion=chosen,
                out=out,
                device=device,
                on_error=on_error,
                cache=cache,
                force=force,
                watch=watch,
            )
    if index is not None:
        with Index.open(index, device="cpu") as opened:
            opened.set_threshold(found)
    if json != STDOUT:
        say(found.describe())
        say(f"{found.positives:,} pairs of one class, {found.negatives:,} of two; F1 {found.f1:.3f}")
        where = () if out is None else ("--threshold", out)
        say(f"Compare two images with: {command('verify', model, 'A.jpg', 'B.jpg', *where)}")
    if json is not None:
        print_json(json, found.to_json())


def _criterion(text: str) -> str | float:
    try:
        return float(text)
    except ValueError:
        return text
