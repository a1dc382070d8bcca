"""Soft histograms: a value is shared between the two nodes around it, so that counts have a derivative."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import pad


class SoftHistograms:
    """Histograms of the negatives and of the positives of each row, over ``bins`` + 1 evenly spaced nodes.

    A value is shared linearly between its two neighboring nodes; a value beyond an end counts for that end. No tensor
    of size pairs × bins is created: a value is stored as the node below it and the share of the node above.
    """

    def __init__(self, values: Tensor, pos: Tensor, neg: Tensor, *, low: float, high: float, bins: int) -> None:
        self.nodes = bins + 1
        self.nodes_per_unit = bins / (high - low)
        place = values.detach() * self.nodes_per_unit
        if low:
            place -= low * self.nodes_per_unit
        below = place.long().clamp_(0, bins - 1)  # NaN becomes any number, but never an invalid index
        self._share_above = place.sub_(below).clamp_(0.0, 1.0)
        # First the nodes of negatives, then those of positives, then one for the pairs that are neither.
        self._below = below.add_(pos, alpha=self.nodes).masked_fill_(pos == neg, 2 * self.nodes)

    def counts(self) -> Tensor:
        """Return the count at each node, [a, 2, nodes]: negatives first."""
        zeros = self._share_above.new_zeros(len(self._below), 2, 2 * self.nodes + 1)
        above = zeros[:, 0].scatter_add_(1, self._below, self._share_above)
        below = zeros[:, 1].scatter_add_(1, self._below, 1.0 - self._share_above)
        below[:, 1:] += above[:, :-1]
        return below[:, : 2 * self.nodes].reshape(-1, 2, self.nodes)

    def sums(self) -> Tensor:
        """Return the counts of all rows together, [2, nodes]: negatives first."""
        return self.counts().sum(dim=0)

    def weights(self, slopes: Tensor) -> Tensor:
        """Return derivatives by the values, [a, n], from those by ``counts()`` or by ``sums()``."""
        steps = slopes.flatten(-2).diff(dim=-1).mul_(self.nodes_per_unit)
        steps = pad(steps, (0, 2))  # nothing is above the last node, and pairs that are neither have weight 0
        return steps.expand(len(self._below), -1).gather(1, self._below)


def running_sum(counts: Tensor, *, backwards: bool = False) -> Tensor:
    """Sum the nodes up to each one, [..., nodes], or from each one on.

    This is a product with a triangle of ones: cheap for few nodes, and ``torch.cumsum`` has no deterministic
    implementation on a GPU.
    """
    ones = counts.new_ones(counts.shape[-1], counts.shape[-1])
    return counts @ (ones.tril_() if backwards else ones.triu_())
