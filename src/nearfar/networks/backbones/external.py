"""Backbones of other libraries, if installed: ``timm:NAME``, ``torchvision:NAME``, ``transformers:NAME``.

A saved network is created from the name of an architecture that the installed library has, and from plain settings. Its
description cannot name a place to load from.
"""

from __future__ import annotations

import inspect
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nearfar.networks.backbones.base import Backbone
from nearfar.networks.embedder import Embedder
from nearfar.networks.weights import published
from nearfar.networks.weights.state_dict import load_into
from nearfar.utils import plugins
from nearfar.utils.preprocessing import IMAGENET, MINUS_ONE_TO_ONE, Normalization
from nearfar.utils.system import expanded, require
from nearfar.utils.validation import check_settings, whole

Pretrained = bool | str | Path

# Prefixes of the keys of classifiers in all libraries.
CLASSIFIERS = ("fc.", "classifier.", "head.", "heads.", "last_linear.", "aux1.", "aux2.", "AuxLogits.", "head_dist.")
# Parts of torchvision's networks after the last map, or auxiliary ones.
AFTER_LAST_MAP = ("avgpool", "dropout", "flatten", "fc", "classifier", "head", "aux1", "aux2", "AuxLogits")
# These convert ImageNet's normalization to pixels from −1 to 1; here they read the latter directly.
FROM_TENSORFLOW = {"googlenet", "inception_v3"}
# Arguments of timm.create_model that cannot be set, and why.
UNSUPPORTED = {
    "num_classes": "there is no classifier",
    "global_pool": "use pooling",
    "features_only": "use levels",
    "in_chans": "images have three channels",
    "checkpoint_path": "pass the file as pretrained",
    "pretrained_cfg": "use pretrained",
    "pretrained_cfg_overlay": "use pretrained",
    "cache_dir": "use pretrained",
}
ARCHITECTURE = re.compile(r"[\w.-]+")  # without a colon or slash: of the library, and neither a repository nor a path
REPOSITORY = re.compile(r"[\w.-]+(/[\w.-]+)?")
# Parts of a configuration of transformers that are not of its architecture.
OTHER_PARTS = {"architectures", "dtype", "torch_dtype", "id2label", "label2id", "transformers_version", "return_dict"}


def create(name: str, *, pretrained: Pretrained = False, settings: Mapping[str, Any]) -> Backbone:
    """Create a backbone by "library:name".

    Args:
        name: "timm:NAME", "torchvision:NAME" or "transformers:NAME".
        pretrained: True for the weights of the library, or a file with its state-dict keys.
        settings: Arguments of ``timm.create_model``; of a saved network of transformers, its configuration.
    """
    library, _, rest = name.partition(":")
    if is_file(name):
        backbone: Adapter = _of_file(name, _plain(name, settings))
    else:
        if library not in _FACTORIES:
            raise ValueError(f"network is {name!r}; allowed before the colon are {', '.join(_FACTORIES)}, FILE.py")
        if not rest:
            raise ValueError(f"network is {name!r}; a name must follow, as in {library}:resnet50")
        allowed = {"config", "processor"} if library == "transformers" else set()
        if library != "timm" and settings.keys() not in (set(), allowed):
            raise TypeError(f"{name} has no setting {next(iter(settings))!r}; it has none")
        given = _plain(name, settings)
        backbone = _FACTORIES[library](require(name, library, library), name, rest, pretrained is True, given)
    if isinstance(pretrained, str | Path):
        load_into(backbone.model, name, expanded(pretrained), CLASSIFIERS)
    return backbone


def check_saved(name: str, settings: Mapping[str, Any]) -> None:
    """Raise ValueError unless the description of a saved network is data alone, from which nothing has to be loaded."""
    library, _, rest = name.partition(":")
    if not (REPOSITORY if library == "transformers" else ARCHITECTURE).fullmatch(rest):
        raise ValueError(f"network is {name!r}, which is not the name of an architecture")
    if is_file(name) and "digest" not in settings:
        raise ValueError(f"the digest of {name} is missing")
    if library == "transformers" and "config" not in settings:
        raise ValueError(f"the configuration of {name} is missing")


def _plain(name: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings as JSON stores them, so that a saved network is created in the same way."""
    for key, value in settings.items():
        if key in UNSUPPORTED:
            raise TypeError(f"{name} has no setting {key!r}: {UNSUPPORTED[key]}")
        if not _is_plain(value):
            raise TypeError(f"{key} of {name} is {value!r}; allowed are numbers, words and lists of them")
    plain: dict[str, Any] = json.loads(json.dumps(dict(settings)))
    return plain


def _is_plain(value: Any) -> bool:
    """Return whether a value consists of finite numbers and of words, which cannot be paths or addresses."""
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _is_plain(part) for key, part in value.items())
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    if isinstance(value, str):
        return ARCHITECTURE.fullmatch(value) is not None
    return value is None or (isinstance(value, int | float) and math.isfinite(value))


class Adapter(Backbone):
    """A network of another library as a backbone. Its levels are found by a forward pass.

    The patch tokens of a transformer become a map [b, c, n, 1], without class and register tokens. If the library
    declares a class token, :meth:`token` returns it.
    """

    ignored_keys = CLASSIFIERS
    model: nn.Module

    def __init__(self, key: str, model: nn.Module, normalization: Normalization, input_size: int) -> None:
        super().__init__()
        self.key = key  # type: ignore[misc]  # elsewhere a class attribute
        self.model = model
        self.normalization, self.input_size = normalization, input_size
        self.prefix = 0
        self.channels = {level: features.shape[1] for level, features in self._try().items()}
        self.has_token = self.prefix > 0 and self.declares_token()

    def raw(self, x: Tensor) -> dict[str, Tensor]:
        """Return the maps [b, c, h, w] or tokens [b, n, c] of each level."""
        raise NotImplementedError

    def maps(self, x: Tensor) -> dict[str, Tensor]:
        return {level: self._map(features) for level, features in self.raw(x).items()}

    def declares_token(self) -> bool:
        """Return whether the network declares that its first token is a class token."""
        return False

    def token(self, x: Tensor) -> Tensor:
        return self.raw(x)["high"][:, 0]

    def _map(self, features: Tensor) -> Tensor:
        return features[:, self.prefix :].transpose(1, 2).unsqueeze(3) if features.ndim == 3 else features

    def _try(self) -> dict[str, Tensor]:
        was, size = self.model.training, self.input_size or 224
        self.model.eval()
        with torch.no_grad():
            # Zeros on the device of the parameters, which may be a GPU or "meta".
            features = self.raw(next(self.model.parameters()).new_zeros(1, self.in_channels, size, size))
        self.model.train(was)
        tokens = features["high"].shape[1] if features["high"].ndim == 3 else 0
        # A square image has a square number of patches; the tokens before them are the rest, unless the network says.
        declared = getattr(self.model, "num_prefix_tokens", None)
        self.prefix = declared if tokens and isinstance(declared, int) else tokens - math.isqrt(tokens) ** 2
        return {level: self._map(values) for level, values in features.items()}


# --- timm ----------------------------------------------------------------------------------------------------


class Timm(Adapter):
    """A network of timm, through ``forward_features`` and ``forward_intermediates``."""

    def raw(self, x: Tensor) -> dict[str, Tensor]:
        model: Any = self.model
        places = self._places()
        if not places:
            return {"high": self._channels_first(model.forward_features(x))}
        high, (low, mid) = model.forward_intermediates(x, indices=places, output_fmt="NCHW")
        return {"low": low, "mid": mid, "high": self._channels_first(high)}

    def declares_token(self) -> bool:
        return getattr(self.model, "cls_token", None) is not None

    def _places(self) -> list[int]:
        """Return the stages of strides 8 and 16; of equal blocks, those after one and two thirds."""
        stages = len(getattr(self.model, "feature_info", ()))
        if stages < 3 or not hasattr(self.model, "forward_intermediates"):
            return []
        return [stages - 3, stages - 2] if stages <= 5 else [stages // 3 - 1, 2 * stages // 3 - 1]

    def _channels_first(self, features: Tensor) -> Tensor:
        last = getattr(self.model, "output_fmt", "NCHW") == "NHWC"
        return features.permute(0, 3, 1, 2) if last and features.ndim == 4 else features


def _timm(timm: Any, key: str, name: str, pretrained: bool, settings: Mapping[str, Any]) -> Adapter:
    side = _img_side(key, settings.get("img_size"))
    if published.is_local_only() and (pretrained or not ARCHITECTURE.fullmatch(name)):
        raise ValueError(f"{key} would be downloaded; --download, or download=True in Python, allows it")
    try:
        architecture, arguments = _architecture(timm, name)
        model = timm.create_model(name, pretrained=pretrained, num_classes=0, global_pool="", **settings)
        config = model.pretrained_cfg
        normalization = Normalization(mean=tuple(config["mean"]), std=tuple(config["std"]))
        backbone = Timm(f"timm:{architecture}", model, normalization, side or config["input_size"][-1])
    except (RuntimeError, TypeError, ValueError, AssertionError, AttributeError, LookupError, ArithmeticError) as error:
        given = ", ".join(f"{word}={value!r}" for word, value in settings.items())
        why = str(error).partition("\n")[0] or type(error).__name__
        raise ValueError(f"{key} cannot be created{given and f' with {given}'}: {why}") from error
    backbone.settings = {**_plain(key, arguments), **settings}
    return backbone


def _architecture(timm: Any, name: str) -> tuple[str, dict[str, Any]]:
    """Return the architecture of a name, and the arguments for it that a repository or folder sets."""
    source, _, address = name.strip().partition(":")
    if not address:
        return name, {}
    if source.lower() == "local-dir":
        config = json.loads((Path(address) / "config.json").read_text(encoding="utf-8"))
        architecture, arguments = config["architecture"], config.get("model_args")
    else:
        _, architecture, arguments = timm.models.load_model_config_from_hf(address)
    return architecture, {key: value for key, value in (arguments or {}).items() if key not in UNSUPPORTED}


def _img_side(key: str, given: Any) -> int | None:
    """Return the side of the images that ``img_size`` sets, as one number or two."""
    if given is None:
        return None
    sides = given if isinstance(given, list) and given else [given]
    if any(side != sides[0] for side in sides):
        raise ValueError(f"img_size of {key} is {given!r}; images are square, so both sides must be equal")
    return whole("img_size", sides[0])


# --- torchvision ---------------------------------------------------------------------------------------------


class Torchvision(Adapter):
    """A network of torchvision that is a sequence of parts; levels are the last maps of strides 8 and 16."""

    def __init__(self, key: str, model: nn.Module, normalization: Normalization, input_size: int) -> None:
        parts = {name: part for name, part in model.named_children() if name not in AFTER_LAST_MAP}
        self.ends_in_relu = type(model).__name__ == "DenseNet"  # its last ReLU is not one of its parts
        self.channels_first = "permute" not in parts
        super().__init__(key, nn.ModuleDict(parts), normalization, input_size)

    def raw(self, x: Tensor) -> dict[str, Tensor]:
        side, levels = x.shape[-1], {}
        for part in _steps(self.model):
            x = part(x)
            for level, stride in (("low", 8), ("mid", 16)):
                if self.channels_first and x.shape[-1] == side // stride:
                    levels[level] = x
        return {**levels, "high": F.relu(x) if self.ends_in_relu else x}


def _steps(model: nn.Module) -> list[nn.Module]:
    """Return the parts of a sequence, and those of sequences within it."""
    steps: list[nn.Module] = []
    for part in model.children():
        steps += list(part.children()) if isinstance(part, nn.Sequential | nn.ModuleList) else [part]
    return steps


def _torchvision(torchvision: Any, key: str, name: str, pretrained: bool, settings: Mapping[str, Any]) -> Adapter:
    models = torchvision.models
    try:
        best = models.get_model_weights(name).DEFAULT
        model = models.get_model(name, weights=None)
    except (ValueError, AttributeError) as error:
        raise ValueError(f"{key} cannot be created: {error}") from error
    transforms = best.transforms()
    normalization = Normalization(mean=tuple(transforms.mean), std=tuple(transforms.std))
    size = transforms.crop_size[0]
    try:
        backbone = Torchvision(key, model, MINUS_ONE_TO_ONE if name in FROM_TENSORFLOW else normalization, size)
    except (RuntimeError, TypeError, AttributeError, AssertionError) as error:
        raise ValueError(f"{key} is not a sequence of parts that ends in a map; timm:NAME may have it") from error
    if pretrained:
        # Not with the library's loader, which could execute code in the file.
        file = published.folder() / Path(best.url).name
        digits = file.stem.rpartition("-")[2]
        load_into(backbone.model, key, published.download(best.url, file, digits=digits), CLASSIFIERS)
    return backbone


# --- transformers --------------------------------------------------------------------------------------------


class Transformers(Adapter):
    """A vision model of transformers; of a model for vision and text, the vision part."""

    def raw(self, x: Tensor) -> dict[str, Tensor]:
        tokens: Tensor = self.model(pixel_values=x).last_hidden_state
        return {"high": tokens}

    def declares_token(self) -> bool:
        embeddings = getattr(self.model, "embeddings", None)
        return any(getattr(embeddings, name, None) is not None for name in ("cls_token", "class_embedding"))

    def token(self, x: Tensor) -> Tensor:
        output = self.model(pixel_values=x)
        # CLIP and similar models normalize the class token after the last layer. Poolers of other models were trained
        # for another task.
        token: Tensor = (
            output.pooler_output if hasattr(self.model, "post_layernorm") else output.last_hidden_state[:, 0]
        )
        return token


def _transformers(transformers: Any, key: str, name: str, pretrained: bool, settings: Mapping[str, Any]) -> Adapter:
    local = {"local_files_only": True} if published.is_local_only() else {}
    given, processor = settings.get("config"), settings.get("processor")
    try:
        if given is None or processor is None:
            processing: Any = import_module("transformers.image_processing_utils")
            processor = processing.BaseImageProcessor.get_image_processor_dict(name, **local)[0]
            given = transformers.AutoConfig.from_pretrained(name, trust_remote_code=False, **local).to_dict()
        # Both ways, so that code and kernels that the configuration names are never used.
        config, described = _configuration(transformers, given)
        if pretrained and not settings:
            model = transformers.AutoModel.from_pretrained(
                name, config=config, use_safetensors=True, trust_remote_code=False, **local
            )
        else:
            model = transformers.AutoModel.from_config(config, trust_remote_code=False)
    except (OSError, ValueError) as error:
        advice = "; --download, or download=True in Python, allows to download it" if local and not settings else ""
        raise ValueError(f"{key} cannot be created: {error}{advice}") from error
    mean, std = processor.get("image_mean") or IMAGENET.mean, processor.get("image_std") or IMAGENET.std
    white = 255 * processor.get("rescale_factor", 1 / 255)
    normalization = Normalization(mean=tuple(mean), std=tuple(std), range=white)
    known = name if REPOSITORY.fullmatch(name) else given["model_type"]
    backbone = Transformers(
        f"transformers:{known}", getattr(model, "vision_model", model), normalization, _side(processor)
    )
    used = {"image_mean": mean, "image_std": std, "rescale_factor": white / 255, "size": _side(processor)}
    backbone.settings = _plain(key, {"config": described, "processor": used})
    return backbone


def _configuration(transformers: Any, given: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the configuration of a network by the plain values of a given one, and these values."""
    kind = given["model_type"]
    if kind not in transformers.CONFIG_MAPPING:
        raise ValueError(f"model_type is {kind!r}, which the installed transformers does not have")
    create_config = transformers.CONFIG_MAPPING[kind]
    defaults = create_config().to_dict()
    if "timm" in kind or defaults.get("backbone") or defaults.get("backbone_config"):
        raise ValueError(f"{kind} contains a network of another library; timm:NAME may have it")
    values = _known(given, defaults)
    return create_config(**values), values


def _known(given: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a configuration that its class declares, of which ``defaults`` has the defaults."""
    values: dict[str, Any] = {}
    for key in [key for key in defaults if key in given and not key.startswith("_") and key not in OTHER_PARTS]:
        value = given[key]
        if isinstance(value, Mapping) and isinstance(defaults[key], Mapping):
            value = _known(value, defaults[key])
        elif isinstance(value, Mapping) or not _is_plain(value) or (key == "model_type" and value != defaults[key]):
            raise ValueError(f"{key} is {value!r}; allowed are numbers, words and lists of them")
        values[key] = value
    return values


def _side(processor: Mapping[str, Any]) -> int:
    """Return the side of the images by the settings of an image processor, which have several forms."""
    size = processor.get("crop_size") or processor.get("size") or 224
    return int(size if isinstance(size, int) else size.get("height") or size.get("shortest_edge") or 224)


# --- modules of the user -------------------------------------------------------------------------------------


_WRAPPED: dict[str, tuple[Callable[[], nn.Module], str]] = {}  # functions by "FILE.py:NAME", and digests of their files


class Wrapped(Adapter):
    """A module of the user, which returns vectors [b, c], maps [b, c, h, w] or tokens [b, n, c]."""

    def __init__(self, key: str, model: nn.Module, digest: str, size: int, mean: Any, std: Any) -> None:
        normalization = Normalization(mean=tuple(mean), std=tuple(std))
        self.in_channels = normalization.channels
        super().__init__(key, model, normalization, whole("size", size))
        self.settings = {"size": size, "mean": list(mean), "std": list(std), "digest": digest}

    def raw(self, x: Tensor) -> dict[str, Tensor]:
        features = self.model(x)
        if not isinstance(features, Tensor) or features.ndim not in (2, 3, 4):
            raise TypeError(
                f"{self.key} returns {type(features).__name__}; needed are [b, c], [b, c, h, w], or [b, n, c]"
            )
        self.gives_maps = features.ndim != 2
        return {"high": features}


def wrap(
    module: nn.Module | Callable[[], nn.Module],
    *,
    size: int = 224,
    mean: Sequence[float] = IMAGENET.mean,
    std: Sequence[float] = IMAGENET.std,
) -> Embedder:
    """Make an embedder of any module that reads images; its embeddings are the averages of what the module returns.

    It is saved as its weights and "FILE.py:NAME", the function or else the class that creates it without arguments.
    Loading calls it if it was wrapped before, or if ``nearfar.use`` or ``--use`` ran the file, which must be unchanged.

    Args:
        module: The module, or the function that creates it. It returns vectors [b, c], maps [b, c, h, w], or tokens
            [b, n, c], whose number is a square, optionally after a class token.
        size: Side of the images.
        mean: Mean of pixels from 0 to 1; one number for gray images, or three.
        std: Standard deviation of pixels.

    Example:
        >>> model = wrap(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()), size=32)
        >>> model(torch.randn(2, 3, 32, 32)).shape
        torch.Size([2, 8])
    """
    create_module = type(module) if isinstance(module, nn.Module) else module
    try:
        file = Path(inspect.getfile(create_module)).resolve()
        key, digest = f"{file.name}:{create_module.__qualname__}", plugins.sources_of(file)[1]
    except (TypeError, OSError, ValueError):  # of a notebook, for example
        key, digest = f"unknown.py:{create_module.__qualname__}", ""
    _WRAPPED[key] = create_module, digest
    backbone = Wrapped(key, module if isinstance(module, nn.Module) else module(), digest, size, mean, std)
    return Embedder(backbone, dim=None)


def is_file(name: str) -> bool:
    """Return whether this is "FILE.py:NAME"."""
    return name.rpartition(":")[0].endswith(".py")


def _of_file(name: str, settings: Mapping[str, Any]) -> Wrapped:
    """Create a module of a file that the user named in this process."""
    known = {"size": 224, "mean": IMAGENET.mean, "std": IMAGENET.std}
    check_settings(f"network {name}", settings, {**known, "digest": ""})
    file, _, attribute = name.rpartition(":")
    key = f"{Path(file).name}:{attribute}"
    create_module, digest = _WRAPPED[key] if key in _WRAPPED else plugins.find(name)
    if settings.get("digest", digest) != digest:
        raise ValueError(f"{file}, or a module that it imports, is not as it was when the network was saved")
    model = create_module()
    if isinstance(model, Embedder) and isinstance(model.backbone, Wrapped):  # the function wraps the module itself
        known, model = dict(model.backbone.settings), model.backbone.model
    return Wrapped(key, model, **{**known, **settings, "digest": digest})


_FACTORIES: dict[str, Callable[[Any, str, str, bool, Mapping[str, Any]], Adapter]] = {
    "timm": _timm,
    "torchvision": _torchvision,
    "transformers": _transformers,
}
LIBRARIES = tuple(_FACTORIES)
