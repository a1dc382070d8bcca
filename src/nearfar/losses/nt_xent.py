"""Normalized temperature-scaled cross-entropy loss."""

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
    """Compares each positive with all negatives at once: the N-pair loss of cosines with a temperature.

    Formula:
        loss = mean over all positive pairs of log(1 + Σ_{k∈N_i} e^((s_ik − s_ij) / temperature))

    Args:
        temperature: τ, the divisor of the cosines.
        mining: Which pairs are used.

    Differences:
        The mean is over pairs, so anchors count by their number of positives. In SimCLR every anchor has one positive,
        and the loss is the same.

    Reference:
        Chen et al., "A Simple Framework for Contrastive Learning of Visual Representations", ICML 2020.

    Example:
        >>> import torch, nearfar as nf
        >>> labels = torch.tensor([0, 0, 1, 1])
        >>> nf.losses.NTXent(temperature=0.5)(torch.eye(4), labels)
        tensor(1.0986)
    """

    key = "nt_xent"
    source = "Chen et al. 2020"
    cuda_graph = deterministic = True
    minings = tuple(minings.names())
    closed_form = True

    def __init__(self, *, temperature: float = 0.07, mining: Choice = "all") -> None:
        super().__init__(mining)
        self.temperature = positive("temperature", temperature)

    def rows(self, sim: Tensor, pos: Tensor, neg: Tensor) -> Sequence[Mean]:
        return [Mean(*against_negatives(sim, pos, neg, 1.0 / self.temperature))]
