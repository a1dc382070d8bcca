"""Lifted structure loss: the original, and the generalized form of later papers."""

from collections.abc import Sequence

import torch
from torch import Tensor

from nearfar.engine import Mean, Row, Tile, masked, row_logsumexp
from nearfar.engine.programs import Program, Sums, Terms
from nearfar.engine.rows import count, positive_columns
from nearfar.losses.base import ANY, PairLoss, register
from nearfar.mining import Choice
from nearfar.utils.validation import number

CHUNK = 1 << 21  # positives whose slopes are computed at once


@register("lifted_structure", "NRA 3, RLL 3")
class LiftedStructure(PairLoss):
    """Compares each positive pair with all negatives of both its members; embeddings are not normalized.

    Formula:
        J_ij = log(Σ_{k∈N_i} e^(margin − d_ik) + Σ_{l∈N_j} e^(margin − d_jl)) + d_ij
        loss = 1/(2·#pairs) Σ over unordered positive pairs of [J_ij]+²

    Args:
        margin: α, subtracted from the distances of negatives.
        squared: False: without the square, as printed in the Ranked List Loss paper.

    Differences:
        With a gallery, the negatives of a gallery embedding are the anchors of other classes.

    Reference:
        Oh Song et al., "Deep Metric Learning via Lifted Structured Feature Embedding", CVPR 2016. NRA 3, RLL 3.

    Example:
        >>> import torch, nearfar as nf
        >>> nf.losses.LiftedStructure(margin=1.0)(torch.eye(4), torch.tensor([0, 0, 1, 1]))
        tensor(2.8472)
    """

    cuda_graph = deterministic = True
    measure = "euclidean"
    normalize = False
    needs_column_values = True
    closed_form = True
    row_bytes = 16

    def __init__(self, *, margin: float = 1.0, squared: bool = True) -> None:
        super().__init__()
        self.margin = number("margin", margin)
        self.squared = bool(squared)

    def column_values(self, tile: Tile) -> Row:
        """Return log Σ_N e^(margin − d) of each row."""
        return row_logsumexp(tile.values, tile.negatives, -1.0) + self.margin

    def on_tile(self, tile: Tile) -> Sequence[Mean]:
        sums = self.column_values(tile)
        others = sums.value if tile.column_values is None else tile.column_values
        columns, filled = positive_columns(tile.positives)
        every = filled is tile.positives  # on a GPU, where every column has a slot
        ((scale, weights),) = sums.parts  # zero at the positives, so there is room for their slopes
        slopes = weights if every else torch.empty_like(filled, dtype=weights.dtype)
        total, by_own, by_others = torch.empty_like(sums.value), torch.empty_like(sums.value), torch.zeros_like(others)
        size = max(1, CHUNK // filled.shape[1])
        chunks = [slice(start, start + size) for start in range(0, len(filled), size)]
        for rows in chunks:
            here = sums.value[rows].unsqueeze(1)
            near = tile.values[rows] if every else tile.values[rows].gather(1, columns[rows])
            ends = others if every else others[columns[rows]]
            hinge = torch.logaddexp(here, ends).add_(near).relu_().mul_(filled[rows])
            if self.squared:
                total[rows] = 0.5 * torch.linalg.vector_norm(hinge, dim=1).square_()
            else:
                total[rows] = 0.5 * hinge.sum(dim=1)
                hinge.sign_().mul_(0.5)
            share = (here - ends).sigmoid_().mul_(hinge)
            by_own[rows] = share.sum(dim=1)
            other = torch.sub(hinge, share, out=share)
            if every:
                by_others += other.sum(dim=0)
                slopes[rows] += hinge
            else:
                by_others.index_add_(0, columns[rows].flatten(), other.flatten())
                slopes[rows] = hinge
        if tile.column_values is None:
            by_own += by_others
        by_own = scale * by_own.unsqueeze(1)
        if every:
            for rows in chunks:
                weights[rows] *= masked(by_own[rows], ~filled[rows], 1.0)
        else:
            weights.mul_(by_own).scatter_add_(1, columns, slopes)
        row = Row(total, [(1.0, weights)], by_column_values=None if tile.column_values is None else by_others)
        return [Mean(row, count(filled, total))]


@register("lifted_structure_generalized", "Thesis 2.21, Unified View 9")
class LiftedStructureGeneralized(PairLoss):
    """Compares the soft maximum of the positive distances with that of the negative similarities.

    Formula:
        ℓ_i = [log Σ_P e^(margin − s) + log Σ_N e^s]+

    Args:
        margin: λ, added to the difference.

    Differences:
        The Unified View prints a minus sign before the second logarithm, which contradicts the weights derived there;
        this is the form with those weights. The loss of an anchor without positives or without negatives is 0.

    Reference:
        Hermans et al., "In Defense of the Triplet Loss for Person Re-Identification", 2017. Thesis 2.21,
        Unified View 9.

    Example:
        >>> import torch, nearfar as nf
        >>> nf.losses.LiftedStructureGeneralized(margin=0.5)(torch.eye(4), torch.tensor([0, 0, 1, 1]))
        tensor(1.1931)
    """

    cuda_graph = deterministic = mean_over_anchors = True
    minings = ANY
    closed_form = True

    def __init__(self, *, margin: float = 0.5, mining: Choice = "all") -> None:
        super().__init__(mining)
        self.margin = number("margin", margin)

    def rows(self, sim: Tensor, pos: Tensor, neg: Tensor) -> Row:
        return (row_logsumexp(sim, pos, -1.0) + row_logsumexp(sim, neg) + self.margin).relu()

    def program(self) -> Program:
        def loss(pos: Sums, neg: Sums) -> Tensor:
            return (pos.log + neg.log + self.margin).relu().mean()

        return Program(Terms("linear", -1.0), Terms("linear"), loss)
