"""CoSENT: every pair of a batch above every pair that is less similar."""

import torch
from torch import Tensor
from torch.nn.functional import softplus

from nearfar.engine import Tile, masked
from nearfar.engine.histograms import running_sum
from nearfar.engine.rows import FLOOR, masked_sum
from nearfar.losses.base import PairLoss, register
from nearfar.utils.validation import number

LARGEST_SCALE = 40.0  # e^(−2 · 40) is far above the smallest float32 number
GRADES = 1000  # steps in which grades are compared


@register("cosent", "Su 2022")
class CoSENT(PairLoss):
    """Ranks every positive pair of the batch above every negative pair, whatever their anchors.

    Formula:
        loss = log(1 + Σ over positive pairs (i, j) and negative pairs (k, l) of e^(scale (s_kl − s_ij)))
        graded: over pairs (i, j) and (k, l) with grade_ij > grade_kl

    Args:
        scale: Factor of the cosines, at most 40.
        graded: True: rank pairs by the grades of the supervision, as the original does: the overlap of the labels of
            ``MultiLabel``, the share of the levels of a ``Hierarchy`` at which two items agree, or those of ``Pairs``.

    Differences:
        A function of the whole batch, not of one anchor's row. Pairs are ordered: without a gallery (i, j) and (j, i)
        both count, which adds at most log 4. Grades that differ by less than 0.001 may count as equal.

    Reference:
        Su, "CoSENT: A More Efficient Sentence Vector Scheme than Sentence-BERT", 2022.

    Example:
        >>> import torch, nearfar as nf
        >>> nf.losses.CoSENT()(torch.eye(4), torch.tensor([0, 0, 1, 1]))  # 4 positive and 8 negative pairs: log(1 + 32)
        tensor(3.4965)
        >>> levels = nf.supervision.Hierarchy([torch.tensor([0, 0, 0, 1]), torch.tensor([0, 0, 1, 2])])
        >>> nf.losses.CoSENT(graded=True)(torch.eye(4), levels)  # pairs of grades 1, ½ and 0: 2, 4 and 6
        tensor(3.8067)
    """

    cuda_graph = deterministic = True
    from_sums = True

    def __init__(self, *, scale: float = 20.0, graded: bool = False) -> None:
        super().__init__()
        self.scale = number("scale", scale, low=0.0, high=LARGEST_SCALE, open_low=True)
        self.graded = bool(graded)

    @property
    def needs_grades(self) -> bool:  # type: ignore[override]
        return self.graded

    def batch_sums(self, tile: Tile) -> Tensor:
        # Exponents are relative to the largest possible ones, so the sums of all tiles can be added.
        rising, falling = (self.scale * (tile.values - 1.0)).exp(), (-self.scale * (tile.values + 1.0)).exp()
        if not self.graded:
            return torch.stack([masked_sum(rising, tile.negatives).sum(), masked_sum(falling, tile.positives).sum()])
        assert tile.grades is not None
        place = (GRADES * tile.grades).round().long().flatten()
        known, empty = tile.positives | tile.negatives, tile.values.new_zeros(GRADES + 1)
        return torch.stack([empty.index_add(0, place, masked(powers, known).flatten()) for powers in (rising, falling)])

    def loss_of_sums(self, sums: Tensor) -> Tensor:
        if self.graded:  # pairs of each grade above 0, and those of all lower grades
            sums = torch.stack([running_sum(sums[0, :-1]), sums[1, 1:]])
        logarithms = sums.clamp(min=torch.finfo(sums.dtype).tiny).log()
        present = (sums > 0).all(dim=0)
        terms = masked(logarithms.sum(dim=0), present, FLOOR)
        return masked(softplus(terms.flatten().logsumexp(dim=0) + 2.0 * self.scale), present.any())
