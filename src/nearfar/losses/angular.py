"""Angular loss."""

import math
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import softplus

from nearfar.engine import LossBatch
from nearfar.engine.autograd import Gradients, LossComputation, Needed, Tensors, differentiable
from nearfar.engine.measures import create as measure
from nearfar.engine.measures import propagate_nan
from nearfar.engine.rows import FLOOR, masks
from nearfar.engine.tiles import plus_transposed
from nearfar.losses.base import Loss, register
from nearfar.utils.validation import number

# Σ_n e^(4 t² s_an) e^(4 t² s_pn), each factor relative to the largest of its row, is at least e^(−8 t²): with
# t = tan 70° that is 6e-27, far above the smallest float32 number.
LARGEST_ANGLE = 70.0
CPU_BLOCK_ROWS = 192  # rows of whole classes that are computed at once
BAND_ROWS = 64  # rows of a block of the band
BAND_FROM = 2048  # on a GPU, in smaller batches all pairs take less time than waiting for the size of the classes


@register("angular", "Wang et al. 2017")
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
        within the gallery. From a batch of 2,048 on without a gallery, the host waits for a GPU once in every step.
        Common implementations do not normalize the negatives.

    Reference:
        Wang et al., "Deep Metric Learning with Angular Loss", ICCV 2017.

    Example:
        >>> import torch, nearfar as nf
        >>> nf.losses.Angular(angle=45.0)(torch.eye(4), torch.tensor([0, 0, 1, 1]))
        tensor(1.0986)
    """

    cuda_graph = deterministic = True

    def __init__(self, *, angle: float = 40.0) -> None:
        super().__init__()
        self.angle = number("angle", angle, low=0.0, high=LARGEST_ANGLE, open_low=True)

    def compute(self, batch: LossBatch) -> Tensor:
        embeddings, labels, gallery = batch.embeddings, batch.labels, batch.gallery
        if gallery is None and can_wait(labels) and len(labels) >= BAND_FROM:
            ordered, order = labels.sort()
            first = torch.searchsorted(ordered, ordered)
            reach = int((torch.searchsorted(ordered, ordered, right=True) - first).max()) - 1
            rows = max(BAND_ROWS, reach)
            if 2 * (rows + 2 * reach) <= len(labels):
                band = partial(self._banded, rows, reach)
                return differentiable(LossComputation(band, (first, order)), (embeddings,))
        constants = labels, batch.gallery_labels, batch.positions
        pairs = len(labels) * len(batch.columns) + (0 if gallery is None else len(gallery) ** 2)
        computation = LossComputation(self._value_and_gradients, constants, self, self.graph_key, pairs)
        return differentiable(computation, (embeddings, gallery))

    def _factors(self) -> tuple[float, float]:
        square = math.tan(math.radians(self.angle)) ** 2
        return 4.0 * square, 2.0 * (1.0 + square)

    def _banded(
        self, rows: int, reach: int, inputs: Tensors, constants: Tensors, needed: Needed
    ) -> tuple[Tensor, Gradients]:
        """The loss and the gradient by the embeddings of a batch whose classes have at most ``reach`` + 1 members.

        The constants are the first member of each embedding's class, in the order of the classes, and this order.
        In it, all positives of a row are at most ``reach`` rows away. So the products of two rows, which would take
        most of the time, are computed in blocks of ``rows`` rows and their neighbors only.
        """
        (embeddings,), (first, order) = inputs, constants
        assert embeddings is not None
        assert first is not None
        assert order is not None
        push, pull = self._factors()
        cosine = measure("cosine")
        anchors = cosine.prepare(embeddings)
        height = len(order)
        band = _Band(height, rows, reach)
        points = band.pad(anchors.points[order])
        inner = points[band.inside]
        powers = band.empty(inner, height)
        sim = torch.mm(inner * push, inner.T, out=powers[band.inside])
        same = first.unsqueeze(1) == first
        tops = band.pad(_exponentials(sim, same).top)
        del same
        classes = band.pad(first + 1)  # 0 beyond the batch
        of_rows = band.blocks(classes).unsqueeze(2)
        pos = (of_rows == band.windows(classes).unsqueeze(1)) & (of_rows > 0)
        pos.diagonal(reach, dim1=1, dim2=2).fill_(False)
        here = _Exponentials(band.blocks(powers), band.blocks(tops))
        there = _Exponentials(band.windows(powers), band.windows(tops))
        near = band.blocks(points) @ band.windows(points).mT
        value, share, slopes = _pairs(near, here, there, pos, pull)
        factor = pos.sum(dtype=near.dtype).clamp_(min=1.0).reciprocal_()
        loss = propagate_nan(value * factor, anchors, anchors)
        if not needed[0]:
            return loss, [None]
        # The pair (j, i) has the same terms as (i, j).
        weights = (slopes.mul_(2.0 * push) @ there.powers).flatten(0, 1)[:height].mul_(sim)
        by_points = (share.mul_(-2.0 * pull) @ band.windows(points)).flatten(0, 1)[:height]
        del powers, sim, here, there
        by_points.addmm_(plus_transposed(weights), inner).mul_(factor)
        gradient = torch.empty_like(by_points).index_copy_(0, order, by_points)
        return loss, [cosine.to_embeddings(gradient, anchors)]

    def _value_and_gradients(self, inputs: Tensors, constants: Tensors, needed: Needed) -> tuple[Tensor, Gradients]:
        """The loss and the gradients by embeddings and gallery, computed one block of classes at a time."""
        (embeddings, gallery), (labels, gallery_labels, positions) = inputs, constants
        assert embeddings is not None
        assert labels is not None
        push, pull = self._factors()
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
            anchor_points, column_points = anchors.points[rows], columns.points[others]
            pos, neg = masks(labels[rows], column_labels, None if positions is None else positions[rows])
            pos, sim = pos[:, others], anchor_points @ columns.points.T
            near = sim[:, others]
            here = there = _exponentials(sim.mul_(push), ~neg)
            if gallery is not None:
                neg = column_labels[others].unsqueeze(1) != column_labels
                there = _exponentials((column_points * push) @ columns.points.T, ~neg)
            value, share, slopes = _pairs(near, here, there, pos, pull)
            total += value
            count += pos.sum()
            if any(needed):
                # Without a gallery the pair (j, i) has the same terms as (i, j).
                weights = (slopes @ there.powers).mul_(here.powers).mul_(2.0 * push if gallery is None else push)
                weights.index_add_(1, others, share, alpha=-pull)
                by_anchors[rows] += weights @ columns.points
                if gallery is None or needed[1]:
                    by_columns += weights.T @ anchor_points
            if needed[1]:
                weights = (slopes.T @ here.powers).mul_(there.powers).mul_(push)
                by_columns[others] += weights @ columns.points
                by_columns += weights.T @ column_points
        factor = count.clamp_(min=1.0).reciprocal_()
        loss = propagate_nan(total * factor, anchors, columns)
        by_embeddings = cosine.to_embeddings(by_anchors.mul_(factor), anchors) if needed[0] else None
        return loss, [by_embeddings, cosine.to_embeddings(by_columns.mul_(factor), columns) if needed[1] else None]


class _Exponentials(NamedTuple):
    powers: Tensor  # [..., a, n], e^(s − top) for the negatives, 0 elsewhere
    top: Tensor  # [..., a, 1], the largest


def _exponentials(scaled: Tensor, others: Tensor) -> _Exponentials:
    """Exponentials of scaled similarities but those of ``others``, [a, n], computed in place."""
    scaled.masked_fill_(others, FLOOR)
    top = scaled.amax(dim=1, keepdim=True)
    top.masked_fill_(top == FLOOR, 0.0)  # an empty set, where any number will do
    return _Exponentials(scaled.sub_(top).exp_(), top)


class _Band:
    """Rows in blocks, and each block with the rows up to ``reach`` before and after it."""

    def __init__(self, height: int, rows: int, reach: int) -> None:
        self.rows, self.reach = rows, reach
        self.count = -(-height // rows)
        self.inside = slice(reach, reach + height)

    def empty(self, like: Tensor, *shape: int) -> Tensor:
        """Return a padded tensor whose padding is 0; ``inside`` is to be filled."""
        padded = like.new_empty(self.count * self.rows + 2 * self.reach, *shape)
        padded[: self.inside.start].zero_()
        padded[self.inside.stop :].zero_()
        return padded

    def pad(self, values: Tensor) -> Tensor:
        """Return the values, [m, ...], with zeros before and after them."""
        padded = self.empty(values, *values.shape[1:])
        padded[self.inside] = values
        return padded

    def blocks(self, padded: Tensor) -> Tensor:
        """Return the rows of each block, [blocks, rows, ...]."""
        return padded[self.reach : self.reach + self.count * self.rows].view(self.count, self.rows, *padded.shape[1:])

    def windows(self, padded: Tensor) -> Tensor:
        """Return the rows of each block and those around it, [blocks, rows + 2 reach, ...], as a view."""
        return padded.unfold(0, self.rows + 2 * self.reach, self.rows).movedim(-1, 1)


def _pairs(
    near: Tensor, here: _Exponentials, there: _Exponentials, pos: Tensor, pull: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Σ log(1 + e^x) over the positive pairs, its derivatives by x, [..., a, p], and by the products of the powers.

    The sum over the negatives that two rows have in common is the product of the rows. ``near`` is overwritten.
    """
    products = here.powers @ there.powers.mT
    nothing = ~(pos & (products > 0))
    logits = near.mul_(-pull).add_(here.top).add_(there.top.mT).add_(products.log()).masked_fill_(nothing, FLOOR)
    value, share = softplus(logits).sum(), logits.sigmoid_()
    return value, share, products.reciprocal_().mul_(share).masked_fill_(nothing, 0.0)


def can_wait(tensor: Tensor) -> bool:
    """Whether a tensor is on a GPU that the host can wait for: not while a CUDA graph is recorded."""
    return tensor.is_cuda and not torch.cuda.is_current_stream_capturing()


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
