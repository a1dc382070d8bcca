"""N-pair loss."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import Tensor
from torch.nn.functional import softplus

from nearfar.engine import Mean, Row, Tile, masked, row_logsumexp
from nearfar.engine.rows import FLOOR, positive_columns
from nearfar.losses.base import PairLoss, register
from nearfar.mining import Choice
from nearfar.utils.validation import non_negative, one_of

FORMS = ("per_positive", "pairs", "joint")


@register("n_pair", "Thesis 2.22, NRA 4, RLL 2")
class NPair(PairLoss):
    """Compares each positive with all negatives at once, by dot products of embeddings that are not normalized.

    Formula:
        per_positive:  mean over anchors i of the mean over j∈P_i of log(1 + Σ_{k∈N_i} e^(s_ik − s_ij))
        joint:         mean over anchors i of log(1 + Σ_{j∈P_i} Σ_{k∈N_i} e^(s_ik − s_ij))
        pairs:         mean over pairs (e_i, e_i⁺) of log(1 + Σ_{k≠i} e^(e_i·e_k⁺ − e_i·e_i⁺))
        all forms:     plus l2 · mean ‖e‖²

    Args:
        form: "pairs": the paper's, as in RLL 2 and NRA 4. The first two embeddings of each class are its pair. The
            first is an anchor; it is compared with the second and, as negatives, with the second of each other class.
            "joint": one logarithm for each anchor, as printed in Thesis 2.22. "per_positive": one for each positive.
        l2: Weight of the squared lengths. Nothing else keeps the embeddings small.

    Differences:
        In a batch of two embeddings per class, "per_positive" and "joint" are the same: every embedding is an anchor
        and has all 2(N − 1) embeddings of other classes as negatives. "pairs" has N anchors with N − 1 negatives. With
        a gallery, the columns of "pairs" are the second embeddings of each class in the gallery.

    Reference:
        Sohn, "Improved Deep Metric Learning with Multi-class N-pair Loss Objective", NIPS 2016. Thesis 2.22, NRA 4,
        RLL 2.

    Example:
        >>> import torch, nearfar as nf
        >>> nf.losses.NPair(l2=0.0)(torch.eye(4), torch.tensor([0, 0, 1, 1]))
        tensor(1.0986)
    """

    cuda_graph = deterministic = True
    measure = "dot"
    normalize = False
    closed_form = True
    fixed = ("form",)
    minings = ("all", "semi_hard", "hard", "valid_triplet", "random")

    def __init__(self, *, form: str = "per_positive", l2: float = 0.02, mining: Choice = "all") -> None:
        super().__init__(mining)
        self.form = one_of("form", form, FORMS)
        self.l2 = non_negative("l2", l2)

    @property
    def mean_over_anchors(self) -> bool:  # type: ignore[override]
        return self.form != "pairs"

    @property
    def needs_ordinals(self) -> bool:  # type: ignore[override]
        return self.form == "pairs"

    def on_tile(self, tile: Tile) -> Row | Sequence[Mean]:
        if tile.ordinals is not None:
            of_rows, of_columns = tile.ordinals
            paired = (of_rows == 0) & (of_columns == 1)
            tile = replace(tile, positives=tile.positives & paired, negatives=tile.negatives & paired)
        sim, (pos, neg) = tile.values, self.mining.select(tile)
        if self.form == "joint":
            return (row_logsumexp(sim, neg) + row_logsumexp(sim, pos, -1.0)).softplus()
        total, number = against_negatives(sim, pos, neg)
        return [Mean(total, number)] if self.form == "pairs" else total / number.clamp_(min=1.0)

    def regularizer(self, embeddings: Tensor) -> Tensor | None:
        return self.l2 * embeddings.square().sum(dim=1).mean() if self.l2 else None


def against_negatives(
    sim: Tensor,
    pos: Tensor,
    neg: Tensor,
    scale: float = 1.0,
    shift: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None,
) -> tuple[Row, Tensor]:
    """Compute Σ_{j∈P} log(1 + Σ_{k∈N} e^(scale (s_k − s_j))) of each row, and the number of its positives.

    ``shift`` computes what is used as s_j from the similarities of positives, and the derivatives.
    """
    negatives = row_logsumexp(sim, neg, scale)
    columns, filled = positive_columns(pos)
    near, slopes = sim.gather(1, columns), None
    if shift is not None:
        near, slopes = shift(near)
    gap = masked(negatives.value.unsqueeze(1) - scale * near, filled, FLOOR)
    share = gap.sigmoid()
    ((_, weights),) = negatives.parts  # zero at the positives
    weights.mul_(share.sum(dim=1, keepdim=True)).scatter_add_(1, columns, -share if slopes is None else -share * slopes)
    return Row(softplus(gap).sum(dim=1), [(scale, weights)]), filled.sum(dim=1, dtype=sim.dtype)
