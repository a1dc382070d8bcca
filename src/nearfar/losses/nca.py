"""Neighborhood components analysis as a loss of embeddings."""

from collections.abc import Sequence

from torch import Tensor

from nearfar.engine import Mean, row_logsumexp
from nearfar.losses.base import PairLoss, register
from nearfar.utils.validation import one_of, positive


@register("nca", "Goldberger et al. 2004")
class NeighborhoodComponents(PairLoss):
    """Increases the probability that a random neighbor, near ones more likely, is of the anchor's class.

    Formula:
        p_i = Σ_{j∈P_i} e^(−scale d²_ij) / Σ_{k∈P_i∪N_i} e^(−scale d²_ik)
        log:          loss = mean over anchors with a positive of −log p_i
        probability:  loss = mean over anchors with a positive of 1 − p_i

    Args:
        form: "log", or "probability": the expected error rate of such a classifier.
        scale: Factor of the squared distances. In the paper the embedding itself learns its scale.
        normalize: True: unit vectors, which need a scale of 10 or more.

    Differences:
        The paper maximizes sums of p_i or of log p_i over a data set; this is the mean over a batch. A positive is part
        of the denominator of the others, so one that is much nearer than the others can be pushed: its pair weight is
        then negative. Other libraries drop anchors whose probability underflows, which are the hardest; here they
        count.

    Reference:
        Goldberger et al., "Neighbourhood Components Analysis", NIPS 2004.

    Example:
        >>> import torch, nearfar as nf
        >>> nf.losses.NeighborhoodComponents()(torch.eye(4), torch.tensor([0, 0, 1, 1]))
        tensor(1.0986)
    """

    cuda_graph = deterministic = True
    measure = "squared_euclidean"
    closed_form = True
    fixed = ("form", "normalize")

    def __init__(self, *, form: str = "log", scale: float = 1.0, normalize: bool = False) -> None:
        super().__init__(normalize=normalize)
        self.form = one_of("form", form, ("log", "probability"))
        self.scale = positive("scale", scale)

    def rows(self, sim: Tensor, pos: Tensor, neg: Tensor) -> Sequence[Mean]:
        present = pos.any(dim=1).to(sim.dtype)
        log_probability = row_logsumexp(sim, pos, -self.scale) + row_logsumexp(sim, pos | neg, -self.scale) * -1.0
        loss = log_probability * -1.0
        if self.form == "probability":
            probability = log_probability.value.exp()
            loss = log_probability.chain(1.0 - probability, -probability)
        return [Mean(loss * present, present)]
