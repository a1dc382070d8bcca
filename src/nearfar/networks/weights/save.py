"""Saves and loads networks: weights as safetensors, and a JSON file that describes the network.

Loading executes no code from the files. The name of a network with published weights stands for a saved network.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from nearfar.networks import registry
from nearfar.networks.backbones.external import LIBRARIES, check_saved, is_file
from nearfar.networks.embedder import Embedder
from nearfar.networks.ensemble import Ensemble
from nearfar.networks.weights.published import local_only
from nearfar.networks.weights.state_dict import check
from nearfar.utils import preprocessing
from nearfar.utils.atomic import read_tensors, tensors_digest, write_json, write_tensors
from nearfar.utils.folders import claim_file
from nearfar.utils.preprocessing import Preprocessing
from nearfar.utils.tensors import shapes_only

NAME = "model.safetensors"
FORMAT = "nearfar model"
VERSION = 1  # increased when older versions cannot read the files

Model = Embedder | Ensemble


def save(model: Model, where: str | Path, *, preprocessing: Preprocessing | None = None, force: bool = False) -> Path:
    """Save a network, for :func:`load`.

    Args:
        model: An embedder or ensemble. The adapters of a peft model, such as LoRA, are merged into a copy of its
            weights, so that loading does not need peft.
        where: A folder, for the files model.safetensors and model.json, or the name of a .safetensors file.
        preprocessing: Preprocessing of images; None for what the network was loaded with, or the default.
        force: Replace files that hold something else.

    Returns:
        The .safetensors file.

    Example:
        >>> import tempfile
        >>> model = registry.create("mlp", in_dim=8, dim=2)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     again = load(save(model, folder))
        >>> describe(again) == describe(model)
        True
    """
    if callable(getattr(model, "merge_and_unload", None)):  # a peft model
        model = copy.deepcopy(model).merge_and_unload()  # type: ignore[operator]
    file = _weights_file(where)
    file.parent.mkdir(parents=True, exist_ok=True)
    header = card(model, preprocessing)
    _check_description(model, header["model"])
    state = {key: tensor.detach().contiguous().cpu() for key, tensor in model.state_dict().items()}
    # The weights file contains the description too, so that mixed-up files are detected.
    file, card_file = (claim_file(each, "model", force=force) for each in (file, file.with_suffix(".json")))
    write_tensors(file, state, header)
    write_json(card_file, header)
    return file


def load(where: str | Path, *, download: bool = False) -> Model:
    """Load a network that :func:`save` wrote, or one with published weights, on the CPU and in evaluation mode.

    Args:
        where: The folder with model.safetensors and model.json, or a .safetensors file with a .json file next to it;
            or the name of a network, see :func:`is_network`, whose embeddings are its pooled features.
        download: Allow to download the weights of a network that is given by name. By default they must be on this
            machine. A saved network never needs it.
    """
    if is_network(where):
        with nullcontext() if download else local_only():
            backbone = registry.create_backbone(str(where), pretrained=True)
        pooling = "token" if backbone.has_token else "avg+max" if backbone.gives_maps else "avg"
        return Embedder(backbone, dim=None, head="none", pooling=pooling).eval()
    file, header = read_card(where)
    model = _build(header["model"], file.with_suffix(".json"))
    state, about = read_tensors(file)
    if about.get("model", header["model"]) != header["model"]:
        raise ValueError(
            f"{file} and {file.with_suffix('.json').name} do not belong together: they describe different networks"
        )
    if unexpected := check(model, str(header["model"].get("name", "ensemble")), state, file):
        raise ValueError(f"{file} has {len(unexpected)} unexpected keys, such as {unexpected[0]}")
    model.load_state_dict(state)
    value = header.get("preprocessing")
    if value is not None:
        vars(model)["preprocessing"] = preprocessing.from_json(value, str(file.with_suffix(".json")))
    return model.eval()


def is_network(where: str | Path) -> bool:
    """Whether this is the name of a network, such as "efficientnet_lite0" or "timm:resnet50", and not a path."""
    name = str(where)
    known = name in registry.names() or name.partition(":")[0] in LIBRARIES or is_file(name)
    return known and not Path(where).exists()


def preprocessing_of(model: Model) -> Preprocessing | None:
    """Return the preprocessing that a network was loaded with, or the default; None if it reads vectors.

    The default resizes the shorter side to 8/7 of the input size and cuts out the center.
    """
    known: Preprocessing | None = vars(model).get("preprocessing")
    size, normalization = model.input_size, model.normalization
    if known is not None or size is None or normalization is None:
        return known
    resize = size if size < preprocessing.SMALL else round(size * 8 / 7)
    return Preprocessing(size=size, resize=resize, normalization=normalization)


def fingerprint(model: Model, given: Preprocessing | None = None) -> str:
    """Return a SHA-256 of the network, its weights and its preprocessing."""
    return tensors_digest(model.state_dict(), json.dumps(card(model, given), sort_keys=True))


def card(model: Model, given: Preprocessing | None = None) -> dict[str, Any]:
    """Return the description that is stored with the weights, a JSON object."""
    used = given or preprocessing_of(model)
    header = {
        "format": FORMAT,
        "version": VERSION,
        "model": describe(model),
        "preprocessing": None if used is None else used.to_json(),
    }
    value: dict[str, Any] = json.loads(json.dumps(header))  # tuples become lists, as in the file
    return value


def describe(model: Model) -> dict[str, Any]:
    """Return the arguments of ``create`` for such a network; for an ensemble, those of all members."""
    if isinstance(model, Ensemble):
        return {"ensemble": [describe(member) for member in model.members], "normalize": model.normalize}
    if not isinstance(model, Embedder):
        raise TypeError(f"model is a {type(model).__name__}; an Embedder or an Ensemble is needed")
    backbone = model.backbone
    if ":" not in backbone.key and backbone.settings.keys() != registry.defaults(backbone.key).keys():
        raise ValueError(f"{backbone.key} cannot be saved: its attribute settings must hold its settings")
    return {
        "name": backbone.key,
        "dim": None if model.head in ("none", "residual") else model.dims[model.levels[0]],
        "pooling": model.pooling,
        "normalize": model.normalize,
        "head": model.head,
        "levels": list(model.levels),
        "freeze_batchnorm": backbone.batchnorm_frozen,
        **backbone.settings,
    }


def read_card(where: str | Path) -> tuple[Path, dict[str, Any]]:
    """Return the weights file and the description next to it."""
    file = _weights_file(where)
    card_file = file.with_suffix(".json")
    if not file.parent.exists():
        raise FileNotFoundError(
            f"{file.parent} does not exist; needed is a folder with {file.name} and {card_file.name}"
        )
    if not file.is_file() and (file.parent / "recipe.toml").is_file():
        raise FileNotFoundError(f"{file.parent} is a run; open its network with nearfar.load({str(file.parent)!r})")
    for each in (file, card_file):
        if not each.is_file():
            raise FileNotFoundError(
                f"{each} does not exist; a saved network consists of {file.name} and {card_file.name}"
            )
    try:
        header = json.loads(card_file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{card_file} is not valid JSON: {error}") from error
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise ValueError(f"{card_file} does not describe a nearfar network: its format is not {FORMAT!r}")
    if header.get("version") != VERSION:
        raise ValueError(
            f"{card_file} is of version {header.get('version')!r}; this version of nearfar reads version {VERSION}: "
            "use the version of nearfar that wrote it, or a newer one"
        )
    if not isinstance(header.get("model"), dict):
        raise ValueError(f"{card_file} does not describe the network: 'model' is missing")
    return file, header


def _weights_file(where: str | Path) -> Path:
    path = Path(where)
    return path if path.suffix == ".safetensors" else path / NAME


def _check_description(model: Model, description: Mapping[str, Any]) -> None:
    """Check that the description of a network creates one of the same shapes: one that was changed cannot be opened."""
    names = [member.backbone.key for member in model.members]
    if any(":" in name and not is_file(name) for name in names):
        return
    with shapes_only():
        networks = model, _build(description, Path(NAME))
    before, after = ({key: tensor.shape for key, tensor in network.state_dict().items()} for network in networks)
    if before != after:
        raise ValueError(f"{' and '.join(names)} cannot be saved: {description} creates a different network")


def _build(arguments: Mapping[str, Any], source: Path) -> Model:
    try:
        if "ensemble" in arguments:
            members = [_build(member, source) for member in arguments["ensemble"]]
            embedders = [member for member in members if isinstance(member, Embedder)]
            return Ensemble(embedders, normalize=arguments["normalize"])
        if "pretrained" in arguments:
            raise TypeError("'pretrained' is not allowed in a saved network")
        if ":" in arguments["name"]:
            check_saved(arguments["name"], arguments)
        with local_only():
            return registry.create(**arguments)
    except Exception as error:  # libraries raise all kinds of exceptions for settings that do not fit
        raise ValueError(f"{source} describes a network that cannot be created: {error}") from error
