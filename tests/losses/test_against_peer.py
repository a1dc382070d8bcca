"""The same loss from pytorch-metric-learning 2.9.0, where it computes what the paper says.

Left out, because the peer does something else: the gradient of RankedListLoss (it differentiates the gallery
and the weights, which the paper holds constant); anchors without positives in GeneralizedLiftedStructureLoss
(an empty log-sum counts as 0 there, so such an anchor is still pushed); batches with a single mined pair,
whose loss the peer drops; SmoothAPLoss unless there are as many classes as members of each, in order (it takes
the one number for the other); HistogramLoss of equal embeddings (it fails at a similarity of 1); ProxyNCALoss as
printed (the own class is in its sum) and where a probability underflows (the sample is dropped); the distances
between the centres of SoftTripleLoss (it has none).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import create
from checks import assert_close, make_batch, run
from torch import Tensor

import nearfar as nf

peer = pytest.importorskip("pytorch_metric_learning")
from pytorch_metric_learning import distances, losses, miners  # noqa: E402

COSINE = distances.CosineSimilarity()
RAW_DOT = distances.DotProductSimilarity(normalize_embeddings=False)
RAW_EUCLIDEAN = distances.LpDistance(normalize_embeddings=False)
PAIRED = (6, 5, 4, 3, 2)  # no singletons

either = pytest.mark.parametrize("normalize", [True, False])


def squared_distance(normalize: bool) -> distances.LpDistance:
    return distances.LpDistance(power=2, normalize_embeddings=normalize)


def value_and_gradient(loss: Callable[..., Tensor], embeddings: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    leaf = embeddings.clone().requires_grad_()
    value = loss(leaf, *rest)
    (gradient,) = torch.autograd.grad(value, leaf)
    return value.detach(), gradient


def assert_agree(
    ours: Callable[..., Tensor], theirs: Callable[..., Tensor], constant: float = 0.0, tolerance: float = 1e-9
) -> None:
    """The same gradient, and the same value up to a constant, on batches of three kinds."""
    for spread in ("apart", "touching", "mixed"):
        embeddings, labels = make_batch(spread, sizes=PAIRED, dim=4)
        value, gradient = value_and_gradient(ours, embeddings, labels)
        their_value, their_gradient = value_and_gradient(theirs, embeddings, labels)
        assert_close(value + constant, their_value, tolerance)
        assert_close(gradient, their_gradient, tolerance, "gradient")


def with_miner(loss: Callable[..., Tensor], miner: Callable[..., Any]) -> Callable[..., Tensor]:
    return lambda embeddings, labels: loss(embeddings, labels, miner(embeddings, labels))


def test_contrastive() -> None:
    # The peer hinges positives as well, [1 − s]+: one more than −s wherever s < 1.
    theirs = losses.ContrastiveLoss(pos_margin=1, neg_margin=0.5, distance=COSINE)
    assert_agree(nf.losses.Contrastive(average="pairs"), theirs, constant=1.0)


@either
def test_contrastive_of_distances(normalize: bool) -> None:
    # Squared distances and hinges by hand: the peer's loss is the root of ours, term by term.
    theirs = losses.ContrastiveLoss(pos_margin=0, neg_margin=1, distance=squared_distance(normalize))
    embeddings, labels = make_batch("apart", sizes=PAIRED, dim=4)
    only_one_class = torch.zeros_like(labels)  # positives alone, where both have d²
    ours = nf.losses.Contrastive(form="distance", average="pairs", normalize=normalize)
    found = value_and_gradient(ours, embeddings, only_one_class)
    for mine, other in zip(found, value_and_gradient(theirs, embeddings, only_one_class), strict=True):
        assert_close(mine, other, 1e-9)


@pytest.mark.parametrize("margin", [0.1, 0.5])
def test_triplet_over_all_triplets(margin: float) -> None:
    ours = nf.losses.Triplet(mining="all", margin=margin, average="active")
    assert_agree(ours, losses.TripletMarginLoss(margin=margin, distance=COSINE))


@either
def test_triplet_of_squared_distances(normalize: bool) -> None:
    theirs = losses.TripletMarginLoss(margin=1.0, distance=squared_distance(normalize))
    ours = nf.losses.Triplet(form="squared_distance", mining="all", average="active", normalize=normalize)
    assert_agree(ours, theirs)


@either
@pytest.mark.parametrize("margin", [0.0, 0.5])
def test_triplet_with_a_soft_margin(margin: float, normalize: bool) -> None:
    theirs = losses.TripletMarginLoss(margin=margin, smooth_loss=True, distance=squared_distance(normalize))
    ours = nf.losses.Triplet(
        form="squared_distance", soft_margin=True, margin=margin, mining="all", normalize=normalize
    )
    assert_agree(ours, theirs)


def test_triplet_with_hard_mining() -> None:
    theirs = losses.TripletMarginLoss(margin=0.1, distance=COSINE)
    ours = nf.losses.Triplet(mining="hard", average="active")
    assert_agree(ours, with_miner(theirs, miners.BatchHardMiner(distance=COSINE)))


def test_triplet_with_hard_mining_and_a_soft_margin() -> None:
    theirs = losses.TripletMarginLoss(margin=0, smooth_loss=True, distance=COSINE)
    ours = nf.losses.Triplet(mining="hard", soft_margin=True)
    assert_agree(ours, with_miner(theirs, miners.BatchHardMiner(distance=COSINE)))


def test_triplet_of_raw_embeddings_with_hard_mining() -> None:
    theirs = losses.TripletMarginLoss(margin=1.0, distance=squared_distance(normalize=False))
    ours = nf.losses.Triplet(form="squared_distance", mining="hard", average="active", normalize=False)
    assert_agree(ours, with_miner(theirs, miners.BatchHardMiner(distance=RAW_EUCLIDEAN)))


def test_lifted_structure() -> None:
    assert_agree(nf.losses.LiftedStructure(), losses.LiftedStructureLoss(distance=RAW_EUCLIDEAN))


def test_generalized_lifted_structure() -> None:
    theirs = losses.GeneralizedLiftedStructureLoss(neg_margin=0, pos_margin=0.5, distance=COSINE)
    assert_agree(nf.losses.LiftedStructureGeneralized(), theirs)


def test_n_pair_with_its_positives_as_gallery() -> None:
    count = 5
    labels = torch.arange(count)
    anchors, positives = (make_batch(sizes=(1,) * count, dim=4, seed=seed)[0] for seed in (1, 2))
    first = torch.arange(count)
    others = torch.tensor([(i, j) for i in range(count) for j in range(count) if i != j]).T
    pairs = (first, first + count, others[0], others[1] + count)

    def theirs(anchors: Tensor) -> Tensor:
        return losses.NPairsLoss(distance=RAW_DOT)(torch.cat([anchors, positives]), torch.cat([labels, labels]), pairs)

    def ours(anchors: Tensor) -> Tensor:
        return nf.losses.NPair(l2=0.0)(anchors, labels, positives, labels)

    for mine, other in zip(value_and_gradient(ours, anchors), value_and_gradient(theirs, anchors), strict=True):
        assert_close(mine, other, 1e-9)


def test_margin_with_hard_mining() -> None:
    ours = nf.losses.Margin(mining="hard").double()
    theirs = losses.MarginLoss(learn_beta=True).double()
    mined = with_miner(theirs, miners.BatchHardMiner())
    with torch.no_grad():
        theirs.beta.fill_(ours.beta.item())  # 1.2 of float32
    assert_agree(ours, mined)
    embeddings, labels = make_batch("mixed", sizes=PAIRED, dim=4)
    ours(embeddings, labels).backward()
    mined(embeddings, labels).backward()
    assert_close(ours.beta.grad, theirs.beta.grad.squeeze(), 1e-9)


def test_raw_is_multi_similarity_without_mining() -> None:
    assert_agree(nf.losses.Raw(), losses.MultiSimilarityLoss(alpha=2, beta=50, base=0.5))


@pytest.mark.parametrize("epsilon", [0.1, 0.3])
def test_multi_similarity(epsilon: float) -> None:
    theirs = losses.MultiSimilarityLoss(alpha=2, beta=50, base=0.5)
    assert_agree(nf.losses.MultiSimilarity(epsilon=epsilon), with_miner(theirs, miners.MultiSimilarityMiner(epsilon)))


def test_ranked_list_has_nearly_the_same_value() -> None:
    # The peer adds 1e-5 for every pair to its denominators, and halves where we add.
    theirs = losses.RankedListLoss(margin=0.4, Tn=5, alpha=1.2)
    embeddings, labels = make_batch(sizes=PAIRED, dim=4)
    value = nf.losses.RankedList(temperature=5.0)(embeddings, labels)
    assert_close(value / 2, theirs(embeddings, labels), 1e-3)


@pytest.mark.parametrize(("margin", "scale"), [(0.4, 80.0), (0.25, 16.0)])
def test_circle(margin: float, scale: float) -> None:
    assert_agree(nf.losses.Circle(margin=margin, scale=scale), losses.CircleLoss(m=margin, gamma=scale))


def test_circle_with_mining() -> None:
    theirs = losses.CircleLoss()
    assert_agree(nf.losses.Circle(mining="valid_triplet"), with_miner(theirs, miners.MultiSimilarityMiner(epsilon=0.1)))


@pytest.mark.parametrize("temperature", [0.1, 1.0])
def test_sup_con(temperature: float) -> None:
    assert_agree(nf.losses.SupCon(temperature=temperature), losses.SupConLoss(temperature=temperature))


@pytest.mark.parametrize("temperature", [0.07, 1.0])
def test_nt_xent(temperature: float) -> None:
    assert_agree(nf.losses.NTXent(temperature=temperature), losses.NTXentLoss(temperature=temperature))


@either
def test_nca(normalize: bool) -> None:
    theirs = losses.NCALoss(softmax_scale=2, distance=squared_distance(normalize))
    assert_agree(nf.losses.NeighborhoodComponents(scale=2.0, normalize=normalize), theirs)


@pytest.mark.parametrize("slack", [0.1, 0.4])
def test_tuplet_margin(slack: float) -> None:
    assert_agree(nf.losses.TupletMargin(slack=slack), losses.TupletMarginLoss(margin=math.degrees(slack)))


def test_threshold_consistent_margin() -> None:
    assert_agree(nf.losses.ThresholdConsistentMargin(), losses.ThresholdConsistentMarginLoss())


@pytest.mark.parametrize("angle", [30.0, 40.0])
def test_angular_of_unit_vectors(angle: float) -> None:
    theirs = losses.AngularLoss(alpha=angle)  # which takes negatives as they are

    def of_unit_vectors(embeddings: Tensor, labels: Tensor) -> Tensor:
        return theirs(torch.nn.functional.normalize(embeddings, dim=1), labels)

    assert_agree(nf.losses.Angular(angle=angle), of_unit_vectors)


@pytest.mark.filterwarnings("ignore:Using a non-tuple sequence")
@pytest.mark.parametrize("bins", [10, 100])
def test_histogram(bins: int) -> None:
    # The peer's node numbers are float32.
    assert_agree(nf.losses.Histogram(bins=bins), losses.HistogramLoss(n_bins=bins), tolerance=1e-5)


@pytest.mark.parametrize("bins", [10, 25])
def test_fast_ap(bins: int) -> None:
    assert_agree(nf.losses.FastAP(bins=bins), losses.FastAPLoss(num_bins=bins))


def test_smooth_ap_with_the_anchor_in_its_own_ranking() -> None:
    theirs = losses.SmoothAPLoss()
    for spread in ("apart", "touching", "mixed"):
        embeddings, labels = make_batch(spread, sizes=(4, 4, 4, 4), dim=4)
        labels, order = labels.sort()
        embeddings = embeddings[order]

        def ours(embeddings: Tensor, labels: Tensor) -> Tensor:
            return nf.losses.SmoothAP()(embeddings, labels, embeddings, labels)

        mine, other = (value_and_gradient(loss, embeddings, labels) for loss in (ours, theirs))
        assert_close(mine[0], other[0], 1e-6)  # theirs is float32
        assert_close(mine[1], other[1], 1e-6, "gradient")


# Ours and theirs, which keeps class vectors in rows or in columns, of 7 classes in 4 dimensions.
PROXY_PEERS: list[tuple[str, dict[str, Any], Callable[..., Any]]] = [
    ("normalized_softmax", {}, losses.NormalizedSoftmaxLoss(7, 4)),
    ("proxy_nca", {"include_positive": True}, losses.ProxyNCALoss(7, 4, softmax_scale=9)),
    ("arcface", {}, losses.ArcFaceLoss(7, 4, margin=math.degrees(0.5))),
    ("arcface", {"margin": 1.5, "scale": 4.0}, losses.ArcFaceLoss(7, 4, margin=math.degrees(1.5), scale=4)),
    (
        "arcface",
        {"centers": 3},
        losses.SubCenterArcFaceLoss(num_classes=7, embedding_size=4, margin=math.degrees(0.5), sub_centers=3),
    ),
    ("cosface", {}, losses.CosFaceLoss(7, 4)),
    ("sphereface", {}, losses.SphereFaceLoss(7, 4)),
    ("sphereface", {"margin": 3}, losses.SphereFaceLoss(7, 4, margin=3)),
    ("soft_triple", {"tau": 0.0}, losses.SoftTripleLoss(7, 4, gamma=1 / 10, margin=0.1)),
    ("soft_triple", {"tau": 0.0, "gamma": 2.0, "centers": 3}, losses.SoftTripleLoss(7, 4, 3, gamma=1 / 2, margin=0.1)),
    ("proxy_anchor", {}, losses.ProxyAnchorLoss(7, 4)),
    ("proxy_anchor", {"alpha": 8.0, "margin": 0.3}, losses.ProxyAnchorLoss(7, 4, alpha=8, margin=0.3)),
]


@pytest.mark.parametrize(("key", "settings", "theirs"), PROXY_PEERS, ids=lambda value: str(value).partition("(")[0])
def test_losses_with_proxies(key: str, settings: dict[str, Any], theirs: Any) -> None:
    ours, theirs = create(key, settings, num_classes=7).double(), theirs.double()
    ((name, parameter),) = theirs.named_parameters()

    def arranged(proxies: Tensor) -> Tensor:
        rows = proxies.flatten(0, -2)
        return rows if name == "proxies" else rows.T

    with torch.no_grad():
        parameter.copy_(arranged(ours.proxies))
    for spread in ("apart", "touching", "mixed"):
        embeddings, labels = make_batch(spread, sizes=PAIRED, dim=4)
        value, gradient = value_and_gradient(theirs, embeddings, labels)
        theirs.zero_grad()
        theirs(embeddings, labels).backward()
        outcome = run(ours, embeddings, labels)
        assert_close(outcome.value, value, 1e-9)
        assert_close(outcome.gradients["embeddings"], gradient, 1e-9, "gradient")
        assert_close(arranged(outcome.gradients["proxies"]), parameter.grad, 1e-9, "gradient by proxies")
