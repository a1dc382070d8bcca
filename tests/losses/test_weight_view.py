"""Pair weights in closed form, as the unified view derives them. All are divided by m, for the mean over anchors."""

import math

import pytest
import torch
from checks import SPREADS, assert_close, assert_same, make_batch, run

import nearfar as nf


def expected_weights(embeddings, labels, positive, negative):
    """Weights pair by pair from an anchor's similarities, its positives, its negatives and the other end."""
    similarity = torch.nn.functional.normalize(embeddings, dim=1)
    similarity = similarity @ similarity.T
    m = len(labels)
    weights = torch.zeros(m, m, dtype=torch.float64)
    for i in range(m):
        row = similarity[i].tolist()
        positives = [j for j in range(m) if j != i and labels[j] == labels[i]]
        negatives = [j for j in range(m) if labels[j] != labels[i]]
        for j in positives:
            weights[i, j] = positive(row, positives, negatives, j) / m
        for j in negatives:
            weights[i, j] = negative(row, positives, negatives, j) / m
    return weights


def assert_weights(loss, positive, negative):
    for spread in SPREADS:
        embeddings, labels = make_batch(spread)
        expected = expected_weights(embeddings, labels, positive, negative)
        assert_close(loss.pair_weights(embeddings, labels), expected, 1e-10)


def test_contrastive_weighs_every_positive_and_near_negatives_alike():
    assert_weights(nf.losses.Contrastive(margin=0.5), lambda s, P, N, j: 1.0, lambda s, P, N, j: float(s[j] > 0.5))


@pytest.mark.parametrize("margin", [0.1, 0.5])
def test_triplet_counts_the_triplets_with_a_loss(margin):
    loss = nf.losses.Triplet(mining="all", margin=margin)
    for spread in SPREADS:
        embeddings, labels = make_batch(spread)
        expected = expected_weights(
            embeddings,
            labels,
            lambda s, P, N, j: sum(s[n] - s[j] + margin > 0 for n in N),
            lambda s, P, N, j: sum(s[j] - s[p] + margin > 0 for p in P),
        )
        same = labels.unsqueeze(0) == labels.unsqueeze(1)
        triplets = ((same.sum(1) - 1) * (~same).sum(1)).sum()
        assert_close(loss.pair_weights(embeddings, labels), expected * len(labels) / triplets, 1e-10)


def _violates(s, P, N):
    if not P or not N:
        return False
    return math.log(sum(math.exp(0.5 - s[k]) for k in P)) + math.log(sum(math.exp(s[k]) for k in N)) > 0


def test_generalized_lifted_structure_weighs_by_relative_similarity():
    assert_weights(
        nf.losses.LiftedStructureGeneralized(margin=0.5),
        lambda s, P, N, j: _violates(s, P, N) / sum(math.exp(s[j] - s[k]) for k in P),
        lambda s, P, N, j: _violates(s, P, N) / sum(math.exp(s[k] - s[j]) for k in N),
    )


def test_binomial_deviance_weighs_by_absolute_similarity():
    alpha, beta, base = 2.0, 50.0, 0.5
    assert_weights(
        nf.losses.BinomialDeviance(alpha=alpha, beta=beta, base=base),
        lambda s, P, N, j: alpha / (1 + math.exp(-alpha * (base - s[j]))) / len(P),
        lambda s, P, N, j: beta / (1 + math.exp(-beta * (s[j] - base))) / len(N),
    )


def test_raw_weighs_by_both():
    alpha, beta, base = 2.0, 50.0, 0.5
    assert_weights(
        nf.losses.Raw(alpha=alpha, beta=beta, base=base),
        lambda s, P, N, j: 1 / (sum(math.exp(alpha * (s[j] - s[k])) for k in P) + math.exp(alpha * (s[j] - base))),
        lambda s, P, N, j: 1 / (sum(math.exp(-beta * (s[j] - s[k])) for k in N) + math.exp(-beta * (s[j] - base))),
    )


def test_raw_over_mined_sets():
    alpha, beta, base, margin = 3.0, 20.0, 0.4, 0.1

    def kept(s, P, N):
        if not P or not N:
            return [], []
        nearest, farthest = max(s[n] for n in N), min(s[p] for p in P)
        return [p for p in P if s[p] < nearest + margin], [n for n in N if s[n] > farthest - margin]

    def positive(s, P, N, j):
        P, _ = kept(s, P, N)
        if j not in P:
            return 0.0
        return 1 / (sum(math.exp(alpha * (s[j] - s[k])) for k in P) + math.exp(alpha * (s[j] - base)))

    def negative(s, P, N, j):
        _, N = kept(s, P, N)
        if j not in N:
            return 0.0
        return 1 / (sum(math.exp(-beta * (s[j] - s[k])) for k in N) + math.exp(-beta * (s[j] - base)))

    assert_weights(nf.losses.Raw(alpha=alpha, beta=beta, base=base, mining="valid_triplet"), positive, negative)


@pytest.mark.parametrize("epsilon", [0.0, 0.1, 0.4])
def test_multi_similarity_is_raw_with_valid_triplet_mining(epsilon):
    mining = nf.mining.create("valid_triplet", margin=epsilon)
    for spread in SPREADS:
        batch = make_batch(spread)
        raw = run(nf.losses.Raw(mining=mining), *batch)
        assert_same(run(nf.losses.MultiSimilarity(epsilon=epsilon), *batch), raw, tolerance=1e-14)


def test_equal_weights_for_every_mined_pair():
    """What table 1 calls VTHM."""
    embeddings, labels = make_batch()
    weights = nf.losses.Contrastive(margin=-1.0, mining="valid_triplet").pair_weights(embeddings, labels)
    mined = nf.losses.Raw(mining="valid_triplet").pair_weights(embeddings, labels) > 0
    assert_close(weights * len(labels), mined.to(weights), 1e-12)


TABLE_1 = {
    "Binomial": ("binomial_deviance", {}),
    "RAW": ("raw", {}),
    "VTHM": ("contrastive", {"margin": -1.0, "mining": "valid_triplet"}),
    "Binomial+VTHM": ("binomial_deviance", {"mining": "valid_triplet"}),
    "RAW+DW": ("raw", {"mining": "distance_weighted"}),
    "RAW+SemiHard": ("raw", {"mining": "semi_hard"}),
    "RAW+VTHM": ("raw", {"mining": "valid_triplet"}),
}


def test_the_methods_of_table_1_are_compositions_and_all_differ():
    batch = make_batch(dim=8)
    values = {name: run(nf.losses.create(key, **settings), *batch) for name, (key, settings) in TABLE_1.items()}
    assert all(outcome.gradients["embeddings"].any() for outcome in values.values())
    assert len({round(outcome.value.item(), 9) for outcome in values.values()}) == len(TABLE_1)


def test_weights_ignore_autocast():
    embeddings, labels = make_batch(dim=16, dtype=torch.float32)
    expected = nf.losses.Raw().pair_weights(embeddings, labels)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(nf.losses.Raw().pair_weights(embeddings, labels), expected)


def test_weights_of_a_gallery_of_another_dtype():
    embeddings, labels = make_batch(dim=16, dtype=torch.float32)
    expected = nf.losses.Raw().pair_weights(embeddings, labels, embeddings, labels)
    assert_close(nf.losses.Raw().pair_weights(embeddings, labels, embeddings.double(), labels), expected, 1e-6)
