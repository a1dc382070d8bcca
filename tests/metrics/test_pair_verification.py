"""Verification of given pairs, against loops over thresholds."""

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score

from nearfar import metrics
from nearfar.supervision import Pairs

RNG = np.random.default_rng(0)
POINTS = RNG.normal(size=(40, 5))
LEFT, RIGHT = RNG.permutation(np.stack(np.triu_indices(40, 1), axis=1))[:120].T
SAME = (RNG.random(120) < 0.5).astype(np.int64)
PAIRS = Pairs(LEFT, RIGHT, SAME)


def similarities(measure):
    one, other = POINTS[LEFT], POINTS[RIGHT]
    if measure == "euclidean":
        return -np.linalg.norm(one - other, axis=1)
    return (one * other).sum(axis=1) / np.linalg.norm(one, axis=1) / np.linalg.norm(other, axis=1)


def by_hand(values, folds):
    """Accuracy with the best threshold of the other folds: all of them are tried."""
    right = 0
    for fold in np.unique(folds):
        others = folds != fold
        ordered = np.unique(values[others])
        tried = np.concatenate([[-np.inf], (ordered[1:] + ordered[:-1]) / 2, [np.inf]])
        counts = [int(((values[others] > t) == SAME[others]).sum()) for t in tried]
        best = tried[int(np.argmax(counts))]
        right += int(((values[~others] > best) == SAME[~others]).sum())
    return right / len(values)


@pytest.mark.parametrize("measure", ["cosine", "euclidean"])
def test_given_pairs(measure):
    values = similarities(measure)
    found = metrics.verification(POINTS, PAIRS, rates=(0.1,), measure=measure)
    assert found["auc"] == pytest.approx(roc_auc_score(SAME, values))
    threshold = min(t for t in values[SAME == 1] if (values[SAME == 0] >= t).mean() <= 0.1)
    assert found["tar@0.1"] == pytest.approx((values[SAME == 1] >= threshold).mean())
    assert found["threshold@0.1"] == pytest.approx(threshold if measure == "cosine" else -threshold)
    assert found["accuracy"] == pytest.approx(by_hand(values, np.arange(120) % 10))
    folds = np.arange(120) // 30
    again = metrics.verification(torch.from_numpy(POINTS), PAIRS, folds=folds, measure=measure)
    assert again["accuracy"] == pytest.approx(by_hand(values, folds))


def test_a_pair_may_be_given_twice_with_two_judgments_and_a_row_with_itself():
    left, right, same = np.array([0, 0, 3, 1]), np.array([1, 1, 3, 2]), np.array([1, 0, 1, 0])
    unit = POINTS / np.linalg.norm(POINTS, axis=1, keepdims=True)
    values = (unit[left] * unit[right]).sum(axis=1)
    report = metrics.verification(POINTS, Pairs(left, right, same))
    assert report["auc"] == pytest.approx(roc_auc_score(same, values))


@pytest.mark.parametrize(
    ("left", "right", "same", "message"),
    [
        (LEFT, RIGHT, np.ones(120, dtype=np.int64), "labels: all pairs are same, so there is no pair to refuse"),
        (LEFT, RIGHT, 0 * SAME, "labels: all pairs are different, so there is no pair to accept"),
        (LEFT, RIGHT + 40, SAME, "right ranges from .* embeddings has 40 rows"),
        (LEFT + 40, RIGHT, SAME, "left ranges from .* embeddings has 40 rows"),
    ],
)
def test_pairs_that_do_not_fit(left, right, same, message):
    with pytest.raises(ValueError, match=message):
        metrics.verification(POINTS, Pairs(left, right, same))


def test_folds_need_given_pairs():
    with pytest.raises(TypeError, match="folds are those of given pairs"):
        metrics.verification(POINTS, np.arange(40) % 6, folds=np.arange(40))
