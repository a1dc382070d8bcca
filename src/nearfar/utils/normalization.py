"""Normalization of pixels, as networks were trained with."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nearfar.utils.validation import one_of, positive

ORDERS = ("RGB", "BGR")


@dataclass(frozen=True, kw_only=True)
class Normalization:
    """Computes (pixel · range/255 − mean) / std for each channel.

    Args:
        mean: One number for each channel, in the network's channel order and pixel range.
        std: One number for each channel.
        range: The pixel value of white: 1 for pixels from 0 to 1, 255 for pixels from 0 to 255.
        order: "RGB", or "BGR" for weights that come from Caffe; irrelevant for one channel.
        grey: Whether images have one channel, which the network reads as three.

    Example:
        >>> IMAGENET(torch.full((1, 3, 1, 1), 255, dtype=torch.uint8)).flatten().tolist()[0]
        2.248908281326294
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    range: float = 1.0
    order: str = "RGB"
    grey: bool = False

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
        """Normalize pixels; gray images become three equal channels if the network reads three.

        Args:
            pixels: [b, c, h, w] in RGB order, from 0 to 255, of uint8 or floats.
            dtype: The dtype of the result.
        """
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
GREY = Normalization(mean=(0.0,), std=(1.0,))
PLAIN = Normalization(mean=(0.0,) * 3, std=(1.0,) * 3)
