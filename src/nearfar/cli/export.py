"""The command ``nearfar export``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from nearfar.cli.app import app
from nearfar.cli.options import Force


@app.command(name="export", short_help="Export a network as ONNX or as plain weights.")
def export_network(
    run: Annotated[Path, Argument(metavar="RUN", help="A run folder, a folder with model.safetensors, or a network.")],
    format: Annotated[str, Option(help="onnx, or safetensors with a .json file next to it.")] = "onnx",
    out: Annotated[
        Path | None, Option("-o", "--out", metavar="FILE", help="Output file; default: RUN/model.onnx.")
    ] = None,
    force: Force = False,
) -> None:
    """Export a network. The file also describes the preprocessing of images.

    Example: nearfar export runs/birds --format onnx --out birds.onnx
    """
    from nearfar.networks.weights import save
    from nearfar.networks.weights.export import FORMATS, export
    from nearfar.training.api import open_model
    from nearfar.utils.validation import one_of

    one_of("--format", format, FORMATS)
    if out is None and format == "safetensors":
        raise ValueError("--out is needed for safetensors, as RUN already contains such a file")
    model = open_model(run)
    file = out or (run if run.is_dir() else Path()) / "model.onnx"
    written = export(model, file, format=format, preprocessing=save.preprocessing_of(model), force=force)
    print(f"wrote {written}")
