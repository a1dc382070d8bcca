"""nearfar verify"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from nearfar.cli.app import app
from nearfar.cli.options import Device, Force, Json, Model
from nearfar.cli.output import STDOUT, output_file, print_json, say
from nearfar.utils.formatting import command


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
    if json is not None:
        print_json(json, {"match": match, "similarity": score, "threshold": found.to_json()})
