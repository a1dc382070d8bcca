"""From decoded images to network inputs: normalization of pixels, and the preprocessing saved with a network."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from nearfar.utils.validation import one_of, positive, whole

ORDERS = ("RGB", "BGR")


@dataclass(frozen=True, kw_only=True)
class Normalization:
    """Computes (pixel · range/255 − mean) / std for each channel."""

    mean: tuple[float, ...]  # one number for each channel, in the network's channel order and pixel range
    std: tuple[float, ...]  # one number for each channel
    range: float = 1.0  # the pixel value of white: 1 for pixels from 0 to 1, 255 for pixels from 0 to 255
    order: str = "RGB"  # "RGB", or "BGR" for weights that come from Caffe; irrelevant for one channel
    grey: bool = False  # whether images have one channel, which the network reads as three

    def __post_init__(self) -> None:
        one_of("order", self.order, ORDERS)
        positive("range", self.range)
        if len(self.mean) not in (1, 3) or len(self.std) != len(self.mean):
            raise ValueError(f"mean has {len(self.mean)} numbers and std {len(self.std)}; both need 1 or 3")
        for value in self.std:
            positive("std", value)

    @property
    def channels(self) -> int:
        """The number of channels of the pixels: 1 for gray, 3 for color."""
        return 1 if self.grey else len(self.mean)

    def __call__(self, pixels: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Normalize pixels; gray images become three equal channels if the network reads three."""
        channels = pixels.shape[-3]
        if channels not in (1, self.channels):
            raise ValueError(f"pixels have {channels} channels; this network reads {self.channels}")
        if self.order == "BGR" and channels == 3:
            pixels = pixels.flip(-3)
        factor, shift = self.constants(pixels.device, dtype)
        return pixels.to(dtype) * factor - shift

    def constants(self, device: torch.device, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """Return the factor range/(255·std) and the shift mean/std, [c, 1, 1] each: pixel · factor − shift."""
        mean, std = (torch.tensor(values, dtype=torch.float64).view(-1, 1, 1) for values in (self.mean, self.std))
        return (self.range / (255 * std)).to(device, dtype), (mean / std).to(device, dtype)


IMAGENET = Normalization(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
CAFFE = Normalization(mean=(104.0, 117.0, 128.0), std=(1.0, 1.0, 1.0), range=255.0, order="BGR")
LITE = Normalization(mean=(127.0,) * 3, std=(128.0,) * 3, range=255.0)  # EfficientNet-Lite: (x − 127) / 128
MINUS_ONE_TO_ONE = Normalization(mean=(0.5,) * 3, std=(0.5,) * 3)  # pixels from −1 to 1, of weights of TensorFlow
GREY = Normalization(mean=(0.0,), std=(1.0,))
PLAIN = Normalization(mean=(0.0,) * 3, std=(1.0,) * 3)


SMALL = 96  # networks for smaller images, such as digits, read them without a crop
INTERPOLATION = "bilinear, antialiased"


@dataclass(frozen=True, kw_only=True)
class Preprocessing:
    """How an image is resized, cropped and normalized."""

    size: int  # side of the square that the network reads
    resize: int  # shorter side before the crop; both sides if ``aspect`` is "squash"
    # "keep", "squash", or "shrink": like "keep", but smaller images are enlarged only to fit ``size``.
    aspect: str = "keep"
    crop: str = "center"  # "center", or "none" to use the whole resized image
    pad: bool = False  # whether images are first padded to squares with black
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
            del value["normalization"]["grey"]
        if not self.pad:
            del value["pad"]
        return value


def from_json(value: Mapping[str, Any], where: str) -> Preprocessing:
    """Parse a JSON object of :meth:`Preprocessing.to_json`."""
    try:
        settings = dict(value)
        settings.pop("interpolation", None)
        colors = dict(settings.pop("normalization"))
        normalization = Normalization(**{**colors, "mean": tuple(colors["mean"]), "std": tuple(colors["std"])})
        return Preprocessing(**settings, normalization=normalization)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{where} has a preprocessing that cannot be read: {error}") from error
