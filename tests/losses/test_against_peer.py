"""The same loss from pytorch-metric-learning 2.9.0 on batches of special shapes; tests/test_migrate.py has most losses.

Left out, because the peer does something else: the gradient of RankedListLoss (it differentiates the gallery
and the weights, which the paper holds constant); anchors without positives in GeneralizedLiftedStructureLoss
(an empty log-sum counts as 0 there, so such an anchor is still pushed); batches with a single mined pair,
whose loss the peer drops; SmoothAPLoss unless there are as many classes as members of each, in order (it takes
the one number for the other); HistogramLoss of equal embeddings (it fails at a similarity of 1); ProxyNCALoss as
printed (the own class is in its sum) and where a probability underflows (the sample is dropped); the distances
between the centers of SoftTripleLoss (it has none).
"""

import pytest
import torch
from checks import assert_close, make_batch

import nearfar as nf

pytest.importorskip("pytorch_metric_learning")
from pytorch_metric_learning import distances, losses

PAIRED = (6, 5, 4, 3, 2)  # no singletons


def value_and_gradient(loss, embeddings, *rest):
    leaf = embeddings.clone().requires_grad_()
    value = loss(leaf, *rest)
    (gradient,) = torch.autograd.grad(value, leaf)
    return value.detach(), gradient


@pytest.mark.parametrize("normalize", [True, False])
def test_contrastive_of_distances_in_one_class(normalize):
    # The peer's loss is the root of ours, term by term.
    distance = distances.LpDistance(power=2, normalize_embeddings=normalize)
    theirs = losses.ContrastiveLoss(pos_margin=0, neg_margin=1, distance=distance)
    embeddings, labels = make_batch("apart", sizes=PAIRED, dim=4)
    only_one_class = torch.zeros_like(labels)  # positives alone, where both have d²
    ours = nf.losses.Contrastive(form="distance", average="pairs", normalize=normalize)
    found = value_and_gradient(ours, embeddings, only_one_class)
    for mine, other in zip(found, value_and_gradient(theirs, embeddings, only_one_class), strict=True):
        assert_close(mine, other, 1e-9)


def test_n_pair_with_its_positives_as_gallery():
    count = 5
    raw = distances.DotProductSimilarity(normalize_embeddings=False)
    labels = torch.arange(count)
    anchors, positives = (make_batch(sizes=(1,) * count, dim=4, seed=seed)[0] for seed in (1, 2))
    first = torch.arange(count)
    others = torch.tensor([(i, j) for i in range(count) for j in range(count) if i != j]).T
    pairs = (first, first + count, others[0], others[1] + count)

    def theirs(anchors):
        return losses.NPairsLoss(distance=raw)(torch.cat([anchors, positives]), torch.cat([labels, labels]), pairs)

    def ours(anchors):
        return nf.losses.NPair(l2=0.0)(anchors, labels, positives, labels)

    for mine, other in zip(value_and_gradient(ours, anchors), value_and_gradient(theirs, anchors), strict=True):
        assert_close(mine, other, 1e-9)


@pytest.mark.filterwarnings("ignore:Using a non-tuple sequence")
@pytest.mark.parametrize("bins", [10, 100])
def test_histogram(bins):
    for spread in ("apart", "touching", "mixed"):
        embeddings, labels = make_batch(spread, sizes=PAIRED, dim=4)
        mine, other = (
            value_and_gradient(loss, embeddings, labels)
            for loss in (nf.losses.Histogram(bins=bins), losses.HistogramLoss(n_bins=bins))
        )
        assert_close(mine[0], other[0], 1e-5)  # the peer's node numbers are float32
        assert_close(mine[1], other[1], 1e-5, "gradient")


def test_smooth_ap_with_the_anchor_in_its_own_ranking():
    theirs = losses.SmoothAPLoss()
    for spread in ("apart", "touching", "mixed"):
        embeddings, labels = make_batch(spread, sizes=(4, 4, 4, 4), dim=4)
        labels, order = labels.sort()
        embeddings = embeddings[order]

        def ours(embeddings, labels):
            return nf.losses.SmoothAP()(embeddings, labels, embeddings, labels)

        mine, other = (value_and_gradient(loss, embeddings, labels) for loss in (ours, theirs))
        assert_close(mine[0], other[0], 1e-6)  # theirs is float32
        assert_close(mine[1], other[1], 1e-6, "gradient")
