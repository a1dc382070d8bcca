"""Losses of pytorch-metric-learning become ours, and what differs is said."""

import math

import pytest
import torch
from checks import SPREADS, assert_close, make_batch
from torch import nn

import nearfar as nf
from nearfar.losses.pml import ARGUMENTS
from nearfar.losses.pml import LOSSES as PML_LOSSES

pytest.importorskip("pytorch_metric_learning")
from pytorch_metric_learning import distances, losses, miners, reducers, regularizers

COSINE = distances.CosineSimilarity()
RAW_DOT = distances.DotProductSimilarity(normalize_embeddings=False)
RAW = distances.LpDistance(normalize_embeddings=False)
SQUARED = distances.LpDistance(power=2)
RAW_SQUARED = distances.LpDistance(power=2, normalize_embeddings=False)
SNR = distances.SNRDistance()
RAW_SNR = distances.SNRDistance(normalize_embeddings=False)
ZERO_MEAN = regularizers.ZeroMeanRegularizer()
MEAN = reducers.MeanReducer()
PAIRED = (6, 5, 4, 3, 2)  # no singletons
BATCHES = [make_batch(spread, sizes=PAIRED, dim=4) for spread in SPREADS]


EQUAL = [
    (losses.TripletMarginLoss(), None),
    (losses.TripletMarginLoss(0.2, reducer=MEAN), None),
    (losses.TripletMarginLoss(0.1, distance=COSINE), None),
    (losses.TripletMarginLoss(0.5, distance=distances.DotProductSimilarity()), None),
    (losses.TripletMarginLoss(0.2, distance=SQUARED), None),
    (losses.TripletMarginLoss(0.2, distance=RAW), None),
    (losses.TripletMarginLoss(2.0, distance=RAW_SQUARED), None),
    (losses.TripletMarginLoss(0.2, distance=SNR), None),
    (losses.TripletMarginLoss(0.2, distance=RAW_SNR), miners.BatchHardMiner(distance=RAW_SNR)),
    (losses.SignalToNoiseRatioContrastiveLoss(), None),
    (losses.SignalToNoiseRatioContrastiveLoss(distance=RAW_SNR, neg_margin=2), None),
    (losses.ContrastiveLoss(distance=SNR, embedding_regularizer=ZERO_MEAN, embedding_reg_weight=0.3), None),
    (losses.TripletMarginLoss(0.1, smooth_loss=True), None),
    (losses.TripletMarginLoss(0.5, smooth_loss=True, distance=RAW_SQUARED), None),
    (losses.TripletMarginLoss(0, smooth_loss=True, distance=COSINE), miners.BatchHardMiner(distance=COSINE)),
    (losses.TripletMarginLoss(0.2), miners.BatchHardMiner()),
    (losses.TripletMarginLoss(0.2), miners.BatchHardMiner(distance=COSINE)),
    (losses.TripletMarginLoss(0.2, distance=RAW_SQUARED), miners.BatchHardMiner(distance=RAW)),
    (losses.TripletMarginLoss(0.2), miners.TripletMarginMiner(margin=0.2)),
    (losses.TripletMarginLoss(0.2, distance=COSINE), miners.TripletMarginMiner(margin=0.3, distance=COSINE)),
    (losses.TripletMarginLoss(0.2, distance=COSINE), miners.MultiSimilarityMiner(0.1)),
    (losses.TripletMarginLoss(0.2), miners.MultiSimilarityMiner(0.1, distance=distances.LpDistance())),
    (losses.MultiSimilarityLoss(), None),
    (losses.MultiSimilarityLoss(4, 20, 0.3), miners.MultiSimilarityMiner(0.2)),
    (losses.MultiSimilarityLoss(), miners.BatchHardMiner()),
    (losses.CircleLoss(), None),
    (losses.CircleLoss(0.25, 16), miners.MultiSimilarityMiner(0.1)),
    (losses.NTXentLoss(), None),
    (losses.NTXentLoss(0.5), miners.MultiSimilarityMiner(0.1)),
    (losses.SupConLoss(), None),
    (losses.SupConLoss(1.0), None),
    (losses.LiftedStructureLoss(distance=RAW), None),
    (losses.LiftedStructureLoss(neg_margin=1, pos_margin=0.4, distance=RAW), None),
    (losses.MarginLoss(learn_beta=True), miners.BatchHardMiner()),
    (losses.MarginLoss(learn_beta=True, beta=1.0, nu=0.1), miners.BatchHardMiner()),
    (losses.MarginLoss(learn_beta=True, num_classes=7), miners.BatchHardMiner()),
    (losses.NPairsLoss(distance=RAW_DOT), None),
    (losses.FastAPLoss(), None),
    (losses.FastAPLoss(25), None),
    (losses.NCALoss(softmax_scale=2), None),
    (losses.NCALoss(distance=RAW_SQUARED), None),
    (losses.TupletMarginLoss(), None),
    (losses.TupletMarginLoss(23), None),
    (losses.ThresholdConsistentMarginLoss(margin_plus=0.8, lambda_minus=2.0), None),
    (losses.ThresholdConsistentMarginLoss(), None),
    (losses.SphereFaceLoss(7, 4), None),
    (losses.SphereFaceLoss(7, 4, margin=3), None),
    (losses.NormalizedSoftmaxLoss(7, 4), None),
    (losses.ProxyNCALoss(7, 4, softmax_scale=3), None),
    (losses.ArcFaceLoss(7, 4, margin=20, scale=8), None),
    (losses.ArcFaceLoss(7, 4, margin=86, scale=4), None),
    (losses.SubCenterArcFaceLoss(num_classes=7, embedding_size=4), None),
    (losses.CosFaceLoss(7, 4), None),
    (losses.SoftTripleLoss(7, 4, centers_per_class=3), None),
    (losses.SoftTripleLoss(7, 4, centers_per_class=1), None),
    (losses.SoftTripleLoss(7, 4, 3, gamma=0.5, margin=0.1), None),
    (losses.ProxyAnchorLoss(7, 4), None),
    (losses.ProxyAnchorLoss(7, 4, alpha=8, margin=0.3), None),
]


def described(value):
    return "none" if value is None else type(value).__name__


def value_and_gradients(loss, embeddings, *rest):
    """The value, and the gradients by the embeddings and by the only parameter, in one shape for both libraries."""
    leaf = embeddings.clone().requires_grad_()
    loss.zero_grad()
    value = loss(leaf, *rest)
    value.sum().backward()
    parameters = [*loss.named_parameters()]
    if not parameters:
        return value.detach(), leaf.grad, None
    ((name, parameter),) = parameters
    gradient = parameter.grad
    if name in ("W", "fc"):
        gradient = gradient.T
    return value.detach(), leaf.grad, gradient.reshape(-1)


def assert_equal(theirs, miner, ours, *, constant=0.0, tolerance=1e-9, batches=BATCHES):
    theirs, ours = theirs.double(), ours.double()
    for embeddings, labels in batches:
        mined = () if miner is None else (miner(embeddings, labels),)
        wanted = value_and_gradients(theirs, embeddings, labels, *mined)
        found = value_and_gradients(ours, embeddings, labels)
        assert_close(found[0] + constant, wanted[0].squeeze(), tolerance)
        assert_close(found[1], wanted[1], tolerance, "gradient")
        if wanted[2] is not None:
            assert_close(found[2], wanted[2], tolerance, "gradient by parameters")


class Called(nn.Module):
    """A loss that is called in another way."""

    def __init__(self, forward):
        super().__init__()
        self.forward = forward


def of_unit_vectors(loss):
    return Called(lambda embeddings, labels: loss(nn.functional.normalize(embeddings, dim=1), labels))


@pytest.mark.parametrize(("theirs", "miner"), EQUAL, ids=described)
def test_a_loss_without_differences_has_the_same_value_and_gradients(theirs, miner):
    found = nf.migrate.from_pml(theirs, miner=miner)
    assert found.differences == ()
    assert_equal(theirs, miner, found.loss)


DIFFERENT = [
    (losses.TripletMarginLoss(swap=True), None, "swap"),
    (losses.TripletMarginLoss(triplets_per_anchor=10), None, "draws triplets_per_anchor triplets"),
    (losses.TripletMarginLoss(distance=RAW_DOT), None, r"DotProduct.* \(.* raw embeddings\), this loss by euclid"),
    (losses.TripletMarginLoss(distance=distances.LpDistance(p=1)), None, r"LpDistance \(p=1"),
    (losses.TripletMarginLoss(reducer=reducers.SumReducer()), None, "SumReducer; this is what AvgNonZeroReducer does"),
    (losses.TripletMarginLoss(), miners.TripletMarginMiner(type_of_triplets="semihard"), "every semi-hard triplet"),
    (losses.TripletMarginLoss(), miners.TripletMarginMiner(type_of_triplets="hard"), "not 'hard'"),
    (losses.TripletMarginLoss(0.5), miners.TripletMarginMiner(margin=0.2), "not 'all'"),
    (losses.TripletMarginLoss(), miners.MultiSimilarityMiner(), "the miner compares by CosineSimilarity"),
    (losses.TripletMarginLoss(), miners.DistanceWeightedMiner(), "draws positives as well"),
    (losses.ContrastiveLoss(), None, "and their squares here"),
    (losses.ContrastiveLoss(distance=SQUARED), None, "√neg_margin"),
    (losses.ContrastiveLoss(0.2), None, "down to a distance of 0.2"),
    (losses.ContrastiveLoss(0.2, distance=SNR), None, "down to a distance of 0.2"),
    (losses.MultiSimilarityLoss(distance=SNR), None, "this loss by cosine"),
    (losses.ContrastiveLoss(0.9, 0.5, distance=COSINE), None, "up to a similarity of 0.9"),
    (losses.MultiSimilarityLoss(distance=distances.LpDistance()), None, "this loss by cosine"),
    (losses.MarginLoss(), miners.BatchHardMiner(), "does not learn beta"),
    (losses.MarginLoss(learn_beta=True), None, "once for each triplet"),
    (losses.MarginLoss(learn_beta=True, num_classes=7, nu=0.1), miners.BatchHardMiner(), "nu weights the betas"),
    (losses.HistogramLoss(), None, "float32"),
    (losses.SmoothAPLoss(), None, "ranks the anchor itself"),
    (losses.RankedListLoss(0.4, 5, Tp=1), None, r"\(Tp\)"),
    (losses.RankedListLoss(0.4, 5), miners.BatchHardMiner(), "weights the samples of RankedListLoss"),
    (losses.ArcFaceLoss(7, 4), miners.BatchHardMiner(), "weights the samples of ArcFaceLoss"),
    (losses.ArcFaceLoss(7, 4, weight_regularizer=regularizers.RegularFaceRegularizer()), None, "weight_regularizer"),
    (losses.TripletMarginLoss(embedding_regularizer=regularizers.LpRegularizer()), None, "embedding_regularizer"),
]


@pytest.mark.parametrize(("theirs", "miner", "difference"), DIFFERENT, ids=described)
def test_what_differs_is_said(theirs, miner, difference):
    found = nf.migrate.from_pml(theirs, miner=miner)
    with pytest.raises(AssertionError, match=difference):
        assert found.differences == (), str(found)
    embeddings, labels = make_batch(sizes=PAIRED, dim=4)
    assert found.loss(embeddings.float(), labels).isfinite()


def test_some_differences_are_of_value_lengths_or_lonely_anchors_alone():
    contrastive = losses.ContrastiveLoss(1, 0.5, distance=COSINE)
    found = nf.migrate.from_pml(contrastive)
    assert found.differences == ("the value is lower by pos_margin, 1; the gradient is the same",)
    assert_equal(contrastive, None, found.loss, constant=1.0)

    lifted = losses.GeneralizedLiftedStructureLoss(neg_margin=0, pos_margin=0.5, distance=COSINE)
    found = nf.migrate.from_pml(lifted)
    assert found.differences == ("PML also pushes anchors without positives; here their loss is 0",)
    assert_equal(lifted, None, found.loss)

    for theirs in (losses.LiftedStructureLoss(), losses.NPairsLoss(), losses.AngularLoss(35)):
        found = nf.migrate.from_pml(theirs)
        assert len(found.differences) == 1
        assert_equal(of_unit_vectors(theirs), None, of_unit_vectors(found.loss))


def test_vicreg_of_two_views_is_called_in_another_way():
    theirs = losses.VICRegLoss(10, 20, 2)
    found = nf.migrate.from_pml(theirs)
    assert len(found.differences) == 1
    assert "loss(a, items, b, items)" in found.differences[0]
    views = [make_batch(sizes=(9,), dim=4, seed=seed)[0] for seed in (0, 1)]
    leaves = [[view.clone().requires_grad_() for view in views] for _ in range(2)]
    items = torch.arange(9)
    wanted = theirs(leaves[0][0], ref_emb=leaves[0][1])
    value = found.loss(leaves[1][0], items, leaves[1][1], items)
    assert_close(value.detach(), wanted.detach(), 1e-9)
    gradients = [torch.autograd.grad(one, some) for one, some in zip((wanted, value), leaves, strict=True)]
    for other, mine in zip(*gradients, strict=True):
        assert_close(mine, other, 1e-9)
    assert "adds 0.01 to the variances" in str(nf.migrate.from_pml(losses.VICRegLoss(eps=0.01)))


def test_the_terms_of_contrastive_distances_are_equal_in_one_class():
    """Ours are the squares of theirs, and positives alone have d² in both."""
    batches = [(embeddings, torch.zeros_like(labels)) for embeddings, labels in BATCHES]
    for normalize in (True, False):
        distance = distances.LpDistance(power=2, normalize_embeddings=normalize)
        theirs = losses.ContrastiveLoss(pos_margin=0, neg_margin=1, distance=distance)
        ours = nf.losses.Contrastive(form="distance", average="pairs", normalize=normalize)
        assert_equal(theirs, None, ours, batches=batches)


def test_n_pair_with_its_positives_as_gallery():
    labels = torch.arange(5)
    anchors, positives = (make_batch(sizes=(1,) * 5, dim=4, seed=seed)[0] for seed in (1, 2))
    others = (labels.unsqueeze(1) != labels).nonzero().T
    pairs = (labels, labels + 5, others[0], others[1] + 5)
    loss = losses.NPairsLoss(distance=RAW_DOT)
    theirs = Called(lambda anchors, labels: loss(torch.cat([anchors, positives]), labels.repeat(2), pairs))
    ours = Called(lambda anchors, labels: nf.losses.NPair(l2=0.0)(anchors, labels, positives, labels))
    assert_equal(theirs, None, ours, batches=[(anchors, labels)])


@pytest.mark.filterwarnings("ignore:Using a non-tuple sequence")
@pytest.mark.parametrize("bins", [10, 100])
def test_histogram_but_for_their_float32(bins):
    assert_equal(losses.HistogramLoss(n_bins=bins), None, nf.losses.Histogram(bins=bins), tolerance=1e-5)


def test_smooth_ap_with_the_anchor_in_its_own_ranking():
    """Theirs needs as many classes as members of each, in order."""
    ours = Called(lambda embeddings, labels: nf.losses.SmoothAP()(embeddings, labels, embeddings, labels))
    batches = [make_batch(spread, sizes=(4, 4, 4, 4), dim=4) for spread in SPREADS]
    batches = [(embeddings[labels.argsort()], labels.sort().values) for embeddings, labels in batches]
    assert_equal(losses.SmoothAPLoss(), None, ours, tolerance=1e-6, batches=batches)


def test_ranked_list_has_the_same_value_but_for_a_factor():
    theirs = losses.RankedListLoss(margin=0.4, Tn=5, alpha=1.2, imbalance=0.25)
    embeddings, labels = make_batch(sizes=PAIRED, dim=4)
    found = nf.migrate.from_pml(theirs)
    assert "divided by 1 − imbalance, 0.75" in str(found)
    assert found.loss(embeddings, labels).item() * 0.75 == pytest.approx(theirs(embeddings, labels).item(), rel=1e-3)


def test_what_has_no_counterpart_is_an_error():
    with pytest.raises(ValueError, match="there is no counterpart of 'ManifoldLoss'"):
        nf.migrate.from_pml(losses.ManifoldLoss(l=4))
    with pytest.raises(
        ValueError, match=r"CrossBatchMemory cannot be converted; nearfar has nf\.losses\.Memory, which"
    ):
        nf.migrate.from_pml(losses.CrossBatchMemory(losses.ContrastiveLoss(), 4))
    with pytest.raises(ValueError, match=r"nearfar has nf\.losses\.MultipleLosses, which takes the converted losses"):
        nf.migrate.from_pml(losses.MultipleLosses([losses.ContrastiveLoss(), losses.CircleLoss()]))
    with pytest.raises(ValueError, match="UniformHistogramMiner has no counterpart"):
        nf.migrate.from_pml(losses.TripletMarginLoss(), miner=miners.UniformHistogramMiner())
    with pytest.raises(TypeError, match="one of pytorch_metric_learning is needed"):
        nf.migrate.from_pml(nf.losses.Triplet())
    with pytest.raises(ValueError, match="no counterpart of 'TripletLoss'; nearfar has one for AngularLoss, "):
        nf.migrate.counterpart("TripletLoss")


@pytest.mark.parametrize("name", PML_LOSSES)
def test_names_of_classes_name_ours(name):
    assert hasattr(losses, name)
    for word in str(PML_LOSSES[name]).split():
        if word.startswith("nf.losses."):
            assert hasattr(nf.losses, word.removeprefix("nf.losses.").rstrip(","))
    with pytest.raises(AttributeError, match=f"{name} is a class of pytorch-metric-learning; nearfar has"):
        getattr(nf.losses, name)
    with pytest.raises(ValueError, match=f"loss is '{name}', a class of pytorch-metric-learning; nearfar has"):
        nf.losses.create(name)


def test_names_of_arguments_name_ours():
    with pytest.raises(TypeError, match="ArcFace has no argument 'embedding_size'; nearfar has dim"):
        nf.losses.ArcFace(num_classes=3, embedding_size=4)
    with pytest.raises(TypeError, match="arcface has no argument 'embedding_size'; nearfar has dim"):
        nf.losses.create("arcface", num_classes=3, embedding_size=4)
    embeddings, labels = make_batch()
    for name in ("indices_tuple", "ref_emb", "ref_labels"):
        with pytest.raises(
            TypeError, match=f"Raw has no argument '{name}'; nearfar has {ARGUMENTS[name].split(',')[0]}"
        ):
            nf.losses.Raw()(embeddings, labels, **{name: None})


def test_proxies_keep_their_values():
    theirs = losses.SubCenterArcFaceLoss(num_classes=3, embedding_size=4, sub_centers=2)
    found = nf.migrate.from_pml(theirs).loss
    assert torch.equal(found.proxies.flatten(0, 1), theirs.W.T)
    assert found.margin == pytest.approx(math.radians(28.6))


@pytest.mark.parametrize("name", nf.mining.PML_MINERS)
def test_a_miner_of_another_library_leads_to_ours(name):
    assert hasattr(miners, name)
    ours = nf.mining.PML_MINERS[name]
    with pytest.raises(AttributeError, match=f"{name} is a class of pytorch-metric-learning; nearfar has {ours}$"):
        getattr(nf.mining, name)
    assert issubclass(getattr(nf.mining, ours.removeprefix("nf.mining.")), nf.mining.Mining)
