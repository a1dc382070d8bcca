"""Names of other libraries, and what nearfar calls the same, for errors and for :mod:`nearfar.migrate`."""

from __future__ import annotations

from collections.abc import Iterable

# Classes of pytorch-metric-learning.
PML_LOSSES = {
    "AngularLoss": "nf.losses.Angular",
    "ArcFaceLoss": "nf.losses.ArcFace",
    "CircleLoss": "nf.losses.Circle",
    "ContrastiveLoss": "nf.losses.Contrastive",
    "CosFaceLoss": "nf.losses.CosFace",
    "CrossBatchMemory": "nf.losses.Memory, which takes the converted loss: memory.loss(loss, embeddings, labels)",
    "FastAPLoss": "nf.losses.FastAP",
    "GeneralizedLiftedStructureLoss": "nf.losses.LiftedStructureGeneralized",
    "HistogramLoss": "nf.losses.Histogram",
    "LiftedStructureLoss": "nf.losses.LiftedStructure",
    "MarginLoss": "nf.losses.Margin",
    "MultiSimilarityLoss": "nf.losses.Raw, or nf.losses.MultiSimilarity with its miner",
    "NCALoss": "nf.losses.NeighborhoodComponents",
    "NPairsLoss": "nf.losses.NPair",
    "NTXentLoss": "nf.losses.NTXent",
    "NormalizedSoftmaxLoss": "nf.losses.NormalizedSoftmax",
    "ProxyAnchorLoss": "nf.losses.ProxyAnchor",
    "ProxyNCALoss": "nf.losses.ProxyNCA",
    "RankedListLoss": "nf.losses.RankedList",
    "SelfSupervisedLoss": "the loss itself with a gallery: loss(a, labels, b, labels), labels = torch.arange(len(a))",
    "SignalToNoiseRatioContrastiveLoss": "nf.losses.Contrastive with form='snr'",
    "SmoothAPLoss": "nf.losses.SmoothAP",
    "SoftTripleLoss": "nf.losses.SoftTriple",
    "SphereFaceLoss": "nf.losses.SphereFace",
    "SubCenterArcFaceLoss": "nf.losses.ArcFace with centers=3",
    "SupConLoss": "nf.losses.SupCon",
    "ThresholdConsistentMarginLoss": "nf.losses.ThresholdConsistentMargin",
    "TripletMarginLoss": "nf.losses.Triplet",
    "TupletMarginLoss": "nf.losses.TupletMargin",
    "VICRegLoss": "nf.losses.VICReg, with the second view as gallery: loss(a, items, b, items)",
}

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
