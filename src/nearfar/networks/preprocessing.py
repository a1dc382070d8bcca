"""Preprocessing of images for a network, as stored with its weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from nearfar.utils.normalization import Normalization
from nearfar.utils.validation import one_of, whole

SMALL = 96  # networks for smaller images, such as digits, read them without a crop
INTERPOLATION = "bilinear, antialiased"


class ReadsPixels(Protocol):
    """An embedder or ensemble: what preprocessing needs to know about it."""

    @property
    def normalization(self) -> Normalization | None:
        """Normalization of pixels, or None for vectors."""

    @property
    def input_size(self) -> int | None:
        """Side of the images, or None for vectors."""


@dataclass(frozen=True, kw_only=True)
class Preprocessing:
    """How an image is resized, cropped and normalized.

    Args:
        size: Side of the square that the network reads.
        resize: Shorter side before the crop; both sides if ``aspect`` is "squash".
        aspect: "keep", "squash", or "shrink": like "keep", but smaller images are enlarged only to fit ``size``.
        crop: "center", or "none" to use the whole resized image.
        normalization: Normalization of pixels.
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
        """Return a JSON object; it includes the interpolation, for use outside of nearfar."""
        value = {**asdict(self), "interpolation": INTERPOLATION}
        if not self.normalization.grey:
            del value["normalization"]["grey"]  # added later; files and fingerprints stay as they were
        return value


def default_preprocessing(model: ReadsPixels) -> Preprocessing | None:
    """Return the default preprocessing: shorter side to 8/7 of the input size, then a center crop. None for vectors.

    Args:
        model: An embedder or ensemble.

    Example:
        >>> from nearfar.networks import create
        >>> found = default_preprocessing(create("mobilenet_v2"))
        >>> found.resize, found.size
        (256, 224)
    """
    size, normalization = model.input_size, model.normalization
    if size is None or normalization is None:
        return None
    return Preprocessing(size=size, resize=size if size < SMALL else round(size * 8 / 7), normalization=normalization)


def from_json(value: Mapping[str, Any], where: str) -> Preprocessing:
    """Parse a JSON object of :meth:`Preprocessing.to_json`.

    Args:
        value: The JSON object.
        where: File that contains it, for errors.
    """
    try:
        words = dict(value)
        words.pop("interpolation", None)
        colors = dict(words.pop("normalization"))
        normalization = Normalization(**{**colors, "mean": tuple(colors["mean"]), "std": tuple(colors["std"])})
        return Preprocessing(**words, normalization=normalization)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{where} has a preprocessing that cannot be read: {error}") from error
