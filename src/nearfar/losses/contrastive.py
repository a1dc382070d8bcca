"""Contrastive loss."""

from collections.abc import Sequence

from torch import Tensor

from nearfar.engine import Mean, Row, masked, row_sum
from nearfar.engine.programs import Program, Sums, Terms, mean_over
from nearfar.engine.rows import count_nonzero, row_hinge
from nearfar.losses.base import ANY, PairLoss, register
from nearfar.mining import Choice
from nearfar.utils.validation import number, one_of

MARGINS = {"cosine": 0.5, "distance": 1.0, "snr": 1.0}
MEASURES = {"cosine": "cosine", "distance": "euclidean", "snr": "snr"}


@register("contrastive", "Thesis 2.15, Unified View 5, NRA 1")
class Contrastive(PairLoss):
    """Pulls every positive, and pushes the negatives that are too near.

    Formula:
        cosine:    ℓ_i = Σ_N [s − margin]+ − Σ_P s
        distance:  ℓ_i = Σ_P d² + Σ_N [margin − d]+²
        snr:       ℓ_i = Σ_P v + Σ_N [margin − v]+,  v = Var(x_i − x_j) / Var(x_i)

    Args:
        form: "cosine", or "distance" between unit vectors, or "snr", the signal-to-noise ratio: the variance of the
            coordinates of the difference, over that of the anchor.
        margin: λ = 0.5 for "cosine", α = 1 for "distance" and "snr".
        mining: Which pairs are used. "valid_triplet" with margin −1 gives every mined pair the same weight.
        average: "anchors": sum per anchor, mean over anchors, as printed. "pairs": positives and negatives are each
            divided by their number of non-zero terms.
        normalize: False: compare embeddings as they are, for "distance" as in NRA 1.

    Differences:
        Other libraries also apply a hinge to the positives, which adds a constant, and average over "pairs". The
        paper of "snr" also adds a regularizer: ``Regularized(loss, "zero_mean")``.

    Reference:
        Hadsell et al., "Dimensionality Reduction by Learning an Invariant Mapping", CVPR 2006. Thesis 2.15,
        Unified View 5, NRA 1.
        Yuan et al., "Signal-to-Noise Ratio: A Robust Distance Metric for Deep Metric Learning", CVPR 2019 (snr).

    Example:
        >>> import torch, nearfar as nf
        >>> nf.losses.Contrastive(form="distance")(torch.eye(4), torch.tensor([0, 0, 1, 1]))
        tensor(2.0000)
    """

    cuda_graph = deterministic = True
    closed_form = True
    minings = ANY
    fixed = ("form", "normalize")

    def __init__(
        self,
        *,
        form: str = "cosine",
        margin: float | None = None,
        mining: Choice = "all",
        average: str = "anchors",
        normalize: bool = True,
    ) -> None:
        one_of("form", form, tuple(MEASURES))
        super().__init__(mining, measure=MEASURES[form], normalize=normalize)
        self.form = form
        low = -1.0 if form == "cosine" else 0.0
        self.margin = number("margin", MARGINS[form] if margin is None else margin, low=low)
        self.average = one_of("average", average, ("anchors", "pairs"))

    @property
    def mean_over_anchors(self) -> bool:  # type: ignore[override]
        return self.average == "anchors"

    def rows(self, sim: Tensor, pos: Tensor, neg: Tensor) -> Row | Sequence[Mean]:
        beyond = sim - self.margin if self.form == "cosine" else self.margin - sim
        of_positives, of_negatives = masked(sim, pos), masked(beyond.relu_(), neg)
        if self.form == "distance":
            pull = row_sum(of_positives.square(), of_positives, 2.0)
            push, pushed = row_sum(of_negatives.square(), of_negatives, -2.0), count_nonzero(of_negatives)
        else:
            sign = -1.0 if self.form == "cosine" else 1.0
            pull, (push, pushed) = row_sum(of_positives, pos.to(sim.dtype)) * sign, row_hinge(of_negatives)
            push = push.chain(push.value, -sign)
        if self.average == "anchors":
            return pull + push
        return [Mean(pull, count_nonzero(of_positives)), Mean(push, pushed)]

    def program(self) -> Program:
        if self.form == "cosine":
            positives, negatives = Terms(total="linear", scale=-1.0), Terms(total="hinge", shift=-self.margin)
        else:
            positives = Terms(total="square")
            negatives = Terms(total="squared_hinge", scale=-1.0, shift=self.margin)

        def loss(pos: Sums, neg: Sums) -> Tensor:
            if self.average == "anchors":
                return (pos.total + neg.total).mean()
            return mean_over(pos.total, pos.active) + mean_over(neg.total, neg.active)

        return Program(positives, negatives, loss)
