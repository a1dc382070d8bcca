"""From other libraries to nearfar: their losses as ours, with what differs.

pytorch-metric-learning (PML) is not imported: its objects are recognized by the names of their classes.

Example:
    >>> import nearfar as nf
    >>> print(nf.migrate.counterpart("TripletMarginLoss"))
    nf.losses.Triplet
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from nearfar import losses
from nearfar.losses import Loss, Regularized, create
from nearfar.losses.pml import LOSSES, Counterpart
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
    if name not in LOSSES:
        raise ValueError(f"there is no counterpart of {name!r}; nearfar has one for {', '.join(LOSSES)}")
    return str(LOSSES[name])


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
        >>> migration = nf.migrate.from_pml(theirs, miner=miners.MultiSimilarityMiner(epsilon=0.1))
        >>> print(migration)
        nf.losses.MultiSimilarity(alpha=2.0, beta=50.0, base=0.5, epsilon=0.1)
        >>> print(nf.migrate.from_pml(losses.ContrastiveLoss()))
        nf.losses.Contrastive(form='distance', margin=1.0, mining=All(), average='pairs', normalize=True)
          differs: the terms are d and [margin − d]+ in PML, and their squares here
    """
    if not type(loss).__module__.startswith("pytorch_metric_learning."):
        raise TypeError(
            f"loss is {type(loss).__module__}.{type(loss).__name__}; one of pytorch_metric_learning is needed"
        )
    source = _Source(loss, miner)
    converted = source.regularized(_CONVERTERS.get(source.counterpart.name, _by_table)(source))
    source.check_reducer()
    return Migration(converted, tuple(source.differences))


class _Source:
    """A loss of PML with its miner, and what ours does differently."""

    def __init__(self, loss: nn.Module, miner: nn.Module | None) -> None:
        self.loss: Any = loss
        self.miner: Any = miner
        self.name = type(loss).__name__
        self.counterpart = LOSSES.get(self.name, Counterpart(""))
        self.differences = [*self.counterpart.differences]

    def differs(self, difference: str) -> None:
        self.differences.append(difference)

    def measure(self) -> str:
        """Return the distance as a measure of ours, an allowed one or, with a difference, the first of them."""
        measure, allowed = _measure(self.loss.distance), self.counterpart.measures
        if measure in allowed:
            return measure
        if allowed[0] == {"euclidean": "raw euclidean", "cosine": "raw dot"}.get(measure):
            self.differs("PML normalizes the embeddings; here they are compared as they are, so normalize them before")
        else:
            self.differs(f"PML compares by {_described(self.loss.distance)}, this loss by {allowed[0]}")
        return allowed[0]

    def check_reducer(self) -> None:
        reducer: Any = self.loss.reducer
        reducers = reducer.reducers.values() if type(reducer).__name__ == "MultipleReducers" else [reducer]
        for name in {type(part).__name__ for part in reducers} - {*self.counterpart.reducers}:
            self.differs(f"PML combines the terms with {name}; this is what {self.counterpart.reducers[0]} does")

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
        theirs, ours = (_measure(part.distance) for part in (self.miner, self.loss))
        unit = {"cosine", "euclidean", "squared_euclidean"}
        raw = {"raw euclidean", "raw squared_euclidean"}
        if theirs != ours and not (order_only and ({theirs, ours} <= unit or {theirs, ours} <= raw)):
            self.differs(
                f"the miner compares by {_described(self.miner.distance)}, here the mining compares as the loss does"
            )

    def no_miner(self) -> None:
        if self.miner is not None:
            self.differs(
                f"{type(self.miner).__name__} weights the samples of {self.name} in PML; there is no mining here"
            )


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
        return _described(distance)
    if distance.normalize_embeddings and known == "dot":
        return "cosine"
    return f"{'' if distance.normalize_embeddings else 'raw '}{powers[distance.power]}{known}"


def _described(distance: Any) -> str:
    normalized = "normalized" if distance.normalize_embeddings else "raw"
    return f"{type(distance).__name__} (p={distance.p}, power={distance.power}, {normalized} embeddings)"


def _by_table(source: _Source) -> Loss:
    row = source.counterpart
    if row.settings is None:
        raise ValueError(f"{source.name} cannot be converted; nearfar has {counterpart(source.name)}")
    settings = row.settings(source.loss)
    if row.measures:
        source.measure()
    if row.has_mining:
        settings["mining"] = source.mining()
    else:
        source.no_miner()
    kind: Callable[..., Loss] = getattr(losses, row.name)
    if row.proxies is None:
        return kind(**settings)
    vectors: Tensor = attrgetter(row.proxies)(source.loss)
    loss = kind(num_classes=len(vectors) // settings.get("centers", 1), dim=vectors.shape[1], **settings)
    with torch.no_grad():
        proxies = loss.get_parameter("proxies")
        proxies.copy_(vectors.reshape(proxies.shape))
    return loss.to(vectors.device, vectors.dtype)


def _contrastive(source: _Source) -> Loss:
    measure = source.measure()
    settings = {"mining": source.mining(), "average": "pairs", "margin": source.loss.neg_margin}
    if measure == "cosine":
        if source.loss.pos_margin >= 1:
            source.differs(f"the value is lower by pos_margin, {source.loss.pos_margin}; the gradient is the same")
        else:
            source.differs(
                f"PML pulls positives up to a similarity of {source.loss.pos_margin}; here they are always pulled"
            )
        return create("contrastive", form="cosine", **settings)
    if source.loss.pos_margin:
        source.differs(
            f"PML pulls positives down to a distance of {source.loss.pos_margin}; here they are always pulled"
        )
    if measure.endswith("snr"):
        return create("contrastive", form="snr", normalize=measure == "snr", **settings)
    if "squared" in measure:
        settings["margin"] = math.sqrt(source.loss.neg_margin)
        source.differs("negatives are pushed by [neg_margin − d²]+ in PML, and by [√neg_margin − d]+² here")
    else:
        source.differs("the terms are d and [margin − d]+ in PML, and their squares here")
    return create("contrastive", form="distance", normalize=not measure.startswith("raw"), **settings)


def _triplet(source: _Source) -> Loss:
    measure = source.measure()
    if source.loss.swap:
        source.differs("PML also compares positive and negative (swap)")
    mining = source.mining()
    if source.miner is None and source.loss.triplets_per_anchor != "all":
        source.differs(
            "PML draws triplets_per_anchor triplets of each anchor; here each positive gets one drawn negative"
        )
        mining = "random"
    form = measure.removeprefix("raw ").replace("euclidean", "distance")
    return create(
        "triplet",
        form=form,
        margin=source.loss.margin,
        mining=mining,
        average="all" if type(source.loss.reducer).__name__ == "MeanReducer" else "active",
        normalize=not measure.startswith("raw"),
        soft_margin=source.loss.smooth_loss,
    )


def _raw(source: _Source) -> Loss:
    source.measure()
    settings = {name: getattr(source.loss, name) for name in ("alpha", "beta", "base")}
    mining = source.mining()
    if isinstance(mining, dict) and mining["name"] == "valid_triplet":
        return create("multi_similarity", epsilon=mining["margin"], **settings)
    return create("raw", mining=mining, **settings)


def _margin(source: _Source) -> Loss:
    source.measure()
    beta: Tensor = source.loss.beta.detach()
    if not source.loss.learn_beta:
        source.differs("PML does not learn beta; do not pass param_groups of this loss to the optimizer")
    if source.miner is None:
        source.differs("PML counts a pair once for each triplet it is in; here each pair counts once")
    if len(beta) > 1 and source.loss.nu:
        source.differs("nu weights the betas of the triplets' anchors in PML, and the sum of all betas here")
    num_classes = len(beta) if len(beta) > 1 else None
    loss = create(
        "margin", margin=source.loss.margin, nu=source.loss.nu, num_classes=num_classes, mining=source.mining()
    )
    with torch.no_grad():
        boundary = loss.get_parameter("beta")
        boundary.copy_(beta.view_as(boundary))
    return loss


def _nca(source: _Source) -> Loss:
    source.no_miner()
    raw = source.measure().startswith("raw")
    return create("nca", scale=source.loss.softmax_scale, normalize=not raw)


def _vicreg(source: _Source) -> Loss:
    if source.loss.eps != EPSILON:
        source.differs(f"PML adds {source.loss.eps} to the variances, and {EPSILON} is added here")
    return _by_table(source)


def _ranked_list(source: _Source) -> Loss:
    if source.loss.Tp:
        source.differs("PML weights positives by their distance (Tp); here they have equal weights")
    if source.loss.imbalance < 1:
        source.differs(f"the value is that of PML divided by 1 − imbalance, {1 - source.loss.imbalance:g}")
    return _by_table(source)


def _sphereface(source: _Source) -> Loss:
    if source.loss.scale != 1:
        source.differs(f"PML multiplies the lengths of the embeddings by scale, {source.loss.scale}")
    return _by_table(source)


_CONVERTERS: dict[str, Callable[[_Source], Loss]] = {
    "Contrastive": _contrastive,
    "Margin": _margin,
    "NeighborhoodComponents": _nca,
    "RankedList": _ranked_list,
    "Raw": _raw,
    "SphereFace": _sphereface,
    "Triplet": _triplet,
    "VICReg": _vicreg,
}
