"""Exports networks as ONNX or as plain weights."""

from __future__ import annotations

import copy
import json
import warnings
from pathlib import Path

import torch

from nearfar.networks.weights import save
from nearfar.networks.weights.save import Model
from nearfar.utils.atomic import whole_file
from nearfar.utils.folders import claim_file
from nearfar.utils.preprocessing import Preprocessing
from nearfar.utils.system import require
from nearfar.utils.validation import one_of

FORMATS = ("onnx", "safetensors")
OPSET = 17


def export(
    model: Model,
    file: str | Path,
    *,
    format: str = "onnx",
    preprocessing: Preprocessing | None = None,
    force: bool = False,
) -> Path:
    """Export a network as ONNX, or as plain weights that ``networks.load`` opens.

    The ONNX model reads normalized ``images`` [b, c, size, size], or ``vectors`` [b, d], for any b and returns
    ``embeddings`` [b, dim]. Its metadata describe the preprocessing of images: ``nearfar.preprocessing`` is the JSON
    object of :class:`~nearfar.utils.preprocessing.Preprocessing`, ``nearfar.model`` the arguments of the network.

    Args:
        model: An embedder or ensemble.
        file: The output file, with the extension .onnx or .safetensors.
        format: "onnx", or "safetensors" (with a .json file next to it that describes the network).
        preprocessing: Preprocessing of images; None for what the network was loaded with, or the default.
        force: Replace files that hold something else.

    Returns:
        The file.
    """
    one_of("format", format, FORMATS)
    path = Path(file)
    if path.suffix != f".{format}":
        raise ValueError(f"file is {path.name!r}; for the format {format} its name must end in .{format}")
    path.parent.mkdir(parents=True, exist_ok=True)
    if format == "safetensors":
        return save.save(model, path, preprocessing=preprocessing, force=force)
    path = claim_file(path, "onnx", force=force)
    return _onnx(model, path, preprocessing or save.preprocessing_of(model))


def _onnx(model: Model, file: Path, used: Preprocessing | None) -> Path:
    onnx = require("export to ONNX", "onnx", "nearfar[export]")
    card = save.card(model, used)
    plain = copy.deepcopy(model).cpu().float().eval()
    reads = "vectors" if used is None else "images"
    with whole_file(file) as draft:
        sides = () if used is None else (used.size, used.size)
        # The tracing exporter is deprecated since PyTorch 2.9, but all versions have it and it needs no other package.
        # Its warnings about comparisons in Python concern the check of the input's shape.
        with warnings.catch_warnings(action="ignore"), torch.no_grad():
            torch.onnx.export(
                plain,
                (torch.zeros(2, model.in_channels, *sides),),  # tracing could specialize a batch of one
                str(draft),
                input_names=[reads],
                output_names=["embeddings"],
                dynamic_axes={reads: {0: "batch"}, "embeddings": {0: "batch"}},
                opset_version=OPSET,
                dynamo=False,
            )
        graph = onnx.load(draft)
        properties = {"nearfar.version": str(card["version"])}
        properties |= {f"nearfar.{name}": json.dumps(card[name]) for name in ("model", "preprocessing")}
        onnx.helper.set_model_props(graph, properties)
        onnx.checker.check_model(graph)
        onnx.save(graph, draft)
    return file
