"""Triplet loss, over mined triplets or over all of them without enumerating any."""

import math
from collections.abc import Hashable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import softplus

from nearfar.engine import Mean, Row, Tile, masked, row_sum
from nearfar.engine.programs import AllTriplets
from nearfar.engine.rows import count, positive_columns, slot_chunks
from nearfar.losses.base import ANY, PairLoss, register
from nearfar.mining import Choice, MinedTriplets, TripletMining
from nearfar.utils.validation import number, one_of

MARGINS = {"cosine": 0.1, "distance": 0.1, "squared_distance": 1.0, "snr": 0.1}
MEASURES = {"cosine": "cosine", "distance": "euclidean", "squared_distance": "squared_euclidean", "snr": "snr"}
MOST_PASSES = 64  # with more positives than this in a row, sorting is faster


@register("triplet", "Thesis 2.17 and 2.20, NRA 2, RLL 1")
class Triplet(PairLoss):
    """Makes each positive nearer than each negative by a margin.

    Formula:
        cosine:            mean over triplets of [s_an − s_ap + margin]+
        distance:          mean over triplets of [d_ap − d_an + margin]+
        squared_distance:  mean over triplets of [d²_ap − d²_an + margin]+
        snr:               mean over triplets of [v_ap − v_an + margin]+,  v_aj = Var(x_a − x_j) / Var(x_a)
        soft_margin:       log(1 + e^x) instead of [x]+

    Args:
        form: "cosine", or "distance" or "squared_distance" between unit vectors, or "snr", the signal-to-noise ratio:
            the variance of the coordinates of the difference, over that of the anchor.
        margin: λ = 0.1 for "cosine", "distance" and "snr", m = 1 for "squared_distance", and 0 with a soft margin.
        mining: "semi_hard", "hard", "random" and "distance_weighted" choose triplets. "all" and "valid_triplet" choose
            sets and use every triplet of them, in O(m² log m).
        average: "all": over the chosen triplets; "active": over those with a loss above zero.
        normalize: False: compare embeddings as they are, for distances as in NRA 2 and RLL 1.
        soft_margin: True: a triplet keeps learning beyond the margin, with a decreasing gradient.

    Differences:
        With a soft margin every triplet has a loss, so both averages are the same. The time of "all" and
        "valid_triplet" then grows with the number of triplets, on a GPU with the cube of the batch unless a fused
        kernel computes it; the memory does not. The soft-margin paper uses the form "distance". The paper of "snr" also
        adds a regularizer: ``Regularized(loss, "zero_mean")``.

    Reference:
        Schroff et al., "FaceNet: A Unified Embedding for Face Recognition and Clustering", CVPR 2015. Thesis 2.17
        and 2.20, NRA 2, RLL 1.
        Hermans et al., "In Defense of the Triplet Loss for Person Re-Identification", 2017 (soft margin).
        Yuan et al., "Signal-to-Noise Ratio: A Robust Distance Metric for Deep Metric Learning", CVPR 2019 (snr).

    Example:
        >>> import torch, nearfar as nf
        >>> nf.losses.Triplet(margin=0.2, mining="all")(torch.eye(4), torch.tensor([0, 0, 1, 1]))
        tensor(0.2000)
    """

    cuda_graph = deterministic = True
    minings = ANY
    closed_form = True
    fixed = ("form", "normalize")

    def __init__(
        self,
        *,
        form: str = "cosine",
        margin: float | None = None,
        mining: Choice = "semi_hard",
        average: str = "all",
        normalize: bool = True,
        soft_margin: bool = False,
    ) -> None:
        one_of("form", form, tuple(MEASURES))
        super().__init__(mining, measure=MEASURES[form], normalize=normalize)
        self.form = form
        self.soft_margin = bool(soft_margin)
        default = 0.0 if self.soft_margin else MARGINS[form]
        self.margin = number("margin", default if margin is None else margin)
        self.average = one_of("average", average, ("all", "active"))

    @property
    def bytes_per_pair(self) -> int:
        return self.mining.bytes_per_pair + (16 if isinstance(self.mining, TripletMining) else 60)

    def graph_key(self) -> Hashable:
        # On a GPU a step over all soft triplets can have as many kernels as the batch has members.
        return None if self.soft_margin and not isinstance(self.mining, TripletMining) else super().graph_key()

    def on_tile(self, tile: Tile) -> Sequence[Mean]:
        sim, triplets = tile.similarity, self.mining.triplets(tile)
        chosen: tuple[Tensor, ...]
        if triplets is not None:
            chosen = (triplets.valid,)
            total, active = listed_triplets(sim, triplets, self.margin, soft=self.soft_margin)
        else:
            chosen = self.mining.select(tile)
            total, active = (
                every_soft_triplet(sim, *chosen, self.margin, self.memory_budget)
                if self.soft_margin
                else every_triplet(sim, *chosen, self.margin)
            )
        if tile.measure.is_distance:  # the derivative by minus the distance
            total = total.chain(total.value, -1.0)
        if self.average == "all":
            active = math.prod((count(mask, sim) for mask in chosen), start=torch.ones_like(active))
        return [Mean(total, active)]

    def program(self) -> AllTriplets:
        return AllTriplets(self.margin, self.soft_margin, self.average == "active")


def listed_triplets(sim: Tensor, triplets: MinedTriplets, margin: float, *, soft: bool) -> tuple[Row, Tensor]:
    """Sum [s_n − s_p + margin]+, or its softplus, over each row's triplets; also return the number of active ones."""
    positive, negative, valid = triplets
    gap = sim.gather(1, negative) - sim.gather(1, positive) + margin
    terms = masked(softplus(gap) if soft else gap.relu_(), valid)
    slopes = masked(gap.sigmoid_(), valid) if soft else terms.sign()
    weights = torch.zeros_like(sim).scatter_add_(1, negative, slopes).scatter_add_(1, positive, -slopes)
    return row_sum(terms, weights), count(valid, sim) if soft else slopes.sum(dim=1)


def every_triplet(sim: Tensor, pos: Tensor, neg: Tensor, margin: float) -> tuple[Row, Tensor]:
    """Sum [s_n − s_p + margin]+ over all (p, n) of each row; also return the number of active triplets.

    A triplet is active when s_n is above the threshold s_p − margin. With c_n the number of thresholds below
    s_n, and c_p the number of negatives above the threshold of p, the sum is
    Σ c_n s_n − Σ c_p (s_p − margin), and c_n and −c_p are its derivatives. Counting needs sorting, not triplets.
    """
    counted = count_by_comparing(sim, pos, neg, margin) if sim.device.type == "cpu" else None
    total, weights, active = counted or count_by_sorting(sim, pos, neg, margin)
    return Row(total, [(1.0, weights)]), active


def count_by_comparing(sim: Tensor, pos: Tensor, neg: Tensor, margin: float) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return the sum, c_n for negatives and −c_p for positives, [a, n], and Σ c_p; None if there are many positives.

    There is one pass for each positive.
    """
    columns, filled = positive_columns(pos)
    if columns.shape[1] > MOST_PASSES:
        return None
    thresholds = masked(sim.gather(1, columns) - margin, filled, math.inf)
    negatives = masked(sim, neg, -math.inf)
    total, per_positive = torch.zeros_like(sim[:, 0]), torch.empty_like(thresholds)
    weights, above = torch.zeros_like(sim), torch.empty_like(sim)
    for slot in range(columns.shape[1]):
        torch.sub(negatives, thresholds[:, slot : slot + 1], out=above).relu_()
        total += above.sum(dim=1)
        weights += above.sign_()
        per_positive[:, slot] = above.sum(dim=1)
    return total, weights.scatter_add_(1, columns, -per_positive), per_positive.sum(dim=1)


def count_by_sorting(sim: Tensor, pos: Tensor, neg: Tensor, margin: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the same as ``count_by_comparing`` for any number of positives, with one sort."""
    # A negative equal to a threshold is not above it, so it has to come first.
    just_above = torch.nextafter(sim - margin, torch.full_like(sim, math.inf))
    order = masked(torch.where(pos, just_above, sim), pos | neg, math.inf).argsort(dim=1)
    is_positive, is_negative = (mask.gather(1, order).to(torch.int32) for mask in (pos, neg))
    below = is_positive.cumsum(dim=1, dtype=torch.int32)
    above = is_negative.sum(dim=1, keepdim=True) - is_negative.cumsum(dim=1, dtype=torch.int32)
    per_positive = is_positive * above
    counts = (is_negative * below - per_positive).to(sim.dtype)
    weights, active = torch.empty_like(sim).scatter_(1, order, counts), per_positive.sum(dim=1, dtype=sim.dtype)
    return torch.linalg.vecdot(weights, sim) + margin * active, weights, active


def every_soft_triplet(sim: Tensor, pos: Tensor, neg: Tensor, margin: float, budget: int) -> tuple[Row, Tensor]:
    """Sum log(1 + e^(s_n − s_p + margin)) over all (p, n) of each row; also return the number of triplets.

    Every triplet has a loss above zero, so all are computed, those of some positives at a time.
    """
    columns, filled = positive_columns(pos)
    thresholds = masked(sim.gather(1, columns) - margin, filled, math.inf)
    negatives = masked(sim, neg, -math.inf).unsqueeze(1)
    total, per_positive = torch.zeros_like(sim[:, 0]), torch.empty_like(thresholds)
    weights = torch.zeros_like(sim)
    for slots in slot_chunks(columns.shape[1], sim, budget):
        gap = negatives - thresholds[:, slots].unsqueeze(2)
        total += softplus(gap).sum(dim=(1, 2))
        share = gap.sigmoid_()
        weights += share.sum(dim=1)
        per_positive[:, slots] = share.sum(dim=2)
    weights.scatter_add_(1, columns, -per_positive)
    return Row(total, [(1.0, weights)]), count(pos, sim) * count(neg, sim)
