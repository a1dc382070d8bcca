"""Proxy-NCA, and ProxyNCA++ as a setting."""

from __future__ import annotations

from nearfar.losses.proxies import ClassificationLoss
from nearfar.losses.registry import register
from nearfar.utils.validation import positive


@register
class ProxyNCA(ClassificationLoss):
    """Pulls each embedding to its own proxy with a constant force and pushes it from the others, the nearest most.

    Formula:
        ℓ_i = −scale·cos(x_i, w_y) + log Σ_{c≠y} e^(scale·cos(x_i, w_c))

    Args:
        num_classes: Number of classes.
        dim: Dimension of the embeddings.
        scale: Factor of the cosines. The papers scale both vectors to length 3 and compare squared distances:
            −9‖x − w‖² = 18·cos + const.
        include_positive: True: the own class is part of the sum, which is ProxyNCA++ (its temperature of 1/9 on unit
            vectors is scale = 2·9 = 18).
        sample_rate: Below 1, each step compares with the classes of the batch and a random part of the others.
        lr_multiplier: Learning rate of the proxies divided by that of the network.

    Differences:
        The loss is computed from logarithms, so embeddings whose probability underflows are not lost. With a single
        class the loss is 0.

    Reference:
        Movshovitz-Attias et al., "No Fuss Distance Metric Learning using Proxies", ICCV 2017. Thesis 2.27–2.28, RLL 5.
        Teh et al., "ProxyNCA++: Revisiting and Revitalizing Proxy Neighborhood Component Analysis", ECCV 2020.

    Example:
        >>> import torch, nearfar as nf
        >>> labels = torch.tensor([0, 0, 1, 1])
        >>> loss = nf.losses.ProxyNCA(num_classes=2, dim=4)
        >>> loss(torch.eye(4), labels).backward()
        >>> loss.proxies.grad.shape
        torch.Size([2, 4])
    """

    key = "proxy_nca"
    source = "Thesis 2.27–2.28, RLL 5"
    cuda_graph = True
    deterministic = True
    mean_over_anchors = True

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
