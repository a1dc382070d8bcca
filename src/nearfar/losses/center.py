"""Center loss."""

import torch
from torch import Tensor

from nearfar.losses.base import register
from nearfar.losses.proxies import ProxyLoss


@register("center", "Wen et al. 2016")
class Center(ProxyLoss):
    """Pulls embeddings to a learned center of their class; use it together with a loss that separates classes.

    Formula:
        loss = ½ mean of ‖x_i − c_y‖², of embeddings and centers that are not normalized

    Args:
        lr_multiplier: Learning rate of the proxies, which are the centers, divided by that of the network.

    Differences:
        The paper sums over the batch and moves each center by half of its mean difference to its embeddings; here the
        optimizer moves centers along the derivative. Alone, the loss is least if all embeddings are equal. The paper
        adds it to ``softmax`` with a weight of 0.003: see ``MultipleLosses``.

    Reference:
        Wen et al., "A Discriminative Feature Learning Approach for Deep Face Recognition", ECCV 2016.

    Example:
        >>> import torch, nearfar as nf
        >>> loss = nf.losses.Center(num_classes=2, dim=4)
        >>> loss(torch.eye(4), torch.tensor([0, 0, 1, 1])).backward()
    """

    cuda_graph = deterministic = mean_over_anchors = True

    def __init__(self, *, num_classes: int, dim: int, lr_multiplier: float = 10.0) -> None:
        super().__init__(num_classes, dim, lr_multiplier)

    def against_proxies(self, embeddings: Tensor, labels: Tensor, proxies: Tensor) -> Tensor:
        return self.differentiate(_distances, (embeddings, proxies), (labels,), static=(1,))


def _distances(embeddings: Tensor, proxies: Tensor, labels: Tensor) -> Tensor:
    """½ mean ‖x − c‖²; NaN if it overflows."""
    centers = proxies.gather(0, labels.unsqueeze(1).expand_as(embeddings))
    value = 0.5 * (embeddings - centers).square().sum(dim=1).mean()
    return torch.add(value, value.detach(), alpha=0.0)
