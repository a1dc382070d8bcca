"""nearfar calibrate"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from typer import Option

from nearfar.cli.app import app
from nearfar.cli.derive import derived
from nearfar.cli.options import Json
from nearfar.cli.output import STDOUT, bad_files, output_file, print_json, say
from nearfar.utils.formatting import command
from nearfar.utils.progress import bars


@app.command(name="calibrate", short_help="Choose the similarity from which on two images match.")
@derived("nearfar.training.evaluation.calibration:calibrate", positional={"where": "MODEL"}, leave_out=("watch",))
def calibrate_model(
    where: Path,
    criterion: str,
    force: bool,
    index: Annotated[Path | None, Option(metavar="INDEX", help="Store it in this index of MODEL, too.")] = None,
    json: Json = None,
    **given: Any,
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

    json = output_file(json, "threshold", where, force=force)
    with bars() as watch, bad_files("--on-error skip"):
        found = calibrate(where, criterion=_criterion(criterion), force=force, watch=watch, **given)
    if index is not None:
        with Index.open(index, device="cpu") as opened:
            opened.set_threshold(found)
    if json != STDOUT:
        say(found.describe())
        say(f"{found.positives:,} pairs of one class, {found.negatives:,} of two; F1 {found.f1:.3f}")
        written = ("--threshold", given["out"]) if "out" in given else ()
        say(f"Compare two images with: {command('verify', where, 'A.jpg', 'B.jpg', *written)}")
    if json is not None:
        print_json(json, found.to_json())


def _criterion(text: str) -> str | float:
    try:
        return float(text)
    except ValueError:
        return text
