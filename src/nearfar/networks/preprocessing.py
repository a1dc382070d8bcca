"""What has to happen to a picture before a network reads it, as it is written beside the network."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from nearfar.utils.normalization import Normalization
from nearfar.utils.validation import one_of, whole

SMALL = 96  # below this side, pictures are digits and thumbnails: nothing is cut off
INTERPOLATION = "bilinear, antialiased"


class ReadsPixels(Protocol):
    """What an embedder and an ensemble say about their input."""

    @property
    def normalization(self) -> Normalization | None: ...
    @property
    def input_size(self) -> int | None: ...


@dataclass(frozen=True, kw_only=True)
class Preprocessing:
    """Resize, cut out, normalise.

    Args:
        size: Side of the square that the network reads.
        resize: Shorter side of the picture before it is cut; both sides where ``aspect`` is "squash".
        aspect: "keep", "squash", or "shrink": kept, and smaller pictures grow only where they have to.
        crop: "center", or "none" where the resized picture is taken as it is.
        normalization: How pixels become numbers.
    """

    size: int
    resize: int
    aspect: str = "keep"
    crop: str = "center"
    normalization: Normalization

    def __post_init__(self) -> None:
        whole("size", self.size)
        whole("resize", self.resize, low=self.size)
        one_of("aspect", self.aspect, ("keep", "squash", "shrink"))
        one_of("crop", self.crop, ("center", "none"))

    def to_json(self) -> dict[str, Any]:
        """As a JSON object, with the way of resizing for those who do it elsewhere."""
        value = {**asdict(self), "interpolation": INTERPOLATION}
        if not self.normalization.grey:
            del value["normalization"]["grey"]  # so that cards are what they were before there was such a thing
        return value


def usual(model: ReadsPixels) -> Preprocessing | None:
    """The usual way for a network: shorter side to 8/7 of the size it reads, then the centre. None for vectors.

    >>> from nearfar.networks import create
    >>> found = usual(create("mobilenet_v2"))
    >>> found.resize, found.size
    (256, 224)
    """
    size, normalization = model.input_size, model.normalization
    if size is None or normalization is None:
        return None
    return Preprocessing(size=size, resize=size if size < SMALL else round(size * 8 / 7), normalization=normalization)


def from_json(value: Mapping[str, Any], where: str) -> Preprocessing:
    """What ``to_json`` wrote; ``where`` it stands is named in errors."""
    try:
        words = dict(value)
        words.pop("interpolation", None)
        colours = dict(words.pop("normalization"))
        normalization = Normalization(**{**colours, "mean": tuple(colours["mean"]), "std": tuple(colours["std"])})
        return Preprocessing(**words, normalization=normalization)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{where} has a preprocessing that cannot be read: {error}") from error
