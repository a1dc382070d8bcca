"""Thresholds against a loop over all pairs and all thresholds, and their files."""

import dataclasses
import itertools
import json

import numpy as np
import pytest
import torch

import nearfar as nf

calibrate, calibrate_search = nf.metrics.calibrate, nf.metrics.calibrate_search
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
    for threshold in (found, dataclasses.replace(found, search=calibrate_search(*points(0)))):
        threshold.save(tmp_path / "t.json")
        assert nf.metrics.Threshold.load(tmp_path / "t.json") == threshold


def test_a_threshold_without_one_of_searches_is_for_pairs(tmp_path):
    found = calibrate(*points(0))
    found.save(tmp_path / "t.json")
    content = json.loads((tmp_path / "t.json").read_text())
    del content["search"]
    (tmp_path / "t.json").write_text(json.dumps({**content, "version": 1}))
    assert nf.metrics.Threshold.load(tmp_path / "t.json") == found
    assert " for pairs: on the calibration data" in found.describe()


CHANGES = (
    *({"format": "x"}, {"version": 3}, {"similarity": "0.5"}, {"measure": "dot"}, {"unknown": 1}),
    *({"search": 1}, {"search": {}}, {"search": {**calibrate_search(*points(0)).to_json(), "table": {"items": [1]}}}),
)


@pytest.mark.parametrize("change", [*CHANGES, "", "[]", "{}", "null"], ids=str)
def test_a_damaged_file_is_refused(tmp_path, change):
    calibrate(*points(0)).save(tmp_path / "t.json")
    content = json.loads((tmp_path / "t.json").read_text())
    (tmp_path / "t.json").write_text(change if isinstance(change, str) else json.dumps({**content, **change}))
    with pytest.raises(ValueError, match=r"t\.json is "):
        nf.metrics.Threshold.load(tmp_path / "t.json")


@pytest.mark.parametrize("measure", ["cosine", "euclidean"])
@pytest.mark.parametrize("unknown", [0.0, 0.1, 0.5])
def test_the_threshold_of_a_search_among_all_others_is_the_quantile_of_their_best_scores(unknown, measure):
    embeddings, labels = points(3)[0], torch.arange(24) // 4
    scored = [pairs(embeddings[[row, *rest]], labels[[row, *rest]], measure)[: len(rest)] for row, rest in _others(24)]
    strangers = [max(score for score, same in row if not same) for row in scored]
    right = [max(score for score, same in row if same) for row in scored]
    found = calibrate_search(embeddings, labels, unknown=unknown, measure=measure)
    assert found.items == 20
    assert found.similarity == pytest.approx(sorted(strangers, reverse=True)[int(24 * unknown)], abs=1e-5)
    assert found.unknown_accept == np.mean([found.matches(score) for score in strangers]) <= unknown
    assert found.unknown_accept > unknown - 1 / 24
    known = [found.matches(score) and score >= other for score, other in zip(right, strangers, strict=True)]
    assert found.known_found == pytest.approx(np.mean(known))


def _others(count):
    return [(row, [other for other in range(count) if other != row]) for row in range(count)]


def mixture(seed, classes=100, per_class=12):
    """Classes of several kinds, so that some of them are alike."""
    rng = np.random.default_rng(seed)
    centers = rng.normal(size=(classes, 24)) + 0.7 * rng.normal(size=(20, 24))[rng.integers(20, size=classes)]
    labels = np.arange(classes).repeat(per_class)
    spread = 1.3 * rng.uniform(0.6, 1.4, size=(len(labels), 1))
    return centers[labels] + spread * rng.normal(size=(len(labels), 24)), labels


def test_the_wanted_share_of_strangers_matches_in_indexes_of_any_size():
    shares, of_pairs = [], []
    for seed in range(4):
        embeddings, labels = mixture(seed)
        seen = labels < 50
        found = calibrate_search(embeddings[seen], labels[seen], unknown=0.05)
        pairwise = calibrate(embeddings[seen], labels[seen])
        unit = embeddings / np.linalg.norm(embeddings, axis=1, keepdims=True)
        for classes in (9, 20, 40):
            inside = (labels >= 50) & (labels < 50 + classes)
            indexed = inside & (np.arange(len(labels)) % 2 == 0)
            best = (unit[(labels >= 50) & ~inside] @ unit[indexed].T).max(axis=1)
            shares.append((best >= found.at(indexed.sum()).similarity).mean())
            of_pairs.append((best >= pairwise.similarity).mean())
    assert abs(np.mean(shares) - 0.05) <= 0.03
    assert np.abs(np.array(shares) - 0.05).max() <= 0.08
    assert np.mean(of_pairs) > 0.2  # that of pairs does not meet any


def test_the_threshold_follows_the_number_of_items_and_says_where_it_is_an_estimate():
    found = calibrate_search(*mixture(0, classes=20))
    assert found.table["items"] == [1, 2, 4, 8, 16, 32, 64, 128, 228]
    similarities = [found.at(items).similarity for items in (0, 1, 3, 50, 228, 229, 1000, 10**9)]
    assert similarities == sorted(similarities)
    assert similarities[0] == similarities[1] < similarities[2]
    assert similarities[-1] == 1.0
    assert found.at(50).at(228) == found == calibrate_search(*mixture(0, classes=20), items=228)
    assert (
        "for 50 items: on the calibration data, 4.9 % (95 % interval 2.9 – 8.2) of strangers" in found.at(50).describe()
    )
    beyond = found.at(229)
    assert (found.is_measured, beyond.is_measured, beyond.low) == (True, False, None)
    shares = [found.at(items).known_found for items in (1, 50, 228, 229, 1000, 10**9)]
    assert shares == sorted(shares, reverse=True)
    assert shares[-1] == 0.0
    words = "about 4.6 % of strangers would match, and about 60.0 % of known images are found, estimated from 228 items"
    assert beyond.describe().endswith(words)


def test_the_estimate_for_more_items_than_the_calibration_had_is_near():
    shares = []
    for seed in range(4):
        embeddings, labels = mixture(seed, classes=240)
        found = calibrate_search(embeddings[labels < 40], labels[labels < 40], unknown=0.05)
        unit = embeddings / np.linalg.norm(embeddings, axis=1, keepdims=True)
        indexed = (labels >= 40) & (labels < 200)
        best = (unit[labels >= 200] @ unit[indexed].T).max(axis=1)
        shares.append((best >= found.at(indexed.sum()).similarity).mean())  # 1,920 items, estimated from 468
    assert abs(np.mean(shares) - 0.05) <= 0.03
    assert np.abs(np.array(shares) - 0.05).max() <= 0.08


def test_a_search_is_calibrated_the_same_in_tiles_and_on_other_types():
    embeddings, labels = mixture(1, classes=12)
    found = calibrate_search(embeddings, labels, items=20)
    tiled = calibrate_search(embeddings, labels, items=20, memory_budget=1)
    strings = calibrate_search(torch.from_numpy(embeddings), labels.astype(str), items=20)
    for other in (tiled, strings):
        assert other.table == {name: pytest.approx(column) for name, column in found.table.items()}


@pytest.mark.parametrize(
    ("labels", "settings", "message"),
    [
        ([0, 0, 0], {}, "all are of one class"),
        ([0, 1, 2], {}, "no class has two"),
        ([0, 0, 1], {"unknown": 1.0}, "unknown is 1.0"),
        ([0, 0, 1], {"items": 0}, "items is 0"),
    ],
)
def test_searches_that_cannot_be_calibrated_are_refused(labels, settings, message):
    with pytest.raises(ValueError, match=message):
        calibrate_search(torch.eye(3), torch.tensor(labels), **settings)
