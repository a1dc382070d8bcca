"""Softmax of cosines."""

from nearfar.losses.base import register
from nearfar.losses.proxies import ClassificationLoss
from nearfar.utils.validation import positive


@register("normalized_softmax", "Group Loss [52]")
class NormalizedSoftmax(ClassificationLoss):
    """Classifies by the cosine to the proxy of each class.

    Formula:
        ℓ_i = −log e^(cos(x_i, w_y) / temperature) / Σ_c e^(cos(x_i, w_c) / temperature)

    Args:
        temperature: τ, the divisor of the cosines.

    Reference:
        Zhai and Wu, "Classification is a Strong Baseline for Deep Metric Learning", BMVC 2019. Group Loss [52].

    Example:
        >>> import torch, nearfar as nf
        >>> loss = nf.losses.NormalizedSoftmax(num_classes=2, dim=4)
        >>> loss(torch.eye(4), torch.tensor([0, 0, 1, 1])).backward()
    """

    cuda_graph = deterministic = mean_over_anchors = True

    def __init__(
        self,
        *,
        num_classes: int,
        dim: int,
        temperature: float = 0.05,
        sample_rate: float = 1.0,
        lr_multiplier: float = 10.0,
    ) -> None:
        super().__init__(num_classes, dim, sample_rate, lr_multiplier)
        self.temperature = positive("temperature", temperature)

    @property
    def sharpness(self) -> float:
        return 1.0 / self.temperature
