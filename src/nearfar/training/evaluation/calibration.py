"""Decision thresholds of trained models, stored beside them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from nearfar import __version__, metrics
from nearfar.metrics import Threshold
from nearfar.networks.weights import save
from nearfar.training.evaluation.evaluate import check_trained, model_embeddings
from nearfar.training.recipe.files import load as load_recipe
from nearfar.training.run.folder import RunFolder
from nearfar.training.run.provenance import now
from nearfar.training.run.reader import read_json
from nearfar.training.trainer import open_model
from nearfar.utils.folders import claim_file
from nearfar.utils.formatting import command
from nearfar.utils.progress import Watch
from nearfar.utils.tensors import as_device


def calibrate(
    where: str | Path,
    data: str | None = None,
    *,
    criterion: str | float = "f1",
    out: str | Path | None = None,
    device: str = "auto",
    on_error: str | None = None,
    cache: str | Path | None = None,
    force: bool = False,
    watch: Watch = lambda work: None,
) -> Threshold:
    """Choose the similarity from which on two images match, and write it to threshold.json in the folder of a model.

    Args:
        where: A run folder, the folder of a saved network, or the name of a network.
        data: Another dataset than the validation classes of the run: "NAME" or "NAME:ROOT", such as folder:photos. The
            model was neither trained nor tested on its classes; its test part is left out.
        criterion: "f1", "accuracy", or the highest false accept rate, such as 0.001.
        out: The JSON file to write instead. The name of a network needs it, since there is no folder.
        device: Where to compute: "auto", "cpu", "cuda", …
        on_error: "skip" leaves out files that cannot be decoded, "fail" raises an error; as in the recipe by default.
        cache: Folder of decoded images; by default $NEARFAR_CACHE or ~/.cache/nearfar.
        force: Replace a file that is no threshold.
        watch: Called when work begins; returns a progress callback.

    Returns:
        The threshold. Its ``about`` names the model and the data, with the facts of the run's manifest.
    """
    run = RunFolder(where)
    check_trained(run.folder)
    if out is None and save.is_network(where):
        raise ValueError(
            f"out is missing; {where} is the name of a network, which has no folder for its threshold: "
            f"{command('calibrate', where, '--data', 'folder:PHOTOS', '--out', 'threshold.json')}"
        )
    file = claim_file(run.threshold if out is None else out, "threshold", force=force)
    place = as_device("device", device)
    found = model_embeddings(
        where, data=data, part="validation", device=place, on_error=on_error, cache=cache, watch=watch
    )
    is_run = run.recipe.is_file()
    measure = load_recipe(run.folder).evaluation.measure if is_run else "cosine"
    threshold = metrics.calibrate(
        found.embeddings, found.labels, criterion=criterion, measure=measure, progress=watch("comparing pairs")
    )
    about: dict[str, Any] = {
        "data": "validation classes" if data is None else _short(data),
        **found.counts(),
        "model": save.fingerprint(open_model(where)),
        "date": now(),
        "nearfar": __version__,
    }
    if is_run:
        manifest = read_json(run.manifest)
        about["run"] = {"name": run.folder.absolute().name} | {
            key: manifest.get(key) for key in ("began", "seed", "selection", "commit")
        }
        about["run"]["data"] = {key: manifest["data"][key] for key in ("name", "fingerprint", "source")}
    threshold = replace(threshold, about=about)
    threshold.save(file, force=force)
    return threshold


def _short(data: str) -> str:
    """The name of a dataset without the path of its folder, since servers publish it."""
    name, _, root = data.partition(":")
    return f"{name}:{Path(root).name}" if root else Path(name).name


def load_threshold(where: str | Path, file: str | Path | None = None) -> Threshold | None:
    """Return the threshold of a model; None if it was not calibrated.

    Args:
        where: A run folder, a folder with a saved network, or the name of a network.
        file: The file that ``calibrate`` wrote with ``out``; None: threshold.json in the folder.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The file is damaged, or the model has changed since it was calibrated.
    """
    if file is None:
        file = RunFolder(where).threshold
        if not file.is_file():
            return None
    elif not Path(file).is_file():
        raise FileNotFoundError(f"{file} does not exist; needed is a threshold written by nearfar calibrate --out")
    found = Threshold.load(file)
    if found.about.get("model") != save.fingerprint(open_model(where)):
        raise ValueError(f"{file} is of another model than {where} holds now; run: {command('calibrate', where)}")
    return found
