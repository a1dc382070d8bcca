"""Group loss: similar samples of a batch refine each other's labels."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, log_softmax

from nearfar.engine import masked, unit
from nearfar.engine.rows import FLOOR
from nearfar.losses.base import register
from nearfar.losses.proxies import ProxyLoss
from nearfar.utils.validation import non_negative, one_of, positive, whole

SIMILARITIES = ("correlation", "cosine", "gaussian", "learned")
SMALLEST_SUPPORT = 1e-30  # a class without support adds about 69 to the loss in each iteration, not infinity


@register("group", "Group Loss 1–7")
class Group(ProxyLoss):
    """Classifies each sample after similar samples of the batch have refined its label.

    Formula:
        X = softmax(w_c·x_i / temperature), one-hot for a few random anchors of each class
        W = similarity of the embeddings, 0 where negative and on the diagonal
        correlation: Pearson's;  cosine: cos(x_i, x_j);  gaussian: e^(−‖x_i − x_j‖² / (2 bandwidth²))
        learned: correlation of M x_i and M x_j, M a square matrix that is trained
        iterations times:  Π = W X,  X ← X∘Π, each row divided by its sum
        loss = −mean log X_iy over all but the anchors  +  classification_weight · cross-entropy of w_c·x_i

    Args:
        iterations: T, the number of refinements.
        temperature: τ of the softmax.
        anchors_per_class: Samples of each class whose labels are given. The paper's best values are 1 or 2 of 9.
        similarity: "correlation", which the paper uses, or one of those it mentions: "cosine", "gaussian", "learned".
        bandwidth: σ of "gaussian", in units of the distance of raw embeddings.
        keep_diagonal: True: a sample also supports itself, as in the authors' code.
        average_over: "rest": samples that are no anchors; "all": anchors count with a loss of 0, as in the authors'
            code.
        classification_weight: Weight of the plain cross-entropy. 0 in the paper.

    Differences:
        The linear layer has no bias. Support below 1e-30 is raised to 1e-30, so that no loss is infinite; a sample that
        is similar to no other keeps its X. An embedding whose coordinates are all equal is similar to none. The paper
        first trains with softmax alone for ten epochs. It does not say how a similarity would be learned; M starts as
        the identity, where "learned" is "correlation", and learns with the rate of the proxies.

    Reference:
        Elezi et al., "The Group Loss for Deep Metric Learning", ECCV 2020. Group Loss 1–7.

    Example:
        >>> import torch, nearfar as nf
        >>> loss = nf.losses.Group(num_classes=2, dim=4)
        >>> loss(torch.eye(4), torch.tensor([0, 0, 1, 1])).backward()
    """

    cuda_graph = True
    fixed = (*ProxyLoss.fixed, "similarity")

    def __init__(
        self,
        *,
        num_classes: int,
        dim: int,
        iterations: int = 2,
        temperature: float = 1.0,
        anchors_per_class: int = 1,
        similarity: str = "correlation",
        bandwidth: float = 1.0,
        keep_diagonal: bool = False,
        average_over: str = "rest",
        classification_weight: float = 0.0,
        lr_multiplier: float = 10.0,
    ) -> None:
        super().__init__(num_classes, dim, lr_multiplier)
        self.iterations = whole("iterations", iterations)
        self.temperature = positive("temperature", temperature)
        self.anchors_per_class = whole("anchors_per_class", anchors_per_class, low=0)
        self.similarity = one_of("similarity", similarity, SIMILARITIES)
        self.bandwidth = positive("bandwidth", bandwidth)
        self.projection = nn.Parameter(torch.eye(self.dim)) if similarity == "learned" else None
        self.keep_diagonal = bool(keep_diagonal)
        self.average_over = one_of("average_over", average_over, ("rest", "all"))
        self.classification_weight = non_negative("classification_weight", classification_weight)

    def draw_anchors(self, labels: Tensor) -> Tensor:
        """Draw the mask of the anchors, [m]: ``anchors_per_class`` of each class, or all of its samples."""
        chance = torch.rand(len(labels), dtype=torch.float64, device=labels.device)  # no two are equal
        before = (labels.unsqueeze(1) == labels) & (chance.unsqueeze(1) > chance)
        return before.sum(dim=1) < self.anchors_per_class

    def param_groups(self, lr: float) -> list[dict[str, Any]]:
        groups = super().param_groups(lr)
        return groups if self.projection is None else [{**groups[0], "params": [self.proxies, self.projection]}]

    def against_proxies(self, embeddings: Tensor, labels: Tensor, proxies: Tensor) -> Tensor:
        projection = None if self.projection is None else self.projection.to(proxies.dtype)
        constants = labels, self.draw_anchors(labels)
        return self.differentiate(self._loss, (embeddings, proxies, projection), constants, static=(1, 2))

    def _loss(
        self, embeddings: Tensor, proxies: Tensor, projection: Tensor | None, labels: Tensor, anchors: Tensor
    ) -> Tensor:
        logits, column = embeddings @ proxies.T, labels.unsqueeze(1)
        one_hot = torch.full_like(logits, FLOOR).scatter_(1, column, 0.0)
        assignment = torch.where(anchors.unsqueeze(1), one_hot, log_softmax(logits / self.temperature, dim=1))
        assignment = _refine(self._similarity(embeddings, projection), assignment, self.iterations)
        # An anchor keeps its label: its term is 0, and so is its gradient.
        count = (~anchors).sum().clamp(min=1) if self.average_over == "rest" else len(labels)
        loss = -assignment.gather(1, column).sum() / count
        if self.classification_weight:
            loss = loss + self.classification_weight * cross_entropy(logits, labels)
        return loss

    def _similarity(self, embeddings: Tensor, projection: Tensor | None) -> Tensor:
        """W, [m, m]."""
        if self.similarity in ("correlation", "learned"):
            return correlation(embeddings if projection is None else embeddings @ projection.T, self.keep_diagonal)
        if self.similarity == "cosine":
            points = unit(embeddings)
            similarity = (points @ points.T).relu()
        else:
            centered = embeddings - embeddings.mean(dim=0)
            lengths = centered.square().sum(dim=1)
            squares = torch.addmm(lengths.unsqueeze(1) + lengths, centered, centered.T, alpha=-2.0).clamp(min=0.0)
            # 0 · ∞ is NaN: a length that overflows is noticed.
            similarity = (squares / (-2.0 * self.bandwidth**2)).exp().add(lengths, alpha=0.0)
        diagonal = torch.eye(len(similarity), dtype=torch.bool, device=similarity.device)
        return similarity if self.keep_diagonal else similarity.masked_fill(diagonal, 0.0)


def correlation(embeddings: Tensor, keep_diagonal: bool = False) -> Tensor:
    """Return Pearson correlations of embeddings, [m, m], with 0 for negative ones and (unless kept) the diagonal."""
    centered = embeddings - embeddings.mean(dim=1, keepdim=True)
    spread, size = (torch.linalg.vector_norm(part, dim=1, keepdim=True) for part in (centered, embeddings))
    # A spread this small is the rounding error of the mean. NaN and infinity are kept, so that they are noticed.
    flat = (spread <= 8 * torch.finfo(size.dtype).eps * size) & size.isfinite()
    points = unit(masked(centered, ~flat))
    similarity = points @ points.T
    return (similarity if keep_diagonal else similarity.fill_diagonal_(0.0)).relu()


def refine(similarity: Tensor, assignment: Tensor, steps: int) -> Tensor:
    """Apply the replicator dynamics X ← X∘(WX), each row divided by its sum."""
    smallest = torch.finfo(assignment.dtype).tiny
    logarithm = masked(assignment.clamp(min=smallest).log(), assignment > 0, FLOOR)
    return _refine(similarity, logarithm, steps).exp()


def _refine(similarity: Tensor, assignment: Tensor, steps: int) -> Tensor:
    """The same for log X, where X∘Π divided by its sum is softmax(log X + log Π)."""
    for _ in range(steps):
        # One floor for all classes: a row without any support keeps its X.
        support = (similarity @ assignment.exp()).clamp(min=SMALLEST_SUPPORT)
        assignment = log_softmax(assignment + support.log(), dim=1)
    return assignment
