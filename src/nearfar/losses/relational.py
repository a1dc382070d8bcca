"""Relational knowledge distillation: a student keeps the distances and angles of a teacher."""

import torch
from torch import Tensor, nn
from torch.nn.functional import smooth_l1_loss

from nearfar.engine import unit
from nearfar.utils.validation import non_negative


class RelationalDistillation(nn.Module):
    """Compares the relations within a batch of embeddings with those of a teacher.

    The teacher may have embeddings of another dimension. It gets no gradient. This loss needs no labels, so it is not
    one of the registered losses; add it to any of them in a training loop of your own.

    Formula:
        distances: mean over pairs of Huber(d_ij / mean d, D_ij / mean D)
        angles:    mean over triplets of Huber(cos ∠(i, j, k), cos ∠(I, J, K)), with the angle at j
        loss = distance · distances + angle · angles

    Args:
        distance: Weight of the distances. The paper uses 1 for metric learning.
        angle: Weight of the angles. The paper uses 2 for metric learning.

    Differences:
        Pairs of equal embeddings have no direction: their angles have a cosine of 0 and no gradient. Memory grows with
        the cube of the batch.

    Reference:
        Park et al., "Relational Knowledge Distillation", CVPR 2019. Group Loss Table 2.

    Example:
        >>> teacher = torch.eye(4)
        >>> RelationalDistillation()(2.0 * teacher, teacher)
        tensor(0.)
    """

    def __init__(self, *, distance: float = 1.0, angle: float = 2.0) -> None:
        super().__init__()
        self.distance, self.angle = non_negative("distance", distance), non_negative("angle", angle)

    def forward(self, student: Tensor, teacher: Tensor) -> Tensor:
        """Return the loss of a batch, a scalar.

        Args:
            student: Embeddings [m, d] to train.
            teacher: Embeddings [m, e] of the same images by the teacher.
        """
        if student.ndim != 2 or teacher.ndim != 2 or len(student) != len(teacher):
            raise ValueError(
                f"student has shape {tuple(student.shape)} and teacher {tuple(teacher.shape)}; needed are [m, d] and "
                "[m, e]"
            )
        teacher = teacher.detach().to(student.dtype)
        total = student.sum() * 0.0
        if len(student) < 2:
            return total
        if self.distance:
            total = total + self.distance * smooth_l1_loss(_distances(student), _distances(teacher))
        if self.angle and len(student) > 2:
            total = total + self.angle * _angle_gap(student, teacher)
        return total


def _distances(points: Tensor) -> Tensor:
    """Distances of all pairs divided by their mean, [m (m − 1)]."""
    count = len(points)
    others = ~torch.eye(count, dtype=torch.bool, device=points.device)
    squares = (points.unsqueeze(1) - points).square().sum(dim=2)[others]
    apart = squares > 0
    lengths = torch.where(apart, torch.where(apart, squares, 1.0).sqrt(), 0.0)
    mean = lengths.sum() / apart.sum().clamp(min=1)
    return lengths / torch.where(mean > 0, mean, 1.0)


def _angle_gap(student: Tensor, teacher: Tensor) -> Tensor:
    """The mean Huber loss of the cosines of all angles i, j, k of three different points."""
    cosines = []
    for points in (student, teacher):
        sides = unit(points.unsqueeze(0) - points.unsqueeze(1))  # [j, i, d], from j to i
        cosines.append(sides @ sides.transpose(1, 2))  # [j, i, k]
    same = torch.eye(len(student), dtype=torch.bool, device=student.device)
    three = ~(same.unsqueeze(0) | same.unsqueeze(1) | same.unsqueeze(2))
    return smooth_l1_loss(cosines[0][three], cosines[1][three])
