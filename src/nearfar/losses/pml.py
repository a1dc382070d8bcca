"""What nearfar has for the losses of pytorch-metric-learning (PML): for errors and for :mod:`nearfar.migrate`."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Counterpart:
    """What nearfar has for a loss of PML, and how the one is made of the other.

    ``measures`` and ``reducers`` are those with which both compute the same, ``differences`` what is always different,
    and ``proxies`` the attribute of PML with the class vectors, [classes · centers, d].
    """

    name: str  # of the class in nf.losses
    settings: Callable[[Any], dict[str, Any]] | None = None  # those of ours by the loss of PML
    hint: str = ""
    measures: tuple[str, ...] = ()
    reducers: tuple[str, ...] = ("MeanReducer",)
    has_mining: bool = False
    proxies: str | None = None
    differences: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"nf.losses.{self.name}{self.hint}" if self.name else self.hint


def _classes(name: str, proxies: str, settings: Callable[[Any], dict[str, Any]], **others: Any) -> Counterpart:
    return Counterpart(name, settings, proxies=proxies, **{"measures": ("cosine",), **others})


def _arcface(loss: Any) -> dict[str, Any]:
    return {"margin": float(loss.margin), "scale": loss.scale, "centers": getattr(loss, "sub_centers", 1)}  # in radians


def _temperature(loss: Any) -> dict[str, Any]:
    return {"temperature": loss.temperature}


ANY = "euclidean", "cosine", "squared_euclidean", "snr", "raw euclidean", "raw squared_euclidean", "raw snr"
NON_ZERO = ("AvgNonZeroReducer",)
DIVISOR = ("DivisorReducer",)
LOSSES = {
    "AngularLoss": Counterpart(
        "Angular", lambda loss: {"angle": math.degrees(float(loss.alpha))},
        differences=("PML does not normalize negatives; both are the same for embeddings of length 1",),
    ),
    "ArcFaceLoss": _classes("ArcFace", "W.T", _arcface),
    "CircleLoss": Counterpart(
        "Circle", lambda loss: {"margin": loss.m, "scale": loss.gamma}, reducers=NON_ZERO, has_mining=True
    ),
    "ContrastiveLoss": Counterpart("Contrastive", measures=ANY, reducers=NON_ZERO),
    "CosFaceLoss": _classes("CosFace", "W.T", lambda loss: {"margin": loss.margin, "scale": loss.scale}),
    "CrossBatchMemory": Counterpart(
        "Memory", hint=", which takes the converted loss: memory.loss(loss, embeddings, labels)"
    ),
    "FastAPLoss": Counterpart("FastAP", lambda loss: {"bins": loss.num_bins}, measures=("squared_euclidean",)),
    "GeneralizedLiftedStructureLoss": Counterpart(
        "LiftedStructureGeneralized", lambda loss: {"margin": loss.pos_margin - loss.neg_margin},
        measures=("cosine",), has_mining=True,
        differences=("PML also pushes anchors without positives; here their loss is 0",),
    ),
    "HistogramLoss": Counterpart(
        "Histogram", lambda loss: {"bins": round(2 / loss.delta)},
        differences=("PML computes the bins in float32 and fails if two embeddings are equal",),
    ),
    "LiftedStructureLoss": Counterpart(
        "LiftedStructure", lambda loss: {"margin": loss.neg_margin - loss.pos_margin}, measures=("raw euclidean",)
    ),
    "MarginLoss": Counterpart("Margin", measures=("euclidean",), reducers=DIVISOR),
    "MultiSimilarityLoss": Counterpart(
        "Raw", hint=", or nf.losses.MultiSimilarity with its miner", measures=("cosine",)
    ),
    "NCALoss": Counterpart("NeighborhoodComponents", measures=("squared_euclidean", "raw squared_euclidean")),
    "NPairsLoss": Counterpart("NPair", lambda _: {"form": "pairs", "l2": 0.0}, measures=("raw dot",)),
    "NTXentLoss": Counterpart("NTXent", _temperature, measures=("cosine",), has_mining=True),
    "NormalizedSoftmaxLoss": _classes("NormalizedSoftmax", "W.T", _temperature),
    "ProxyAnchorLoss": _classes(
        "ProxyAnchor", "proxies", lambda loss: {"alpha": loss.alpha, "margin": loss.margin}, reducers=DIVISOR
    ),
    "ProxyNCALoss": _classes(
        "ProxyNCA", "proxies", measures=("squared_euclidean",),
        settings=lambda loss: {"scale": 2.0 * loss.softmax_scale, "include_positive": True},  # ‖x − w‖² = 2 − 2 cos
    ),
    "RankedListLoss": Counterpart(
        "RankedList",
        lambda loss: {
            "alpha": loss.alpha, "margin": loss.margin, "temperature": loss.Tn,
            "balance": loss.imbalance / (1 - loss.imbalance) if loss.imbalance < 1 else 1.0,
        },
        differences=(
            "PML differentiates the whole list; here only the query is moved, as in the paper",
            "PML adds 1e-5 for each pair to its denominators",
        ),
    ),
    "SelfSupervisedLoss": Counterpart(
        "", hint="the loss itself with a gallery: loss(a, labels, b, labels), labels = torch.arange(len(a))"
    ),
    "SignalToNoiseRatioContrastiveLoss": Counterpart(
        "Contrastive", hint=" with form='snr'", measures=ANY, reducers=NON_ZERO
    ),
    "SmoothAPLoss": Counterpart(
        "SmoothAP", _temperature,
        differences=("PML ranks the anchor itself as well, and needs as many classes as members of each, in order",),
    ),
    "SoftTripleLoss": _classes(
        "SoftTriple", "fc.T",
        lambda loss: {
            "alpha": loss.la, "gamma": loss.gamma, "margin": loss.margin, "tau": 0.0, "centers": loss.centers_per_class
        },
    ),
    "SphereFaceLoss": _classes("SphereFace", "W.T", lambda loss: {"margin": loss.margin}),
    "SubCenterArcFaceLoss": _classes("ArcFace", "W.T", _arcface, hint=" with centers=3"),
    "SupConLoss": Counterpart("SupCon", _temperature, measures=("cosine",), reducers=NON_ZERO, has_mining=True),
    "ThresholdConsistentMarginLoss": Counterpart(
        "ThresholdConsistentMargin",
        lambda loss: {
            "positive_margin": loss.margin_plus, "negative_margin": loss.margin_minus,
            "positive_weight": loss.lambda_plus, "negative_weight": loss.lambda_minus,
        },
    ),
    "TripletMarginLoss": Counterpart("Triplet", measures=ANY, reducers=("AvgNonZeroReducer", "MeanReducer")),
    "TupletMarginLoss": Counterpart(
        "TupletMargin", lambda loss: {"slack": float(loss.margin), "scale": loss.scale}, has_mining=True
    ),
    "VICRegLoss": Counterpart(
        "VICReg",
        lambda loss: {
            "invariance": loss.invariance_lambda, "variance": loss.variance_mu, "covariance": loss.covariance_v
        },
        hint=", with the second view as gallery: loss(a, items, b, items)",
        differences=(
            "loss(a, ref_emb=b) is loss(a, items, b, items) here, items = torch.arange(len(a)); the value is the same",
        ),
    ),
}  # fmt: skip

# Arguments of pytorch-metric-learning, and of OML where they differ.
ARGUMENTS = {
    "embedding_size": "dim",
    "indices_tuple": "mining, an argument of the constructor, and nf.supervision.Pairs or Triplets for given ones",
    "ref_emb": "gallery",
    "ref_labels": "gallery_labels",
    "distance": "form, measure or normalize, where a loss has a choice",
    "reducer": "average, where a loss has a choice",
    "miner": "mining",
    "swap": "nothing like it",
    "smooth_loss": "soft_margin",
    "triplets_per_anchor": "mining",
    "num_bins": "bins",
    "n_bins": "bins",
    "neg_margin": "margin",
    "pos_margin": "margin",
    "softmax_scale": "scale",
    "centers_per_class": "centers",
    "sub_centers": "centers",
    "embedding_regularizer": "nf.losses.Regularized, which takes the loss and the name of a regularizer",
    "weight_regularizer": "nf.losses.Regularized, which takes the loss and the name of a regularizer",
}


def refuse_foreign(owner: str, given: Iterable[str], own: Iterable[str] = ()) -> None:
    """Refuse arguments of other libraries, and name ours."""
    for name in given:
        if name in ARGUMENTS and name not in own:
            raise TypeError(f"{owner} has no argument {name!r}; nearfar has {ARGUMENTS[name]} (see nf.migrate)")
