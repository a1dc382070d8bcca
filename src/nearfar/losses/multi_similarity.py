"""Multi-Similarity loss."""

from nearfar.losses.base import register
from nearfar.losses.raw import Raw
from nearfar.mining import ValidTriplet
from nearfar.utils.validation import number


@register("multi_similarity", "Thesis 2.24, Unified View 17")
class MultiSimilarity(Raw):
    """Weights each pair by its own similarity and by how it compares with the anchor's other pairs.

    Formula:
        ℓ_i = 1/alpha log(1 + Σ_P e^(−alpha (s − base))) + 1/beta log(1 + Σ_N e^(beta (s − base)))
        P: positives with s < max_N s + epsilon,  N: negatives with s > min_P s − epsilon

    Args:
        alpha: Steepness for positives. The paper uses 2.
        beta: Steepness for negatives. The paper uses 50.
        base: λ, the similarity both are compared with.
        epsilon: Margin of the valid-triplet mining.

    Differences:
        Anchors without a valid pair contribute zero and still count in the mean. This is ``raw`` with the mining
        "valid_triplet": the two papers derive the same function.

    Reference:
        Wang et al., "Multi-Similarity Loss with General Pair Weighting for Deep Metric Learning", CVPR 2019.
        Thesis 2.24, Unified View 17.

    Example:
        >>> import torch, nearfar as nf
        >>> nf.losses.MultiSimilarity(alpha=2.0)(torch.eye(4), torch.tensor([0, 0, 1, 1]))
        tensor(0.6566)
    """

    cuda_graph = deterministic = mean_over_anchors = True
    minings = ("valid_triplet",)
    fixed = ("mining",)
    program = Raw.program

    def __init__(self, *, alpha: float = 2.0, beta: float = 50.0, base: float = 0.5, epsilon: float = 0.1) -> None:
        mining = ValidTriplet(margin=number("epsilon", epsilon))
        super().__init__(alpha=alpha, beta=beta, base=base, mining=mining)
        self._valid_triplet = mining

    @property
    def epsilon(self) -> float:
        """Margin of the valid-triplet mining."""
        return self._valid_triplet.margin

    @epsilon.setter
    def epsilon(self, epsilon: float) -> None:
        self._valid_triplet.margin = number("epsilon", epsilon)
