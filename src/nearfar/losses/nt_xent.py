"""Normalised temperature-scaled cross-entropy loss."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from nearfar import mining as minings
from nearfar.engine import Mean
from nearfar.losses.base import PairLoss
from nearfar.losses.n_pair import against_negatives
from nearfar.losses.registry import register
from nearfar.mining import Choice
from nearfar.utils.validation import positive


@register
class NTXent(PairLoss):
    """Tells each positive from all negatives at once: the N-pair loss of cosines with a temperature.

    Formula:
        loss = mean over all positive pairs of log(1 + Σ_{k∈N_i} e^((s_ik − s_ij) / temperature))

    Args:
        temperature: Τ = 0.07.
        mining: Which pairs count.

    Differences:
        The mean is over pairs, so anchors count by their number of positives. SimCLR, where everybody has
        one, has the same loss.

    Reference:
        Chen et al.: A Simple Framework for Contrastive Learning of Visual Representations, 2020.
    """

    key = "nt_xent"
    source = "beyond the five papers"
    minings = tuple(minings.names())
    closed_form = True

    def __init__(self, *, temperature: float = 0.07, mining: Choice = "all") -> None:
        super().__init__(mining)
        self.temperature = positive("temperature", temperature)

    def rows(self, sim: Tensor, pos: Tensor, neg: Tensor) -> Sequence[Mean]:
        return [Mean(*against_negatives(sim, pos, neg, 1.0 / self.temperature))]
