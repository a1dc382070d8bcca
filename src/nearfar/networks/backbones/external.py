"""Backbones of other libraries, where the user has them: ``timm:NAME``, ``torchvision:NAME``, ``transformers:NAME``."""

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
from nearfar.networks.weights.download import download
from nearfar.networks.weights.state_dict import load_into
from nearfar.utils.normalization import IMAGENET, Normalization
from nearfar.utils.paths import expanded
from nearfar.utils.validation import whole

Pretrained = bool | str | Path

# Prefixes of keys that belong to classifiers, in any of the libraries.
CLASSIFIERS = ("fc.", "classifier.", "head.", "heads.", "last_linear.", "aux1.", "aux2.", "AuxLogits.", "head_dist.")
# Parts of torchvision's networks behind, or beside, the last map.
BEHIND = ("avgpool", "dropout", "flatten", "fc", "classifier", "head", "aux1", "aux2", "AuxLogits")
# These turn ImageNet's normalisation into pixels from −1 to 1 themselves; here they get them.
FROM_TENSORFLOW = {"googlenet", "inception_v3"}
MINUS_ONE_TO_ONE = Normalization(mean=(0.5,) * 3, std=(0.5,) * 3)
# What timm.create_model takes as well, and why it cannot be set.
NOT_OURS = {
    "num_classes": "there is no classifier",
    "global_pool": "pooling says it",
    "features_only": "levels say it",
    "in_chans": "pictures have three channels",
    "checkpoint_path": "pretrained may be a file",
    "pretrained_cfg": "pretrained says it",
    "pretrained_cfg_overlay": "pretrained says it",
    "cache_dir": "pretrained says it",
}
NO_SETTINGS: Mapping[str, Any] = MappingProxyType({})


def create(name: str, *, pretrained: Pretrained = False, settings: Mapping[str, Any] = NO_SETTINGS) -> Backbone:
    """A backbone by "library:name"; ``pretrained`` is the library's own weights, or a file with its keys.

    Networks of timm have ``settings``, those of ``timm.create_model``.
    """
    library, _, rest = name.partition(":")
    if library not in _MAKERS:
        raise ValueError(f"network is {name!r}; allowed before the colon are {', '.join(_MAKERS)}")
    if not rest:
        raise ValueError(f"network is {name!r}; a name must follow, as in {library}:resnet50")
    if settings and library != "timm":
        raise TypeError(f"{name} has no setting {next(iter(settings))!r}; it has none")
    given = _plain(name, settings)
    try:
        module = import_module(library)
    except ImportError as error:
        raise ImportError(f"{name} needs {library}; install it with: pip install {library}") from error
    backbone = _MAKERS[library](module, name, rest, pretrained is True, given)
    if isinstance(pretrained, str | Path):
        load_into(backbone.model, name, expanded(pretrained), CLASSIFIERS)
    return backbone


def _plain(name: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as they come back from a file, so that what is loaded is made as what was saved."""
    found = {}
    for key, value in settings.items():
        if key in NOT_OURS:
            raise TypeError(f"{name} has no setting {key!r}: {NOT_OURS[key]}")
        try:
            found[key] = json.loads(json.dumps(value, allow_nan=False))
        except (TypeError, ValueError) as error:
            raise TypeError(f"{key} of {name} is {value!r}; numbers, words and lists of them can be saved") from error
    return found


class Adapter(Backbone):
    """A network of another library as a backbone. What its levels are called and hold is found out by trying.

    Tokens of a transformer are a map without rows, [b, c, n, 1]; class and register tokens are left out. Where the
    library says that there is a class token, ``token`` gives it.

    Attributes
        settings   with which the library was asked for the network.
        prefix     how many tokens stand before those of the patches.
    """

    ignored_keys = CLASSIFIERS
    model: nn.Module
    settings: Mapping[str, Any] = NO_SETTINGS

    def __init__(self, key: str, model: nn.Module, normalization: Normalization, input_size: int) -> None:
        super().__init__()
        self.key = key  # type: ignore[misc]  # the others have one for each class
        self.model = model
        self.normalization, self.input_size = normalization, input_size
        self.prefix = 0
        self.channels = {level: found.shape[1] for level, found in self._try().items()}
        self.has_token = self.prefix > 0 and self.says_token()

    def raw(self, x: Tensor) -> dict[str, Tensor]:
        """Maps [b, c, h, w], or tokens [b, n, c]."""
        raise NotImplementedError

    def maps(self, x: Tensor) -> dict[str, Tensor]:
        return {level: self._map(found) for level, found in self.raw(x).items()}

    def says_token(self) -> bool:
        """Whether the network says that the first of its tokens is one for the class."""
        return False

    def token(self, x: Tensor) -> Tensor:
        return self.raw(x)["high"][:, 0]

    def _map(self, found: Tensor) -> Tensor:
        return found[:, self.prefix :].transpose(1, 2).unsqueeze(3) if found.ndim == 3 else found

    def _try(self) -> dict[str, Tensor]:
        was, size = self.model.training, self.input_size or 224
        self.model.eval()
        with torch.no_grad():
            # Zeros where the parameters are, should they be on a GPU or nowhere.
            found = self.raw(next(self.model.parameters()).new_zeros(1, self.in_channels, size, size))
        self.model.train(was)
        tokens = found["high"].shape[1] if found["high"].ndim == 3 else 0
        # A square picture has a square of patches; what is more stands before them, and some say how many these are.
        said = getattr(self.model, "num_prefix_tokens", None)
        self.prefix = said if tokens and isinstance(said, int) else tokens - math.isqrt(tokens) ** 2
        return {level: self._map(each) for level, each in found.items()}


# --- timm ----------------------------------------------------------------------------------------------------


class Timm(Adapter):
    """A network of timm, by what all of them offer: ``forward_features`` and ``forward_intermediates``."""

    def raw(self, x: Tensor) -> dict[str, Tensor]:
        model: Any = self.model
        places = self._places()
        if not places:
            return {"high": self._upright(model.forward_features(x))}
        high, (low, mid) = model.forward_intermediates(x, indices=places, output_fmt="NCHW")
        return {"low": low, "mid": mid, "high": self._upright(high)}

    def says_token(self) -> bool:
        return getattr(self.model, "cls_token", None) is not None

    def token(self, x: Tensor) -> Tensor:
        model: Any = self.model
        found: Tensor = model.forward_features(x)
        return found[:, 0]

    def _places(self) -> list[int]:
        """The stages of strides 8 and 16, or of a row of equal blocks those after a third and two thirds."""
        stages = len(getattr(self.model, "feature_info", ()))
        if stages < 3 or not hasattr(self.model, "forward_intermediates"):
            return []
        return [stages - 3, stages - 2] if stages <= 5 else [stages // 3 - 1, 2 * stages // 3 - 1]

    def _upright(self, found: Tensor) -> Tensor:
        last = getattr(self.model, "output_fmt", "NCHW") == "NHWC"
        return found.permute(0, 3, 1, 2) if last and found.ndim == 4 else found


def _timm(timm: Any, key: str, name: str, pretrained: bool, settings: Mapping[str, Any]) -> Adapter:
    side = _img_side(key, settings.get("img_size"))
    try:
        model = timm.create_model(name, pretrained=pretrained, num_classes=0, global_pool="", **settings)
        about = model.pretrained_cfg
        colours = Normalization(mean=tuple(about["mean"]), std=tuple(about["std"]))
        backbone = Timm(key, model, colours, side or about["input_size"][-1])
    except (RuntimeError, TypeError, ValueError, AssertionError, AttributeError, LookupError, ArithmeticError) as error:
        told = ", ".join(f"{word}={value!r}" for word, value in settings.items())
        why = str(error).partition("\n")[0] or type(error).__name__
        raise ValueError(f"{key} cannot be made{told and f' with {told}'}: {why}") from error
    backbone.settings = settings
    return backbone


def _img_side(key: str, given: Any) -> int | None:
    """The side of the pictures that ``img_size`` asks for, which timm takes as one number or two."""
    if given is None:
        return None
    sides = given if isinstance(given, list) and given else [given]
    if any(side != sides[0] for side in sides):
        raise ValueError(f"img_size of {key} is {given!r}; pictures are square, and both sides must be the same")
    return whole("img_size", sides[0])


# --- torchvision ---------------------------------------------------------------------------------------------


class Torchvision(Adapter):
    """A network of torchvision that is a chain of parts; levels are the last maps of strides 8 and 16."""

    def __init__(self, key: str, model: nn.Module, normalization: Normalization, input_size: int) -> None:
        parts = {name: part for name, part in model.named_children() if name not in BEHIND}
        self.ends_in_relu = type(model).__name__ == "DenseNet"  # which has it outside of its parts
        self.upright = "permute" not in parts  # or channels come last until the end
        super().__init__(key, nn.ModuleDict(parts), normalization, input_size)

    def raw(self, x: Tensor) -> dict[str, Tensor]:
        side, found = x.shape[-1], {}
        for part in _steps(self.model):
            x = part(x)
            for level, stride in (("low", 8), ("mid", 16)):
                if self.upright and x.shape[-1] == side // stride:
                    found[level] = x
        return {**found, "high": F.relu(x) if self.ends_in_relu else x}


def _steps(model: nn.Module) -> list[nn.Module]:
    """The parts of a chain, and those of chains within it."""
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
        raise ValueError(f"{key} cannot be made: {error}") from error
    about = best.transforms()
    colours = Normalization(mean=tuple(about.mean), std=tuple(about.std))
    size = about.crop_size[0]
    try:
        backbone = Torchvision(key, model, MINUS_ONE_TO_ONE if name in FROM_TENSORFLOW else colours, size)
    except (RuntimeError, TypeError, AttributeError, AssertionError) as error:
        raise ValueError(f"{key} is no chain of parts that ends in a map; perhaps timm:NAME has it") from error
    if pretrained:
        # Not by the library's own loader, which would run what is in the file.
        file = published.folder() / Path(best.url).name
        digits = file.stem.rpartition("-")[2]
        load_into(backbone.model, key, download(best.url, file, digits=digits), CLASSIFIERS)
    return backbone


# --- transformers --------------------------------------------------------------------------------------------


class Transformers(Adapter):
    """A vision model of transformers; the vision half of one with two."""

    def raw(self, x: Tensor) -> dict[str, Tensor]:
        found: Tensor = self.model(pixel_values=x).last_hidden_state
        return {"high": found}

    def says_token(self) -> bool:
        embeddings = getattr(self.model, "embeddings", None)
        return any(getattr(embeddings, name, None) is not None for name in ("cls_token", "class_embedding"))

    def token(self, x: Tensor) -> Tensor:
        found = self.model(pixel_values=x)
        # CLIP and its kin norm the class token alone, behind the last tokens. The poolers of others were trained for
        # another task.
        token: Tensor = found.pooler_output if hasattr(self.model, "post_layernorm") else found.last_hidden_state[:, 0]
        return token


def _transformers(transformers: Any, key: str, name: str, pretrained: bool, settings: Mapping[str, Any]) -> Adapter:
    processing: Any = import_module("transformers.image_processing_utils")
    try:
        about = processing.BaseImageProcessor.get_image_processor_dict(name)[0]
        if pretrained:
            model = transformers.AutoModel.from_pretrained(name, use_safetensors=True)
        else:
            model = transformers.AutoModel.from_config(transformers.AutoConfig.from_pretrained(name))
    except (OSError, ValueError) as error:
        raise ValueError(f"{key} cannot be made: {error}") from error
    mean, std = about.get("image_mean") or IMAGENET.mean, about.get("image_std") or IMAGENET.std
    white = 255 * about.get("rescale_factor", 1 / 255)
    colours = Normalization(mean=tuple(mean), std=tuple(std), range=white)
    return Transformers(key, getattr(model, "vision_model", model), colours, _side(about))


def _side(about: Mapping[str, Any]) -> int:
    """The side of the pictures by an image processor's settings, which say it in many ways."""
    size = about.get("crop_size") or about.get("size") or 224
    return int(size if isinstance(size, int) else size.get("height") or size.get("shortest_edge") or 224)


_MAKERS: dict[str, Callable[[Any, str, str, bool, Mapping[str, Any]], Adapter]] = {
    "timm": _timm,
    "torchvision": _torchvision,
    "transformers": _transformers,
}
