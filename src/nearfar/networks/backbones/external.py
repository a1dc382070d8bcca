"""Backbones of other libraries, if installed: ``timm:NAME``, ``torchvision:NAME``, ``transformers:NAME``."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nearfar.networks.backbones.base import Backbone
from nearfar.networks.weights import published
from nearfar.networks.weights.download import download, is_local_only
from nearfar.networks.weights.state_dict import load_into
from nearfar.utils.paths import expanded
from nearfar.utils.preprocessing import IMAGENET, Normalization
from nearfar.utils.validation import whole

Pretrained = bool | str | Path

# Prefixes of the keys of classifiers in all libraries.
CLASSIFIERS = ("fc.", "classifier.", "head.", "heads.", "last_linear.", "aux1.", "aux2.", "AuxLogits.", "head_dist.")
# Parts of torchvision's networks after the last map, or auxiliary ones.
AFTER_LAST_MAP = ("avgpool", "dropout", "flatten", "fc", "classifier", "head", "aux1", "aux2", "AuxLogits")
# These convert ImageNet's normalization to pixels from −1 to 1; here they read the latter directly.
FROM_TENSORFLOW = {"googlenet", "inception_v3"}
MINUS_ONE_TO_ONE = Normalization(mean=(0.5,) * 3, std=(0.5,) * 3)
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
NO_SETTINGS: Mapping[str, Any] = MappingProxyType({})
HUB = ("hf-hub:", "hf_hub:")  # names of timm that stand for a download


def create(name: str, *, pretrained: Pretrained = False, settings: Mapping[str, Any] = NO_SETTINGS) -> Backbone:
    """Create a backbone by "library:name".

    Args:
        name: "timm:NAME", "torchvision:NAME" or "transformers:NAME".
        pretrained: True for the weights of the library, or a file with its state-dict keys.
        settings: Arguments of ``timm.create_model``; the other libraries have none.
    """
    library, _, rest = name.partition(":")
    if library not in _FACTORIES:
        raise ValueError(f"network is {name!r}; allowed before the colon are {', '.join(_FACTORIES)}")
    if not rest:
        raise ValueError(f"network is {name!r}; a name must follow, as in {library}:resnet50")
    if settings and library != "timm":
        raise TypeError(f"{name} has no setting {next(iter(settings))!r}; it has none")
    given = _plain(name, settings)
    try:
        module = import_module(library)
    except ImportError as error:
        raise ImportError(f"{name} needs {library}; install it with: pip install {library}") from error
    backbone = _FACTORIES[library](module, name, rest, pretrained is True, given)
    if isinstance(pretrained, str | Path):
        load_into(backbone.model, name, expanded(pretrained), CLASSIFIERS)
    return backbone


def _plain(name: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings as JSON stores them, so that a saved network is created in the same way."""
    found = {}
    for key, value in settings.items():
        if key in UNSUPPORTED:
            raise TypeError(f"{name} has no setting {key!r}: {UNSUPPORTED[key]}")
        try:
            found[key] = json.loads(json.dumps(value, allow_nan=False))
        except (TypeError, ValueError) as error:
            raise TypeError(f"{key} of {name} is {value!r}; allowed are numbers, text and lists of them") from error
    return found


class Adapter(Backbone):
    """A network of another library as a backbone. Its levels are found by a forward pass.

    The patch tokens of a transformer become a map [b, c, n, 1], without class and register tokens. If the library
    declares a class token, :meth:`token` returns it.

    Args:
        key: Name of the network, with the library.
        model: The network.
        normalization: Normalization of pixels that it expects.
        input_size: Side of the images that it expects.

    Attributes:
        settings: Settings that the network was created with.
        prefix: Number of tokens before the patch tokens.
    """

    ignored_keys = CLASSIFIERS
    model: nn.Module
    settings: Mapping[str, Any] = NO_SETTINGS

    def __init__(self, key: str, model: nn.Module, normalization: Normalization, input_size: int) -> None:
        super().__init__()
        self.key = key  # type: ignore[misc]  # elsewhere a class attribute
        self.model = model
        self.normalization, self.input_size = normalization, input_size
        self.prefix = 0
        self.channels = {level: found.shape[1] for level, found in self._try().items()}
        self.has_token = self.prefix > 0 and self.declares_token()

    def raw(self, x: Tensor) -> dict[str, Tensor]:
        """Return the maps [b, c, h, w] or tokens [b, n, c] of each level."""
        raise NotImplementedError

    def maps(self, x: Tensor) -> dict[str, Tensor]:
        return {level: self._map(found) for level, found in self.raw(x).items()}

    def declares_token(self) -> bool:
        """Return whether the network declares that its first token is a class token."""
        return False

    def token(self, x: Tensor) -> Tensor:
        return self.raw(x)["high"][:, 0]

    def _map(self, found: Tensor) -> Tensor:
        return found[:, self.prefix :].transpose(1, 2).unsqueeze(3) if found.ndim == 3 else found

    def _try(self) -> dict[str, Tensor]:
        was, size = self.model.training, self.input_size or 224
        self.model.eval()
        with torch.no_grad():
            # Zeros on the device of the parameters, which may be a GPU or "meta".
            found = self.raw(next(self.model.parameters()).new_zeros(1, self.in_channels, size, size))
        self.model.train(was)
        tokens = found["high"].shape[1] if found["high"].ndim == 3 else 0
        # A square image has a square number of patches; the tokens before them are the rest, unless the network says.
        said = getattr(self.model, "num_prefix_tokens", None)
        self.prefix = said if tokens and isinstance(said, int) else tokens - math.isqrt(tokens) ** 2
        return {level: self._map(each) for level, each in found.items()}


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

    def token(self, x: Tensor) -> Tensor:
        model: Any = self.model
        found: Tensor = model.forward_features(x)
        return found[:, 0]

    def _places(self) -> list[int]:
        """Return the stages of strides 8 and 16; of equal blocks, those after one and two thirds."""
        stages = len(getattr(self.model, "feature_info", ()))
        if stages < 3 or not hasattr(self.model, "forward_intermediates"):
            return []
        return [stages - 3, stages - 2] if stages <= 5 else [stages // 3 - 1, 2 * stages // 3 - 1]

    def _channels_first(self, found: Tensor) -> Tensor:
        last = getattr(self.model, "output_fmt", "NCHW") == "NHWC"
        return found.permute(0, 3, 1, 2) if last and found.ndim == 4 else found


def _timm(timm: Any, key: str, name: str, pretrained: bool, settings: Mapping[str, Any]) -> Adapter:
    side = _img_side(key, settings.get("img_size"))
    if is_local_only() and (pretrained or name.startswith(HUB)):
        raise ValueError(f"{key} would be downloaded; --download, or download=True in Python, allows it")
    try:
        model = timm.create_model(name, pretrained=pretrained, num_classes=0, global_pool="", **settings)
        about = model.pretrained_cfg
        colors = Normalization(mean=tuple(about["mean"]), std=tuple(about["std"]))
        backbone = Timm(key, model, colors, side or about["input_size"][-1])
    except (RuntimeError, TypeError, ValueError, AssertionError, AttributeError, LookupError, ArithmeticError) as error:
        given = ", ".join(f"{word}={value!r}" for word, value in settings.items())
        why = str(error).partition("\n")[0] or type(error).__name__
        raise ValueError(f"{key} cannot be created{given and f' with {given}'}: {why}") from error
    backbone.settings = settings
    return backbone


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
        side, found = x.shape[-1], {}
        for part in _steps(self.model):
            x = part(x)
            for level, stride in (("low", 8), ("mid", 16)):
                if self.channels_first and x.shape[-1] == side // stride:
                    found[level] = x
        return {**found, "high": F.relu(x) if self.ends_in_relu else x}


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
    about = best.transforms()
    colors = Normalization(mean=tuple(about.mean), std=tuple(about.std))
    size = about.crop_size[0]
    try:
        backbone = Torchvision(key, model, MINUS_ONE_TO_ONE if name in FROM_TENSORFLOW else colors, size)
    except (RuntimeError, TypeError, AttributeError, AssertionError) as error:
        raise ValueError(f"{key} is not a sequence of parts that ends in a map; timm:NAME may have it") from error
    if pretrained:
        # Not with the library's loader, which could execute code in the file.
        file = published.folder() / Path(best.url).name
        digits = file.stem.rpartition("-")[2]
        load_into(backbone.model, key, download(best.url, file, digits=digits), CLASSIFIERS)
    return backbone


# --- transformers --------------------------------------------------------------------------------------------


class Transformers(Adapter):
    """A vision model of transformers; of a model for vision and text, the vision part."""

    def raw(self, x: Tensor) -> dict[str, Tensor]:
        found: Tensor = self.model(pixel_values=x).last_hidden_state
        return {"high": found}

    def declares_token(self) -> bool:
        embeddings = getattr(self.model, "embeddings", None)
        return any(getattr(embeddings, name, None) is not None for name in ("cls_token", "class_embedding"))

    def token(self, x: Tensor) -> Tensor:
        found = self.model(pixel_values=x)
        # CLIP and similar models normalize the class token after the last layer. Poolers of other models were trained
        # for another task.
        token: Tensor = found.pooler_output if hasattr(self.model, "post_layernorm") else found.last_hidden_state[:, 0]
        return token


def _transformers(transformers: Any, key: str, name: str, pretrained: bool, settings: Mapping[str, Any]) -> Adapter:
    processing: Any = import_module("transformers.image_processing_utils")
    local = {"local_files_only": True} if is_local_only() else {}
    try:
        about = processing.BaseImageProcessor.get_image_processor_dict(name, **local)[0]
        if pretrained:
            model = transformers.AutoModel.from_pretrained(name, use_safetensors=True, **local)
        else:
            model = transformers.AutoModel.from_config(transformers.AutoConfig.from_pretrained(name, **local))
    except (OSError, ValueError) as error:
        advice = "; --download, or download=True in Python, allows to download it" if local else ""
        raise ValueError(f"{key} cannot be created: {error}{advice}") from error
    mean, std = about.get("image_mean") or IMAGENET.mean, about.get("image_std") or IMAGENET.std
    white = 255 * about.get("rescale_factor", 1 / 255)
    colors = Normalization(mean=tuple(mean), std=tuple(std), range=white)
    return Transformers(key, getattr(model, "vision_model", model), colors, _side(about))


def _side(about: Mapping[str, Any]) -> int:
    """Return the side of the images by the settings of an image processor, which have several forms."""
    size = about.get("crop_size") or about.get("size") or 224
    return int(size if isinstance(size, int) else size.get("height") or size.get("shortest_edge") or 224)


_FACTORIES: dict[str, Callable[[Any, str, str, bool, Mapping[str, Any]], Adapter]] = {
    "timm": _timm,
    "torchvision": _torchvision,
    "transformers": _transformers,
}
LIBRARIES = tuple(_FACTORIES)
