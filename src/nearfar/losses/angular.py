"""Angular loss."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import softplus

from nearfar.engine import FLOOR, LossComputation, differentiable, masks, measure, propagate_nan
from nearfar.engine.autograd import Gradients, Needed, Tensors
from nearfar.losses.base import Loss
from nearfar.losses.registry import register
from nearfar.utils.validation import number

# Σ_n e^(4 t² s_an) e^(4 t² s_pn), each factor relative to the largest of its row, is at least e^(−8 t²): with
# t = tan 70° that is 6e-27, far above the smallest float32 number.
LARGEST_ANGLE = 70.0
CPU_BLOCK_ROWS = 192  # rows of whole classes that are computed at once


@register
class Angular(Loss):
    """Bounds the angle at the negative in the triangle that it forms with a positive pair.

    Formula:
        t = tan(angle);  mean over all positive pairs (i, j), with N_i = N_j, of
        log(1 + Σ_{k∈N_i} e^(4 t² (e_i + e_j)·e_k − 2 (1 + t²) e_i·e_j))

    Args:
        angle: α in degrees, at most 70.

    Differences:
        The loss depends on similarities between positives and negatives, so it is no function of the anchor's row and
        has no pair weights. With a gallery, positives and negatives both come from the gallery. All rows of a class
        are needed at once: memory is that of a few classes on a CPU, and that of all pairs on a GPU, including pairs
        within the gallery. Common implementations do not normalize the negatives.

    Reference:
        Wang et al., "Deep Metric Learning with Angular Loss", ICCV 2017.

    Example:
        >>> import torch, nearfar as nf
        >>> labels = torch.tensor([0, 0, 1, 1])
        >>> nf.losses.Angular(angle=45.0)(torch.eye(4), labels)
        tensor(1.0986)
    """

    key = "angular"
    source = "Wang et al. 2017"
    cuda_graph = deterministic = True

    def __init__(self, *, angle: float = 40.0) -> None:
        super().__init__()
        self.angle = number("angle", angle, low=0.0, high=LARGEST_ANGLE, open_low=True)

    def compute(
        self,
        embeddings: Tensor,
        labels: Tensor,
        gallery: Tensor | None,
        gallery_labels: Tensor,
        positions: Tensor | None,
    ) -> Tensor:
        constants = (labels, None if gallery is None else gallery_labels, positions)
        pairs = len(labels) * len(gallery_labels) + (0 if gallery is None else len(gallery) ** 2)
        computation = LossComputation(self._value_and_gradients, constants, self, self.graph_key, pairs)
        return differentiable(computation, (embeddings, gallery))

    def _value_and_gradients(self, inputs: Tensors, constants: Tensors, needed: Needed) -> tuple[Tensor, Gradients]:
        """The loss and the gradients by embeddings and gallery, computed one block of classes at a time."""
        (embeddings, gallery), (labels, gallery_labels, positions) = inputs, constants
        assert embeddings is not None
        assert labels is not None
        square = math.tan(math.radians(self.angle)) ** 2
        push, pull = 4.0 * square, 2.0 * (1.0 + square)
        cosine = measure("cosine")
        anchors = columns = cosine.prepare(embeddings)
        by_anchors = by_columns = torch.zeros_like(embeddings)
        column_labels = labels
        if gallery is None or gallery_labels is None:
            positions = torch.arange(len(labels), device=labels.device)
        else:
            columns, by_columns, column_labels = cosine.prepare(gallery), torch.zeros_like(gallery), gallery_labels
        total, count = embeddings.new_zeros(()), embeddings.new_zeros(())
        for rows, others in blocks(labels, gallery_labels):
            some, theirs = anchors.points[rows], columns.points[others]
            pos, neg = masks(labels[rows], column_labels, None if positions is None else positions[rows])
            pos, sim = pos[:, others], some @ columns.points.T
            near = sim[:, others]
            here = there = _exponentials(sim, neg, push)
            if gallery is not None:
                neg = column_labels[others].unsqueeze(1) != column_labels
                there = _exponentials(theirs @ columns.points.T, neg, push)
            value, share, slopes = _pairs(near, here, there, pos, pull)
            total += value
            count += pos.sum()
            if any(needed):
                # Without a gallery the pair (j, i) has the same terms as (i, j).
                weights = (slopes @ there.powers).mul_(here.powers).mul_(2.0 * push if gallery is None else push)
                weights.index_add_(1, others, share, alpha=-pull)
                by_anchors[rows] += weights @ columns.points
                if gallery is None or needed[1]:
                    by_columns += weights.T @ some
            if needed[1]:
                weights = (slopes.T @ here.powers).mul_(there.powers).mul_(push)
                by_columns[others] += weights @ columns.points
                by_columns += weights.T @ theirs
        factor = count.clamp_(min=1.0).reciprocal_()
        loss = propagate_nan(total * factor, anchors, columns)
        by_embeddings = cosine.to_embeddings(by_anchors.mul_(factor), anchors) if needed[0] else None
        return loss, [by_embeddings, cosine.to_embeddings(by_columns.mul_(factor), columns) if needed[1] else None]


class _Exponentials(NamedTuple):
    powers: Tensor  # [a, n], e^(scale (s − top)) for the negatives, 0 elsewhere
    top: Tensor  # [a, 1], scale · the largest


def _exponentials(sim: Tensor, neg: Tensor, scale: float) -> _Exponentials:
    """Exponentials of the similarities, computed in place."""
    sim.masked_fill_(~neg, FLOOR)
    top = sim.amax(dim=1, keepdim=True).clamp_(min=-1.0)  # −1 for an empty set, where any number will do
    return _Exponentials(sim.sub_(top).mul_(scale).exp_(), top.mul_(scale))


def _pairs(
    near: Tensor, here: _Exponentials, there: _Exponentials, pos: Tensor, pull: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Σ log(1 + e^x) over the positive pairs, its derivatives by x, [a, p], and by the products of the powers.

    The sum over the negatives that two rows have in common is the product of the rows. ``near`` is overwritten.
    """
    products = here.powers @ there.powers.T
    nothing = ~(pos & (products > 0))
    logits = near.mul_(-pull).add_(here.top).add_(there.top.T).add_(products.log()).masked_fill_(nothing, FLOOR)
    value, share = softplus(logits).sum(), logits.sigmoid_()
    return value, share, products.reciprocal_().mul_(share).masked_fill_(nothing, 0.0)


def blocks(labels: Tensor, gallery_labels: Tensor | None) -> list[tuple[Tensor, Tensor]]:
    """Split the batch into blocks of whole classes: their anchors, and the columns that hold all their positives.

    On a GPU all classes are one block, since the host would have to wait for the sizes of the classes.
    """
    anchors = columns = torch.arange(len(labels), device=labels.device)
    if gallery_labels is not None:
        columns = torch.arange(len(gallery_labels), device=labels.device)
    if labels.device.type != "cpu" or len(anchors) + len(columns) <= 2 * CPU_BLOCK_ROWS:
        return [(anchors, columns)]
    joined = labels
    if gallery_labels is not None:
        columns = torch.isin(gallery_labels, joined).nonzero().flatten()
        joined = torch.cat([joined, gallery_labels[columns]])
    ordered, order = joined.sort()
    _, sizes = torch.unique_consecutive(ordered, return_counts=True)
    heights = torch.bincount((sizes.cumsum(0) - 1) // CPU_BLOCK_ROWS, sizes).long().tolist()
    parts = [part for part in torch.split(order, heights) if len(part)]
    if gallery_labels is None:
        return [(part, part) for part in parts]
    return [(part[part < len(labels)], columns[part[part >= len(labels)] - len(labels)]) for part in parts]
