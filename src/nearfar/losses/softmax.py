"""Softmax cross-entropy, as a classifier is trained."""

from nearfar.losses.base import register
from nearfar.losses.proxies import ClassificationLoss


@register("softmax", "Thesis 2.25–2.26")
class Softmax(ClassificationLoss):
    """Classifies embeddings with a linear layer, without normalization.

    Formula:
        ℓ_i = −log e^(w_y·x_i) / Σ_c e^(w_c·x_i)

    Differences:
        The layer has no bias, as in the formula: retrieval has no classes that a bias could belong to.

    Reference:
        Zhai and Wu, "Classification is a Strong Baseline for Deep Metric Learning", BMVC 2019. Thesis 2.25–2.26.

    Example:
        >>> import torch, nearfar as nf
        >>> loss = nf.losses.Softmax(num_classes=2, dim=4)
        >>> loss(torch.eye(4), torch.tensor([0, 0, 1, 1])).backward()
    """

    cuda_graph = deterministic = mean_over_anchors = True
    normalize = False

    def __init__(self, *, num_classes: int, dim: int, sample_rate: float = 1.0, lr_multiplier: float = 10.0) -> None:
        super().__init__(num_classes, dim, sample_rate, lr_multiplier)
