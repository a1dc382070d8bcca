"""Nonlinear rank approximation loss."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from nearfar.engine import Mean, Tile, masked
from nearfar.losses.base import PairLoss, register
from nearfar.utils.validation import positive


@register("nra", "NRA 6–13")
class NRA(PairLoss):
    """Compares approximate ranks of the farthest positive and the nearest negative; embeddings are not normalized.

    Formula:
        r = (d − d_min) / (d_max − d_min) over the anchor's row
        w(r) = ½ (2r)^alpha for r < ½, 1 − ½ (2(1 − r))^alpha otherwise;  s = 1 − w(r)
        loss = −mean of log(s⁺ + epsilon) + log(1 − s⁻ + epsilon)

    Args:
        alpha: Steepness of w at r = ½.
        epsilon: Bounds the loss of a pair.

    Differences:
        Anchors without a positive or without a negative are left out. If all distances are equal, r = 0 without a
        gradient. The gradient flows through all four distances, so the nearest and the farthest neighbor can be moved
        against their class: their pair weight is then negative. Of several equal distances the gradient moves one pair.
        Normalize embeddings for evaluation.

    Reference:
        Schall et al., "Deep Metric Learning using Similarities from Nonlinear Rank Approximations", 2019. NRA 6–13.

    Example:
        >>> import torch, nearfar as nf
        >>> points, labels = torch.tensor([[0.0], [1.0], [3.0], [5.0]]), torch.tensor([0, 0, 1, 1])
        >>> nf.losses.NRA(alpha=4.0)(points, labels)
        tensor(3.0802)
    """

    cuda_graph = deterministic = True
    measure = "euclidean"
    normalize = False

    def __init__(self, *, alpha: float = 4.0, epsilon: float = 1e-4) -> None:
        super().__init__()
        self.alpha, self.epsilon = positive("alpha", alpha), positive("epsilon", epsilon)

    @property
    def selects_columns(self) -> bool:  # type: ignore[override]
        return type(self) is NRA  # a subclass may use other pairs

    def select_columns(self, tile: Tile) -> Tensor:
        """Return the columns of the four distances, [a, 4]."""
        return _ends(tile.values, tile.positives, tile.negatives)

    def rows(self, sim: Tensor, pos: Tensor, neg: Tensor) -> Sequence[Mean]:
        complete = pos.any(dim=1) & neg.any(dim=1)
        nearest, farthest, positive, negative = sim.gather(1, _ends(sim.detach(), pos, neg)).unbind(dim=1)
        spread = masked(farthest - nearest, farthest > nearest, math.inf)
        similar = 1 - self.transfer((positive - nearest) / spread)
        confused = 1 - self.transfer((negative - nearest) / spread)
        loss = self.cost(similar) + self.cost(1 - confused)
        return [Mean(masked(loss, complete), complete.to(sim.dtype))]

    def transfer(self, rank: Tensor) -> Tensor:
        """Return w(r), the dissimilarity for a rank."""
        return torch.where(rank < 0.5, self._half(rank), 1 - self._half(1 - rank))

    def _half(self, part: Tensor) -> Tensor:
        """½ (2x)^alpha; 0 without a gradient at x = 0, where the slope is infinite if alpha < 1, and beyond ½."""
        inside = (part > 0) & (part <= 0.5)  # the unused half would overflow
        return masked(0.5 * (2 * masked(part, inside, 0.5)) ** self.alpha, inside)

    def cost(self, similarity: Tensor) -> Tensor:
        """Return −log(s + epsilon), the loss for a similarity that should be one."""
        return -(similarity + self.epsilon).log()


def _ends(distances: Tensor, pos: Tensor, neg: Tensor) -> Tensor:
    """The columns of the nearest and the farthest neighbor, the farthest positive and the nearest negative, [a, 4].

    Any column if there is no such neighbor.
    """
    known = pos | neg
    ends = (
        masked(distances, known, math.inf).argmin(dim=1),
        masked(distances, known, -math.inf).argmax(dim=1),
        masked(distances, pos, -math.inf).argmax(dim=1),
        masked(distances, neg, math.inf).argmin(dim=1),
    )
    return torch.stack(ends, dim=1)
