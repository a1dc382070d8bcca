"""Which losses can be told apart: classes and seeds are samples, all pairs are corrected, few of either are refused."""

from itertools import combinations

import numpy as np
import pytest
from runs import finished
from scipy import stats

from nearfar.bench.comparison.significance import (
    ALPHA,
    MIN_CLASSES,
    MIN_SEEDS,
    POWER,
    by_class_and_seed,
    cliques,
    compare_losses,
    holm,
    kendall_tau,
    letter,
    pair_means,
    stack,
)
from nearfar.metrics.intervals import crossed_means, mean_squares


def results(gains, *, classes=40, seeds=5, seed=0):
    """Losses that differ by ``gains``, with noise of classes, seeds and both."""
    rng = np.random.default_rng(seed)
    shape = (classes, seeds, len(gains))
    table = 0.6 + rng.normal(0, 0.1, (classes, 1, 1)) + rng.normal(0, 0.02, (classes, 1, shape[2]))
    table = table + rng.normal(0, 0.003, (1, *shape[1:])) + rng.normal(0, 0.03, shape) + list(gains.values())
    return list(gains), table


def test_pairs_are_those_of_separate_columns():
    _, table = results(dict.fromkeys("abcd", 0.0))
    differences = [table[:, :, one] - table[:, :, other] for one, other in combinations(range(4), 2)]
    expected = crossed_means(mean_squares(np.stack(differences, axis=2)), related=True)
    found = pair_means(table)
    for name in ("mean", "error", "freedom"):
        np.testing.assert_allclose(getattr(found, name), getattr(expected, name))


def test_holm_is_that_of_explicit_steps():
    p = np.random.default_rng(0).random(20) ** 3
    order, largest, expected = sorted(range(20), key=lambda at: p[at]), 0.0, {}
    for done, at in enumerate(order):
        largest = max(largest, min(1.0, (20 - done) * p[at]))
        expected[at] = largest
    np.testing.assert_allclose(holm(p), [expected[at] for at in range(20)])


def test_equal_losses_share_a_rank_and_a_band():
    found = compare_losses(*results({"a": 0.0, "b": 0.0, "c": 0.0, "worse": -0.2}))
    assert found.ranks == {"a": 1, "b": 1, "c": 1, "worse": 4}
    assert [sorted(band) for band in found.bands] == [["a", "b", "c"], ["worse"]]
    assert [found.letters(loss) for loss in ("a", "b", "c", "worse")] == ["a", "a", "a", "b"]
    assert len(found.differences) == 6


def test_a_loss_between_two_groups_is_in_both():
    found = compare_losses(*results({"best": 0.024, "middle": 0.012, "last": 0.0}, seed=10))
    assert [found.letters(loss) for loss in ("best", "middle", "last")] == ["a", "ab", "b"]
    assert found.ranks == {"best": 1, "middle": 1, "last": 2}


def test_a_rank_counts_what_follows_from_other_differences():
    """a > b and b > c are clear; a − c is larger than both and noisy, but follows from them."""
    rng = np.random.default_rng(0)
    common = rng.normal(0, 0.3, (40, 1))
    table = np.stack([0.9 + common, 0.5 + 0.5 * common, 0.2 + 0 * common], axis=2) + rng.normal(0, 0.01, (40, 3, 3))
    found = compare_losses(["a", "b", "c"], table)
    assert found.ranks == {"a": 1, "b": 2, "c": 3}


def test_equal_results_are_not_told_apart():
    _, table = results({"a": 0.0, "c": -0.2})
    found = compare_losses(["a", "same", "c"], table[:, :, [0, 0, 1]])
    assert found.ranks == {"a": 1, "same": 1, "c": 3}
    assert found.differences[0].p == 1.0


def test_differences_name_the_better_loss_first():
    found = compare_losses(*results({"low": 0.0, "high": 0.1})).differences
    assert [(one.better, one.worse) for one in found] == [("high", "low")]
    assert found[0].low < found[0].mean < found[0].high
    assert found[0].p < 0.001


def test_a_difference_of_the_detectable_size_is_found_with_the_power_it_says():
    sizes = [compare_losses(*results({"a": 0.0, "b": 0.0}, seed=seed)).detectable for seed in range(20)]
    size = float(np.mean(sizes))
    found = [compare_losses(*results({"a": size, "b": 0.0}, seed=seed)).differences[0].p for seed in range(200)]
    assert abs(np.mean(np.array(found) < ALPHA) - POWER) < 0.1


@pytest.mark.parametrize(
    ("classes", "seeds", "words"),
    [
        (100, 1, f"too few seeds: 1, and at least {MIN_SEEDS}"),
        (100, 2, "too few seeds: 2"),
        (4, 10, f"too few classes: 4, and at least {MIN_CLASSES}"),
    ],
)
def test_too_few_classes_or_seeds_give_no_p(classes, seeds, words):
    with pytest.raises(ValueError, match=words):
        compare_losses(*results({"a": 0.0, "b": 0.5}, classes=classes, seeds=seeds))


@pytest.mark.parametrize(("classes", "seeds"), [(5, 10), (40, 3)])
def test_equal_losses_are_rarely_told_apart(classes, seeds):
    """benchmarks/significance.py does the same with real variances."""
    equal = dict.fromkeys("abcdef", 0.0)
    tried = (results(equal, classes=classes, seeds=seeds, seed=turn) for turn in range(200))
    wrong = [max(compare_losses(*each).ranks.values()) > 1 for each in tried]
    assert sum(wrong) <= 19  # of 200; 5 % and three standard deviations


def test_seeds_count_as_well_as_classes():
    """Two losses that differ in each class, but by another amount with each seed, are not told apart."""
    rng = np.random.default_rng(0)
    table = np.zeros((100, 3, 2))
    table[:, :, 0] = rng.normal([0.05, 0.0, 0.02], 0.01, (100, 3))
    by_class = table.mean(axis=1)
    assert stats.ttest_rel(by_class[:, 0], by_class[:, 1]).pvalue < 1e-10
    assert compare_losses(["a", "b"], table).ranks == {"a": 1, "b": 1}


def test_cliques_are_largest_and_complete():
    rng = np.random.default_rng(0)
    for _ in range(20):
        together = rng.random((7, 7)) < 0.6
        together = together & together.T | np.eye(7, dtype=bool)
        every = [
            set(one)
            for size in range(1, 8)
            for one in combinations(range(7), size)
            if all(together[pair] for pair in combinations(one, 2))
        ]
        largest = [one for one in every if not any(one < other for other in every)]
        assert sorted(map(sorted, largest)) == cliques(together)
    assert [letter(0), letter(25), letter(26)] == ["a", "z", "a'"]


# --- from runs ---------------------------------------------------------------------------------------------------


def runs(folder, loss, queries, **settings):
    return [
        finished(folder / f"{loss}{seed}", loss, queries=np.array(own), overrides={"training.seed": seed, **settings})
        for seed, own in enumerate(queries)
    ]


def read(groups, metric="recall@1"):
    return stack({loss: by_class_and_seed(own, metric) for loss, own in groups.items()})


def test_results_are_by_class_and_seed(tmp_path):
    groups = {
        "nra": runs(tmp_path, "nra", [[1, 0, 1, 1, 0, 1], [0, 0, 1, 0, 0, 0]]),
        "raw": runs(tmp_path, "raw", [[1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0]]),
    }
    table = read(groups)  # six queries of five classes, the first has two
    assert table.shape == (5, 2, 2)
    np.testing.assert_allclose(table.mean(axis=0), [[4 / 6, 1.0], [1 / 6, 0.0]])
    mean = 4 / 6
    np.testing.assert_allclose(table[0, 0, 0], mean + (2 - 2 * mean) / 1.2)


def test_folds_of_a_seed_are_averaged(tmp_path):
    split = {"split.name": "k_fold", "split.folds": 2}
    both = [
        finished(tmp_path / f"{fold}", queries=np.full(10, float(fold)), overrides={**split, "split.fold": fold})
        for fold in range(2)
    ]
    found = by_class_and_seed(both)
    assert found.seeds == (0,)
    assert np.unique(found.table).tolist() == [0.5]


def test_what_cannot_be_compared_is_refused(tmp_path):
    one = finished(tmp_path / "a", queries=np.ones(5))
    other = finished(tmp_path / "b", queries=np.ones(6))
    with pytest.raises(ValueError, match="b was tested on other images than a"):
        read({"a": [one], "b": [other]})
    with pytest.raises(ValueError, match="did not keep the metrics of each query"):
        read({"a": [finished(tmp_path / "c")]})
    with pytest.raises(ValueError, match="metric is 'nmi'; allowed are recall@1, map@r"):
        read({"a": [one]}, "nmi")
    later = finished(tmp_path / "d", queries=np.ones(5), overrides={"training.seed": 7})
    with pytest.raises(ValueError, match="b has seeds 7, and a has 0"):
        read({"a": [one], "b": [later]})


def test_tau_is_that_of_scipy():
    one, other = np.random.default_rng(0).random((2, 12))
    assert kendall_tau(one.tolist(), other.tolist()) == pytest.approx(stats.kendalltau(one, other).statistic)
    assert kendall_tau([1, 2], [1, 2]) is None
    assert kendall_tau([1, 1, 1], [1, 2, 3]) is None
