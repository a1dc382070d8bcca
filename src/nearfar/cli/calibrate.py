"""nearfar calibrate and nearfar verify: the similarity from which on two images match."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from nearfar.cli.app import app
from nearfar.cli.derive import derived
from nearfar.cli.options import Device, Force, Json, Model
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
    print_json(json, found.to_json())


def _criterion(text: str) -> str | float:
    try:
        return float(text)
    except ValueError:
        return text


@app.command(name="verify", short_help="Decide whether two images are of one class.")
def verify_images(
    model: Model,
    one: Annotated[Path, Argument(metavar="A", help="An image.")],
    other: Annotated[Path | None, Argument(metavar="B", help="Another image.", show_default=False)] = None,
    threshold: Annotated[
        Path | None, Option(metavar="FILE", help="What calibrate --out wrote; default: the threshold of MODEL.")
    ] = None,
    json: Json = None,
    force: Force = False,
    device: Device = "auto",
) -> None:
    """Decide whether two images are of one class: match or no match, with the error rates of the decision.

    The threshold is that of: nearfar calibrate MODEL

    Example: nearfar verify runs/birds A.jpg B.jpg
    """
    from nearfar.data.store.decode import BadImage
    from nearfar.networks.weights.save import is_network
    from nearfar.search.encoder import Encoder
    from nearfar.training import load, load_threshold

    if other is None:
        raise ValueError("B is missing; the form is: nearfar verify MODEL A B, with a calibrated model and two images")
    json = output_file(json, "verification", one, other, threshold, force=force)
    found = load_threshold(model, threshold)
    if found is None:
        if not is_network(model):
            raise ValueError(f"{model} has no threshold; choose one with: {command('calibrate', model)}")
        written = command("calibrate", model, "--data", "folder:PHOTOS", "--out", "threshold.json")
        raise ValueError(f"--threshold is missing; {model} is the name of a network; write one with: {written}")
    encoder = Encoder(load(model), device=device)
    vectors = []
    for file in (one, other):
        try:
            vectors.append(encoder.encode([file])[0])
        except BadImage as error:
            raise BadImage(f"{file}: {error}") from None
    score = found.score(*vectors)
    match = found.matches(score)
    if json != STDOUT:
        say(f"{'match' if match else 'no match'}: similarity {score:.4f}")
        say(found.describe())
    print_json(json, {"match": match, "similarity": score, "threshold": found.to_json()})
