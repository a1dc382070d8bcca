"""Proxy-NCA, and ProxyNCA++ as a setting."""

from __future__ import annotations

from nearfar.losses.proxies import ClassificationLoss
from nearfar.losses.registry import register
from nearfar.utils.validation import positive


@register
class ProxyNCA(ClassificationLoss):
    """Pulls to the own proxy with constant force, pushes from the other proxies, the nearest most.

    Formula:
        ℓ_i = −scale·cos(x_i, w_y) + log Σ_{c≠y} e^(scale·cos(x_i, w_c))

    Args:
        num_classes, dim: How many classes, and the length of an embedding.
        scale: 18: papers give both vectors a length of 3 and compare squared distances,
            −9‖x − w‖² = 18·cos + const.
        include_positive: False as printed; True: the own class is in the sum as well, which is ProxyNCA++
            (with the temperature 1/9 of its paper on unit vectors, scale = 2·9 = 18).
        sample_rate: 1; below: compare with the classes of the batch and a random part of the others.
        lr_multiplier: Learning rate of the proxies over that of the network, 100.

    Differences:
        The loss is computed from logarithms, so that an embedding whose probability is too small for a float
        is not lost. With a single class there is nothing to tell apart, and the loss is 0.

    Reference:
        Movshovitz-Attias et al.: No Fuss Distance Metric Learning using Proxies, 2017.
        Teh, DeVries, Taylor: ProxyNCA++: Revisiting and Revitalizing Proxy Neighborhood Component Analysis, 2020.
    """

    key = "proxy_nca"
    source = "Thesis 2.27–2.28, RLL 5"

    def __init__(
        self,
        *,
        num_classes: int,
        dim: int,
        scale: float = 18.0,
        include_positive: bool = False,
        sample_rate: float = 1.0,
        lr_multiplier: float = 100.0,
    ) -> None:
        super().__init__(num_classes, dim, sample_rate, lr_multiplier)
        self.scale = positive("scale", scale)
        self.include_positive = include_positive
