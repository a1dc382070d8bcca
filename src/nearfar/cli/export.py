"""The command ``nearfar export``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from typer import Option

from nearfar.cli.app import app
from nearfar.cli.derive import derived
from nearfar.cli.options import Model


@app.command(name="export", short_help="Export a network as ONNX or as plain weights.")
@derived("nearfar.networks.weights.export:export", leave_out=("file", "preprocessing"))
def export_network(
    model: Model,
    format: str,
    out: Annotated[
        Path | None, Option("-o", "--out", metavar="FILE", help="Output file; default: MODEL/model.onnx.")
    ] = None,
    **given: Any,
) -> None:
    """Export a network. The file also describes the preprocessing of images.

    Example: nearfar export runs/birds --format onnx --out birds.onnx
    """
    from nearfar.networks.weights import save
    from nearfar.networks.weights.export import FORMATS
    from nearfar.networks.weights.export import export as write
    from nearfar.training.trainer import open_model
    from nearfar.utils.validation import one_of

    one_of("--format", format, FORMATS)
    if out is None and format == "safetensors":
        raise ValueError("--out is needed for safetensors, as RUN already contains such a file")
    loaded = open_model(model)
    file = out or (model if model.is_dir() else Path()) / "model.onnx"
    written = write(loaded, file, format=format, preprocessing=save.preprocessing_of(loaded), **given)
    print(f"wrote {written}")
