"""CosFace: a margin on the cosine."""

from torch import Tensor

from nearfar.losses.base import register
from nearfar.losses.proxies import ClassificationLoss
from nearfar.utils.validation import non_negative, positive


@register("cosface", "Wang et al. 2018")
class CosFace(ClassificationLoss):
    """Classifies by cosines, with a margin subtracted from the cosine to the own proxy.

    Formula:
        ℓ_i = −log e^(scale·(cos θ_y − margin)) / (e^(scale·(cos θ_y − margin)) + Σ_{c≠y} e^(scale·cos θ_c))

    Args:
        margin: Margin of the cosine. The paper uses 0.35.
        scale: s, the factor of the cosines. The paper uses 64.

    Reference:
        Wang et al., "CosFace: Large Margin Cosine Loss for Deep Face Recognition", CVPR 2018.

    Example:
        >>> import torch, nearfar as nf
        >>> loss = nf.losses.CosFace(num_classes=2, dim=4)
        >>> loss(torch.eye(4), torch.tensor([0, 0, 1, 1])).backward()
    """

    cuda_graph = deterministic = mean_over_anchors = True

    def __init__(
        self,
        *,
        num_classes: int,
        dim: int,
        margin: float = 0.35,
        scale: float = 64.0,
        sample_rate: float = 1.0,
        lr_multiplier: float = 10.0,
    ) -> None:
        super().__init__(num_classes, dim, sample_rate, lr_multiplier)
        self.margin = non_negative("margin", margin)
        self.scale = positive("scale", scale)

    def target(self, similarity: Tensor) -> tuple[Tensor, None]:
        return similarity - self.scale * self.margin, None
