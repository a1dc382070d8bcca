"""nearfar export"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from nearfar.cli.app import app


@app.command(name="export", short_help="Write a network for use elsewhere: ONNX or plain weights.")
def export_network(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, or one with model.safetensors.")],
    format: Annotated[str, typer.Option(help="onnx, or safetensors with a .json file beside it.")] = "onnx",
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The file to write; RUN/model.onnx unless given.")
    ] = None,
) -> None:
    """Write a network for use elsewhere. How pictures become its input is written into the file.

    Example: nearfar export runs/birds --format onnx --out birds.onnx
    """
    from nearfar.networks.weights import save
    from nearfar.networks.weights.export import FORMATS, export
    from nearfar.training.api import model_folder
    from nearfar.utils.validation import one_of

    one_of("--format", format, FORMATS)
    if out is None and format == "safetensors":
        raise ValueError("--out is needed for safetensors: RUN holds such files already")
    place = model_folder(run)
    model, used = save.load(place), save.load_preprocessing(place)
    print(f"wrote {export(model, out or run / 'model.onnx', format=format, preprocessing=used)}")
