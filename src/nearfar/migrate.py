"""From other libraries to nearfar: their losses as ours, with what differs.

pytorch-metric-learning (PML) is not imported: its objects are recognized by the names of their classes.

Example:
    >>> import nearfar as nf
    >>> print(nf.migrate.counterpart("TripletMarginLoss"))
    nf.losses.Triplet
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from nearfar.losses import Loss, Regularized, create
from nearfar.losses.foreign import PML_LOSSES
from nearfar.losses.vicreg import EPSILON

__all__ = ["Migration", "counterpart", "from_pml"]


@dataclass(frozen=True)
class Migration:
    """A loss of another library as one of ours.

    Args:
        loss: Our loss, with the settings and the parameters of the other one.
        differences: What it computes differently; empty if value and gradient are the same.
    """

    loss: Loss
    differences: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "\n".join([f"nf.losses.{self.loss}", *(f"  differs: {line}" for line in self.differences)])


def counterpart(name: str) -> str:
    """Return what nearfar has for a class of pytorch-metric-learning.

    Args:
        name: Name of the class, such as "TripletMarginLoss".

    Raises:
        ValueError: If nearfar has nothing for it.
    """
    if name == "MultipleLosses":  # the same name here, so it is not in the table of other names
        return "nf.losses.MultipleLosses, which takes the converted losses"
    if name not in PML_LOSSES:
        raise ValueError(f"there is no counterpart of {name!r}; nearfar has one for {', '.join(PML_LOSSES)}")
    return PML_LOSSES[name]


def from_pml(loss: nn.Module, *, miner: nn.Module | None = None) -> Migration:
    """Turn a loss of pytorch-metric-learning into ours.

    Distance, reducer and miner are taken into account, and proxies are copied. Where both compute the same, the result
    has no differences; otherwise it is the nearest loss of ours, and ``differences`` says exactly what is different.

    Args:
        loss: A loss of pytorch-metric-learning.
        miner: The miner that is called before the loss.

    Returns:
        Our loss, and what differs.

    Raises:
        ValueError: If nearfar has no such loss, distance or miner.
        TypeError: If ``loss`` is not a loss of pytorch-metric-learning.

    Example:
        >>> import nearfar as nf
        >>> from pytorch_metric_learning import losses, miners
        >>> theirs = losses.MultiSimilarityLoss(alpha=2, beta=50, base=0.5)
        >>> found = nf.migrate.from_pml(theirs, miner=miners.MultiSimilarityMiner(epsilon=0.1))
        >>> print(found)
        nf.losses.MultiSimilarity(alpha=2.0, beta=50.0, base=0.5, epsilon=0.1)
        >>> print(nf.migrate.from_pml(losses.ContrastiveLoss()))
        nf.losses.Contrastive(form='distance', margin=1.0, mining=All(), average='pairs', normalize=True)
          differs: the terms are d and [margin − d]+ in PML, and their squares here
    """
    if not type(loss).__module__.startswith("pytorch_metric_learning."):
        raise TypeError(
            f"loss is {type(loss).__module__}.{type(loss).__name__}; one of pytorch_metric_learning is needed"
        )
    peer = _Peer(loss, miner)
    if peer.name not in _CONVERTERS:
        raise ValueError(f"{peer.name} cannot be converted; nearfar has {counterpart(peer.name)}")
    found = peer.regularized(_CONVERTERS[peer.name](peer))
    peer.check_reducer()
    return Migration(found, tuple(peer.differences))


class _Peer:
    """A loss of PML, and what was found to differ."""

    def __init__(self, loss: nn.Module, miner: nn.Module | None) -> None:
        self.loss: Any = loss
        self.miner: Any = miner
        self.name = type(loss).__name__
        self.differences: list[str] = []
        self.reducers: tuple[str, ...] = ("MeanReducer",)  # with which it computes what ours does

    def differs(self, *what: str) -> None:
        self.differences += what

    def measure(self, *allowed: str) -> str:
        """The distance as a measure of ours, one of the allowed ones or, with a difference, the first of them."""
        found = _measure(self.loss.distance)
        if found in allowed:
            return found
        self.differs(f"PML compares by {_told(self.loss.distance)}, this loss by {allowed[0]}")
        return allowed[0]

    def check_reducer(self) -> None:
        for name in {type(one).__name__ for one in _reducers(self.loss.reducer)} - {*self.reducers}:
            self.differs(f"PML combines the terms with {name}; this is what {self.reducers[0]} does")

    def regularized(self, loss: Loss) -> Loss:
        """Our loss, with the regularizer of theirs if there is the same here."""
        for kind in ("embedding", "weight"):
            theirs: Any = getattr(self.loss, f"{kind}_regularizer", None)
            if type(theirs).__name__ == "ZeroMeanRegularizer" and type(theirs.reducer).__name__ == "MeanReducer":
                loss = Regularized(loss, "zero_mean", weight=self.loss.embedding_reg_weight)
            elif theirs is not None:
                self.differs(f"PML adds {kind}_regularizer; nf.losses.Regularized adds those of nearfar")
        return loss

    def mining(self) -> Any:
        """The miner as a mining of ours."""
        if self.miner is None:
            return "all"
        name, miner = type(self.miner).__name__, self.miner
        if name == "BatchHardMiner":
            self._same_distance(order_only=True)
            return "hard"
        if name == "MultiSimilarityMiner":
            self._same_distance()
            return {"name": "valid_triplet", "margin": miner.epsilon}
        if name == "DistanceWeightedMiner":
            self.differs("PML draws positives as well, with replacement; here each positive gets one drawn negative")
            return {"name": "distance_weighted", "nearest": miner.cutoff, "farthest": miner.nonzero_loss_cutoff}
        if name == "TripletMarginMiner" and self.name == "TripletMarginLoss":
            return self._triplet_margin_miner()
        raise ValueError(f"{name} has no counterpart here; minings are all, semi_hard, hard, distance_weighted, "
                         "valid_triplet and random, or a class derived from nf.mining.Mining")  # fmt: skip

    def _triplet_margin_miner(self) -> str:
        self._same_distance()
        if self.miner.type_of_triplets == "semihard":
            self.differs("PML uses every semi-hard triplet, the mining semi_hard the hardest one of each positive")
            return "semi_hard"
        if self.miner.type_of_triplets != "all" or self.loss.smooth_loss or self.miner.margin < self.loss.margin:
            self.differs(f"PML leaves out triplets that are not {self.miner.type_of_triplets!r}, the mining all none")
        return "all"  # what the miner leaves out has no loss

    def _same_distance(self, *, order_only: bool = False) -> None:
        theirs, ours = (_measure(one.distance) for one in (self.miner, self.loss))
        unit = {"cosine", "euclidean", "squared_euclidean"}
        raw = {"raw euclidean", "raw squared_euclidean"}
        if theirs != ours and not (order_only and ({theirs, ours} <= unit or {theirs, ours} <= raw)):
            self.differs(
                f"the miner compares by {_told(self.miner.distance)}, here the mining compares as the loss does"
            )

    def no_miner(self) -> None:
        if self.miner is not None:
            self.differs(
                f"{type(self.miner).__name__} weights the samples of {self.name} in PML; there is no mining here"
            )

    def with_proxies(self, key: str, weights: Tensor, *, centers: int = 1, **settings: Any) -> Loss:
        """Our loss with class vectors copied from theirs, [classes · centers, d]."""
        self.no_miner()
        if key != "proxy_nca":
            self.measure("cosine")
        if centers > 1:
            settings["centers"] = centers
        loss = create(key, num_classes=len(weights) // centers, dim=weights.shape[1], **settings)
        with torch.no_grad():
            proxies = loss.get_parameter("proxies")
            proxies.copy_(weights.reshape(proxies.shape))
        return loss.to(weights.device, weights.dtype)


def _reducers(reducer: Any) -> Iterator[Any]:
    """The reducers of all parts of a loss."""
    if type(reducer).__name__ == "MultipleReducers":
        yield from reducer.reducers.values()
    else:
        yield reducer


def _measure(distance: Any) -> str:
    """The measure of ours that a distance of PML is; its own name if there is none."""
    name = type(distance).__name__
    known = {
        "CosineSimilarity": "cosine",
        "DotProductSimilarity": "dot",
        "LpDistance": "euclidean",
        "SNRDistance": "snr",
    }.get(name)
    powers = {1: "", 2: "squared_"} if known == "euclidean" else {1: ""}
    if known is None or distance.power not in powers or distance.p != 2:
        return _told(distance)
    if distance.normalize_embeddings and known == "dot":
        return "cosine"
    return f"{'' if distance.normalize_embeddings else 'raw '}{powers[distance.power]}{known}"


def _told(distance: Any) -> str:
    normalized = "normalized" if distance.normalize_embeddings else "raw"
    return f"{type(distance).__name__} (p={distance.p}, power={distance.power}, {normalized} embeddings)"


def _contrastive(peer: _Peer) -> Loss:
    peer.reducers = ("AvgNonZeroReducer",)
    allowed = "euclidean", "raw euclidean", "cosine", "squared_euclidean", "raw squared_euclidean", "snr", "raw snr"
    measure = peer.measure(*allowed)
    settings = {"mining": peer.mining(), "average": "pairs", "margin": peer.loss.neg_margin}
    if measure == "cosine":
        if peer.loss.pos_margin >= 1:
            peer.differs(f"the value is lower by pos_margin, {peer.loss.pos_margin}; the gradient is the same")
        else:
            peer.differs(
                f"PML pulls positives up to a similarity of {peer.loss.pos_margin}; here they are always pulled"
            )
        return create("contrastive", form="cosine", **settings)
    if peer.loss.pos_margin:
        peer.differs(f"PML pulls positives down to a distance of {peer.loss.pos_margin}; here they are always pulled")
    if measure.endswith("snr"):
        return create("contrastive", form="snr", normalize=measure == "snr", **settings)
    if "squared" in measure:
        settings["margin"] = math.sqrt(peer.loss.neg_margin)
        peer.differs("negatives are pushed by [neg_margin − d²]+ in PML, and by [√neg_margin − d]+² here")
    else:
        peer.differs("the terms are d and [margin − d]+ in PML, and their squares here")
    return create("contrastive", form="distance", normalize=not measure.startswith("raw"), **settings)


def _triplet(peer: _Peer) -> Loss:
    peer.reducers = ("AvgNonZeroReducer", "MeanReducer")
    allowed = "euclidean", "cosine", "squared_euclidean", "raw euclidean", "raw squared_euclidean", "snr", "raw snr"
    measure = peer.measure(*allowed)
    if peer.loss.swap:
        peer.differs("PML also compares positive and negative (swap)")
    mining = peer.mining()
    if peer.miner is None and peer.loss.triplets_per_anchor != "all":
        peer.differs(
            "PML draws triplets_per_anchor triplets of each anchor; here each positive gets one drawn negative"
        )
        mining = "random"
    form = measure.removeprefix("raw ").replace("euclidean", "distance")
    return create(
        "triplet",
        form=form,
        margin=peer.loss.margin,
        mining=mining,
        average="all" if type(peer.loss.reducer).__name__ == "MeanReducer" else "active",
        normalize=not measure.startswith("raw"),
        soft_margin=peer.loss.smooth_loss,
    )


def _multi_similarity(peer: _Peer) -> Loss:
    peer.measure("cosine")
    settings = {name: getattr(peer.loss, name) for name in ("alpha", "beta", "base")}
    mining = peer.mining()
    if isinstance(mining, dict) and mining["name"] == "valid_triplet":
        return create("multi_similarity", epsilon=mining["margin"], **settings)
    return create("raw", mining=mining, **settings)


def _circle(peer: _Peer) -> Loss:
    peer.reducers = ("AvgNonZeroReducer",)
    return create("circle", margin=peer.loss.m, scale=peer.loss.gamma, mining=peer.mining())


def _with_temperature(key: str, *reducers: str) -> Callable[[_Peer], Loss]:
    def convert(peer: _Peer) -> Loss:
        peer.reducers = reducers
        peer.measure("cosine")
        return create(key, temperature=peer.loss.temperature, mining=peer.mining())

    return convert


def _lifted_structure(peer: _Peer) -> Loss:
    peer.no_miner()
    if peer.measure("raw euclidean", "euclidean") == "euclidean":
        peer.differs("PML normalizes the embeddings; here they are compared as they are, so normalize them before")
    return create("lifted_structure", margin=peer.loss.neg_margin - peer.loss.pos_margin)


def _generalized_lifted_structure(peer: _Peer) -> Loss:
    peer.measure("cosine")
    peer.differs("PML also pushes anchors without positives; here their loss is 0")
    margin = peer.loss.pos_margin - peer.loss.neg_margin
    return create("lifted_structure_generalized", margin=margin, mining=peer.mining())


def _margin(peer: _Peer) -> Loss:
    peer.reducers = ("DivisorReducer",)
    peer.measure("euclidean")
    beta: Tensor = peer.loss.beta.detach()
    if not peer.loss.learn_beta:
        peer.differs("PML does not learn beta; do not pass param_groups of this loss to the optimizer")
    if peer.miner is None:
        peer.differs("PML counts a pair once for each triplet it is in; here each pair counts once")
    if len(beta) > 1 and peer.loss.nu:
        peer.differs("nu weights the betas of the triplets' anchors in PML, and the sum of all betas here")
    num_classes = len(beta) if len(beta) > 1 else None
    loss = create("margin", margin=peer.loss.margin, nu=peer.loss.nu, num_classes=num_classes, mining=peer.mining())
    with torch.no_grad():
        own = loss.get_parameter("beta")
        own.copy_(beta.view_as(own))
    return loss


def _n_pairs(peer: _Peer) -> Loss:
    peer.no_miner()
    if peer.measure("raw dot", "cosine") == "cosine":
        peer.differs("PML normalizes the embeddings; here they are compared as they are, so normalize them before")
    return create("n_pair", form="pairs", l2=0.0)


def _nca(peer: _Peer) -> Loss:
    peer.no_miner()
    raw = peer.measure("squared_euclidean", "raw squared_euclidean").startswith("raw")
    return create("nca", scale=peer.loss.softmax_scale, normalize=not raw)


def _tuplet_margin(peer: _Peer) -> Loss:
    return create("tuplet_margin", slack=float(peer.loss.margin), scale=peer.loss.scale, mining=peer.mining())


def _threshold_consistent_margin(peer: _Peer) -> Loss:
    peer.no_miner()
    theirs = {"margin_plus": "positive_margin", "margin_minus": "negative_margin"}
    theirs |= {"lambda_plus": "positive_weight", "lambda_minus": "negative_weight"}
    settings = {ours: getattr(peer.loss, name) for name, ours in theirs.items()}
    return create("threshold_consistent_margin", **settings)


def _vicreg(peer: _Peer) -> Loss:
    peer.no_miner()
    theirs = peer.loss
    peer.differs(
        "loss(a, ref_emb=b) is loss(a, items, b, items) here, items = torch.arange(len(a)); the value is the same"
    )
    if theirs.eps != EPSILON:
        peer.differs(f"PML adds {theirs.eps} to the variances, and {EPSILON} is added here")
    weights = {
        "invariance": theirs.invariance_lambda,
        "variance": theirs.variance_mu,
        "covariance": theirs.covariance_v,
    }
    return create("vicreg", **weights)


def _angular(peer: _Peer) -> Loss:
    peer.no_miner()
    peer.differs("PML does not normalize negatives; both are the same for embeddings of length 1")
    return create("angular", angle=math.degrees(float(peer.loss.alpha)))


def _fast_ap(peer: _Peer) -> Loss:
    peer.no_miner()
    peer.measure("squared_euclidean")
    return create("fast_ap", bins=peer.loss.num_bins)


def _histogram(peer: _Peer) -> Loss:
    peer.no_miner()
    peer.differs("PML computes the bins in float32 and fails if two embeddings are equal")
    return create("histogram", bins=round(2 / peer.loss.delta))


def _smooth_ap(peer: _Peer) -> Loss:
    peer.no_miner()
    peer.differs("PML ranks the anchor itself as well, and needs as many classes as members of each, in order")
    return create("smooth_ap", temperature=peer.loss.temperature)


def _ranked_list(peer: _Peer) -> Loss:
    theirs = peer.loss
    peer.differs(
        "PML differentiates the whole list; here only the query is moved, as in the paper",
        "PML adds 1e-5 for each pair to its denominators",
    )
    if theirs.Tp:
        peer.differs("PML weights positives by their distance (Tp); here they have equal weights")
    if theirs.imbalance < 1:
        peer.differs(f"the value is that of PML divided by 1 − imbalance, {1 - theirs.imbalance:g}")
    balance = theirs.imbalance / (1 - theirs.imbalance) if theirs.imbalance < 1 else 1.0
    return create("ranked_list", alpha=theirs.alpha, margin=theirs.margin, temperature=theirs.Tn, balance=balance)


def _proxy_nca(peer: _Peer) -> Loss:
    peer.measure("squared_euclidean")
    scale = 2.0 * peer.loss.softmax_scale  # ‖x − w‖² = 2 − 2 cos
    return peer.with_proxies("proxy_nca", peer.loss.proxies, scale=scale, include_positive=True)


def _proxy_anchor(peer: _Peer) -> Loss:
    peer.reducers = ("DivisorReducer",)
    return peer.with_proxies("proxy_anchor", peer.loss.proxies, alpha=peer.loss.alpha, margin=peer.loss.margin)


def _arcface(peer: _Peer) -> Loss:
    centers, margin = getattr(peer.loss, "sub_centers", 1), float(peer.loss.margin)  # in radians, as ours
    return peer.with_proxies("arcface", peer.loss.W.T, centers=centers, margin=margin, scale=peer.loss.scale)


def _cosface(peer: _Peer) -> Loss:
    return peer.with_proxies("cosface", peer.loss.W.T, margin=peer.loss.margin, scale=peer.loss.scale)


def _sphereface(peer: _Peer) -> Loss:
    if peer.loss.scale != 1:
        peer.differs(f"PML multiplies the lengths of the embeddings by scale, {peer.loss.scale}")
    return peer.with_proxies("sphereface", peer.loss.W.T, margin=peer.loss.margin)


def _normalized_softmax(peer: _Peer) -> Loss:
    return peer.with_proxies("normalized_softmax", peer.loss.W.T, temperature=peer.loss.temperature)


def _soft_triple(peer: _Peer) -> Loss:
    theirs = peer.loss
    settings = {"alpha": theirs.la, "gamma": theirs.gamma, "margin": theirs.margin, "tau": 0.0}
    return peer.with_proxies("soft_triple", theirs.fc.T, centers=theirs.centers_per_class, **settings)


_CONVERTERS: dict[str, Callable[[_Peer], Loss]] = {
    "AngularLoss": _angular,
    "ArcFaceLoss": _arcface,
    "CircleLoss": _circle,
    "ContrastiveLoss": _contrastive,
    "CosFaceLoss": _cosface,
    "FastAPLoss": _fast_ap,
    "GeneralizedLiftedStructureLoss": _generalized_lifted_structure,
    "HistogramLoss": _histogram,
    "LiftedStructureLoss": _lifted_structure,
    "MarginLoss": _margin,
    "MultiSimilarityLoss": _multi_similarity,
    "NCALoss": _nca,
    "NPairsLoss": _n_pairs,
    "NormalizedSoftmaxLoss": _normalized_softmax,
    "NTXentLoss": _with_temperature("nt_xent", "MeanReducer"),
    "ProxyAnchorLoss": _proxy_anchor,
    "ProxyNCALoss": _proxy_nca,
    "RankedListLoss": _ranked_list,
    "SignalToNoiseRatioContrastiveLoss": _contrastive,
    "SmoothAPLoss": _smooth_ap,
    "SoftTripleLoss": _soft_triple,
    "SphereFaceLoss": _sphereface,
    "SubCenterArcFaceLoss": _arcface,
    "SupConLoss": _with_temperature("sup_con", "AvgNonZeroReducer"),
    "ThresholdConsistentMarginLoss": _threshold_consistent_margin,
    "TripletMarginLoss": _triplet,
    "TupletMarginLoss": _tuplet_margin,
    "VICRegLoss": _vicreg,
}
