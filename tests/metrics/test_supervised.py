"""Metrics of supervision other than labels, against scikit-learn and against the metrics of labels."""

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.metrics import average_precision_score, ndcg_score, roc_auc_score

from nearfar.metrics import retrieval, verification
from nearfar.supervision import Hierarchy, Masks, MultiLabel, Pairs, Triplets

POINTS = torch.randn(40, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
GALLERY = torch.randn(30, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
LABELS = torch.arange(40) % 7
MATRIX = torch.rand(40, 6, generator=torch.Generator().manual_seed(2)) < 0.25
GALLERY_MATRIX = torch.rand(30, 6, generator=torch.Generator().manual_seed(3)) < 0.25
RNG = np.random.default_rng(0)
LEFT, RIGHT = RNG.permutation(np.stack(np.triu_indices(40, 1), axis=1))[:120].T
SAME = (RNG.random(120) < 0.5).astype(np.int64)

both_measures = pytest.mark.parametrize("measure", ["cosine", "euclidean"])


def similarities(one, other, measure):
    if measure == "euclidean":
        return -torch.cdist(one, other)
    return torch.nn.functional.normalize(one, dim=1) @ torch.nn.functional.normalize(other, dim=1).T


# --- retrieval ----------------------------------------------------------------------------------------------


@both_measures
@pytest.mark.parametrize("memory_budget", [None, 1])
def test_classes_as_supervision_are_ranked_like_labels(measure, memory_budget):
    settings = {"ks": (1, 3, 100), "at_k": ("recall", "precision", "map"), "measure": measure}
    same = LABELS.unsqueeze(1) == LABELS
    expected = retrieval(POINTS, LABELS, **settings)
    for supervision in (Masks(same), Hierarchy([LABELS]), MultiLabel(torch.nn.functional.one_hot(LABELS))):
        actual = retrieval(POINTS, supervision, memory_budget=memory_budget, **settings)
        assert actual == pytest.approx(expected, abs=1e-12)


@both_measures
def test_items_with_a_label_in_common_are_found(measure):
    found = retrieval(POINTS, MultiLabel(MATRIX, GALLERY_MATRIX), GALLERY, ks=(5,), at_k=("ndcg",), measure=measure,
                      per_query=True)  # fmt: skip
    near = similarities(POINTS, GALLERY, measure)
    for query in range(40):
        shared = (MATRIX[query] & GALLERY_MATRIX).sum(dim=1)
        overlap = shared / (MATRIX[query] | GALLERY_MATRIX).sum(dim=1).clamp(min=1)
        values = {name: value[query].item() for name, value in found["per_query"].items()}
        if not shared.any():
            assert np.isnan(values["map"])
            continue
        assert values["map"] == pytest.approx(average_precision_score(shared > 0, near[query]))
        assert values["ndcg@5"] == pytest.approx(ndcg_score(overlap[None].double(), near[query][None], k=5))


def test_unknown_items_are_ignored():
    kinds = torch.randint(0, 3, (40, 30), generator=torch.Generator().manual_seed(4))
    found = retrieval(POINTS, Masks(kinds == 0, kinds == 1), GALLERY, per_query=True)["per_query"]["map"]
    near = similarities(POINTS, GALLERY, "cosine")
    for query in range(40):
        known = kinds[query] < 2
        assert found[query].item() == pytest.approx(
            average_precision_score(kinds[query][known] == 0, near[query][known])
        )


def test_levels_of_a_hierarchy_are_grades():
    levels = pd.DataFrame({"group": np.where(LABELS < 3, "low", "high"), "label": LABELS.numpy()})
    found = retrieval(POINTS, Hierarchy(levels), ks=8, at_k="ndcg", per_query=True)["per_query"]["ndcg@8"]
    near = similarities(POINTS, POINTS, "cosine")
    for query in range(40):
        others = torch.arange(40) != query
        grades = ((LABELS < 3) == (LABELS[query] < 3)).double() / 2 + (LABELS[query] == LABELS).double() / 2
        assert found[query].item() == pytest.approx(ndcg_score(grades[others][None], near[query][others][None], k=8))


@pytest.mark.parametrize(
    ("labels", "settings", "words"),
    [
        (MultiLabel(MATRIX), {"groups": LABELS}, "labels is a MultiLabel; .*groups.* need class labels"),
        (MultiLabel(torch.zeros(40, 2)), {}, "labels: no query has a positive, so there is nothing to retrieve"),
        (MultiLabel(MATRIX[:5]), {}, "matrix has 5 rows for 40 embeddings"),
        (LABELS, {"at_k": "ndcg"}, r"at_k contains 'ndcg', which needs a supervision: nearfar\.supervision\.Hierarchy"),
    ],
)
def test_what_retrieval_refuses(labels, settings, words):
    with pytest.raises(ValueError, match=words):
        retrieval(POINTS, labels, **settings)


# --- verification -------------------------------------------------------------------------------------------


@both_measures
def test_all_pairs_are_verified_like_labels(measure):
    left, right = torch.triu_indices(40, 40, offset=1)
    expected = verification(POINTS, LABELS, measure=measure)
    pairs = Pairs(left, right, LABELS[left] == LABELS[right])
    for budget in (None, 1):
        report = verification(POINTS, pairs, measure=measure, memory_budget=budget)
        assert {name: report[name] for name in expected} == pytest.approx(expected, nan_ok=True)


@both_measures
def test_given_pairs_with_a_gallery(measure):
    table = pd.DataFrame({"left": [0, 1, 2, 3, 4, 5], "right": [3, 3, 2, 9, 8, 29], "same": [1, 0, 1, 0, 0, 1]})
    found = verification(POINTS, Pairs(table["left"], table["right"], table["same"]), GALLERY, measure=measure)
    near = similarities(POINTS, GALLERY, measure)[table["left"].tolist(), table["right"].tolist()]
    assert found["auc"] == pytest.approx(roc_auc_score(table["same"], near))
    assert (found["positives"], found["negatives"]) == (3, 3)


def accuracy_by_hand(values, folds):
    """Accuracy with the best threshold of the other folds: all of them are tried."""
    right = 0
    for fold in np.unique(folds):
        others = folds != fold
        ordered = np.unique(values[others])
        tried = np.concatenate([[-np.inf], (ordered[1:] + ordered[:-1]) / 2, [np.inf]])
        counts = [int(((values[others] > threshold) == SAME[others]).sum()) for threshold in tried]
        right += int(((values[~others] > tried[int(np.argmax(counts))]) == SAME[~others]).sum())
    return right / len(values)


@both_measures
def test_given_pairs(measure):
    values, pairs = similarities(POINTS, POINTS, measure)[LEFT, RIGHT].numpy(), Pairs(LEFT, RIGHT, SAME)
    found = verification(POINTS.numpy(), pairs, rates=(0.1,), measure=measure)
    assert found["auc"] == pytest.approx(roc_auc_score(SAME, values))
    threshold = min(value for value in values[SAME == 1] if (values[SAME == 0] >= value).mean() <= 0.1)
    assert found["tar@0.1"] == pytest.approx((values[SAME == 1] >= threshold).mean())
    assert found["threshold@0.1"] == pytest.approx(threshold if measure == "cosine" else -threshold)
    assert found["accuracy"] == pytest.approx(accuracy_by_hand(values, np.arange(120) % 10))
    folds = np.arange(120) // 30
    again = verification(POINTS, pairs, folds=folds, measure=measure)
    assert again["accuracy"] == pytest.approx(accuracy_by_hand(values, folds))


def test_a_pair_may_be_given_twice_with_two_judgments_and_a_row_with_itself():
    left, right, same = np.array([0, 0, 3, 1]), np.array([1, 1, 3, 2]), np.array([1, 0, 1, 0])
    values = similarities(POINTS, POINTS, "cosine")[left, right]
    assert verification(POINTS, Pairs(left, right, same))["auc"] == pytest.approx(roc_auc_score(same, values))


@pytest.mark.parametrize(
    ("left", "right", "same", "message"),
    [
        (LEFT, RIGHT, SAME | 1, "labels: all pairs are same, so there is no pair to refuse"),
        (LEFT, RIGHT, 0 * SAME, "labels: all pairs are different, so there is no pair to accept"),
        (LEFT, RIGHT + 40, SAME, "right ranges from .* embeddings has 40 rows"),
        (LEFT + 40, RIGHT, SAME, "left ranges from .* embeddings has 40 rows"),
    ],
)
def test_pairs_that_do_not_fit(left, right, same, message):
    with pytest.raises(ValueError, match=message):
        verification(POINTS, Pairs(left, right, same))


def test_folds_need_given_pairs():
    with pytest.raises(TypeError, match="folds are those of given pairs"):
        verification(POINTS, LABELS, folds=np.arange(40))


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        (MultiLabel(MATRIX), "labels is a MultiLabel; allowed are class labels, and Pairs"),
        (Triplets(*torch.tensor([[0], [1], [2]])), "labels is a Triplets; allowed"),
        (Pairs(torch.tensor([0]), torch.tensor([1]), others="negative"), "labels is Pairs with others='negative'"),
    ],
)
def test_supervision_that_verification_cannot_use(labels, words):
    with pytest.raises(TypeError, match=words):
        verification(POINTS, labels)
