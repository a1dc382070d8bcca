"""Thresholds against a loop over all pairs and all thresholds, and their files."""

import dataclasses
import itertools
import json

import numpy as np
import pytest
import torch

import nearfar as nf

calibrate = nf.metrics.calibrate
CRITERIA = ["f1", "accuracy", 0.0, 0.05, 0.3]


def points(seed, count=24):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 5, (count,), generator=generator)
    near = torch.nn.functional.one_hot(labels, 5).double()
    return near + 0.3 * torch.randn(count, 5, generator=generator, dtype=torch.float64), labels


def pairs(embeddings, labels, measure):
    found = []
    for i, j in itertools.combinations(range(len(labels)), 2):
        one, other = embeddings[i], embeddings[j]
        score = torch.cosine_similarity(one, other, dim=0) if measure == "cosine" else -(one - other).norm()
        found.append((score.item(), bool(labels[i] == labels[j])))
    return found


def counts(scored, threshold):
    """Positives and negatives that match, and the numbers of all."""
    match = [same for score, same in scored if score >= threshold - 1e-9]
    all_positive = sum(same for _, same in scored)
    return sum(match), len(match) - sum(match), all_positive, len(scored) - all_positive


@pytest.mark.parametrize("measure", ["cosine", "euclidean"])
@pytest.mark.parametrize("criterion", CRITERIA)
@pytest.mark.parametrize("seed", range(4))
def test_no_threshold_is_better(seed, criterion, measure):
    embeddings, labels = points(seed)
    scored = pairs(embeddings, labels, measure)
    found = calibrate(embeddings, labels, criterion=criterion, measure=measure)
    right, wrong, positives, negatives = counts(scored, found.similarity)
    assert (found.positives, found.negatives) == (positives, negatives)
    assert found.false_accept == pytest.approx(wrong / negatives)
    assert found.false_reject == pytest.approx(1 - right / positives)
    assert found.f1 == pytest.approx(2 * right / (2 * right + wrong + positives - right))
    assert found.accuracy == pytest.approx((right + negatives - wrong) / len(scored))
    for threshold, _ in scored:
        right, wrong, *_ = counts(scored, threshold)
        if criterion == "f1":
            assert 2 * right / (right + wrong + positives) <= found.f1 + 1e-12
        elif criterion == "accuracy":
            assert (right + negatives - wrong) / len(scored) <= found.accuracy + 1e-12
        elif wrong / negatives <= criterion:
            assert 1 - right / positives >= found.false_reject - 1e-12
    if not isinstance(criterion, str):
        assert found.false_accept <= criterion


@pytest.mark.parametrize("measure", ["cosine", "euclidean"])
@pytest.mark.parametrize("criterion", CRITERIA)
def test_all_pairs_can_be_given(criterion, measure):
    embeddings, labels = points(1)
    left, right = torch.combinations(torch.arange(len(labels))).T
    given = nf.supervision.Pairs(left, right, labels[left] == labels[right])
    found, wanted = (calibrate(embeddings, pairs, criterion=criterion, measure=measure) for pairs in (given, labels))
    assert found.similarity == pytest.approx(wanted.similarity, abs=1e-12)
    assert dataclasses.replace(found, similarity=wanted.similarity) == wanted


def test_given_pairs_are_the_only_ones():
    line = torch.tensor([[0.0], [1.0], [3.0], [10.0], [11.0]])
    given = nf.supervision.Pairs(*map(np.array, ([0, 0, 0, 1], [1, 2, 3, 4], [1, 1, 0, 0])))
    found = calibrate(line, given, measure="euclidean")
    assert (found.similarity, found.positives, found.negatives, found.false_accept) == (-3.0, 2, 2, 0.0)
    crossed = nf.supervision.Pairs(*map(np.array, ([0, 1], [0, 1], [1, 0])))
    found = calibrate(line[:2], crossed, line[2:4], measure="euclidean")
    assert (found.similarity, found.positives, found.negatives) == (-3.0, 1, 1)


def test_the_pairs_with_a_gallery():
    # Distances 1 2 3 of classes # . #: at 1 F1 is 2/3, at 3 it is 4/5.
    gallery = torch.tensor([[1.0], [2.0], [3.0]])
    found = calibrate(torch.zeros(1, 1), torch.tensor([1]), gallery, torch.tensor([1, 0, 1]), measure="euclidean")
    assert (found.similarity, found.f1, found.false_accept, found.false_reject) == (-3.0, 0.8, 1.0, 0.0)


def test_scores_of_a_search_may_be_rounded():
    found = calibrate(torch.eye(2).repeat(2, 1), torch.tensor([0, 1, 0, 1]))
    assert found.similarity == 1.0
    assert found.matches(float(np.float32(1) - np.float32(6e-8)))
    assert not found.matches(0.999)


def test_a_rate_that_no_threshold_has_is_refused():
    embeddings = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.1, 1.0]])
    with pytest.raises(ValueError, match=r"criterion is 0\.0; .* of at least 0\.75"):
        calibrate(embeddings, torch.tensor([0, 1, 0, 1]), criterion=0.0)


@pytest.mark.parametrize("criterion", ["recall", 1.0, -0.1, float("nan")])
def test_unknown_criteria_are_refused(criterion):
    with pytest.raises(ValueError, match="criterion"):
        calibrate(*points(0), criterion=criterion)


def test_a_threshold_is_saved_and_loaded(tmp_path):
    found = calibrate(*points(0), criterion=0.1)
    found.save(tmp_path / "t.json")
    assert nf.metrics.Threshold.load(tmp_path / "t.json") == found


CHANGES = ({"format": "x"}, {"version": 2}, {"similarity": "0.5"}, {"measure": "dot"}, {"unknown": 1})


@pytest.mark.parametrize("change", [*CHANGES, "", "[]", "{}", "null"], ids=str)
def test_a_damaged_file_is_refused(tmp_path, change):
    calibrate(*points(0)).save(tmp_path / "t.json")
    content = json.loads((tmp_path / "t.json").read_text())
    (tmp_path / "t.json").write_text(change if isinstance(change, str) else json.dumps({**content, **change}))
    with pytest.raises(ValueError, match=r"t\.json is "):
        nf.metrics.Threshold.load(tmp_path / "t.json")
