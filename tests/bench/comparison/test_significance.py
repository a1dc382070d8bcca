"""Paired draws of queries and of classes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from fake_outcomes import finished

from nearfar import metrics
from nearfar.bench.comparison.significance import answers, intervals, means, paired, pairwise


def test_a_draw_of_queries_is_a_mean_of_as_many() -> None:
    table = np.array([[1.0, 10.0], [0.0, 0.0]])
    drawn = means(table, samples=200, seed=1)
    assert drawn.shape == (200, 2)
    assert set(drawn[:, 0].tolist()) == {0.0, 0.5, 1.0}
    assert np.array_equal(drawn[:, 1], 10 * drawn[:, 0])  # the same queries for all


def test_a_draw_of_classes_takes_all_their_queries() -> None:
    table = np.array([[1.0], [1.0], [0.0]])
    drawn = means(table, classes=np.array([7, 7, 3]), samples=300)
    assert set(np.round(drawn[:, 0], 6).tolist()) == {0.0, round(2 / 3, 6), 1.0}


def test_draws_do_not_depend_on_how_many_are_held_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    table = np.random.default_rng(0).random((40, 2))
    whole = means(table, samples=50)
    monkeypatch.setattr("nearfar.bench.comparison.significance.CHUNK", 80)
    # The same draws; only the order in which a matrix product adds may differ.
    np.testing.assert_allclose(means(table, samples=50), whole, rtol=1e-13)


def test_the_interval_is_that_of_the_difference_alone() -> None:
    rng = np.random.default_rng(0)
    first = (rng.random(2000) < 0.6).astype(float)
    second = np.where(rng.random(2000) < 0.05, 1 - first, first)
    mean, low, high, _ = paired(first, second, samples=4000)
    plain = metrics.bootstrap(first - second, samples=4000)
    assert (mean, low, high) == pytest.approx(plain, abs=2e-3)


def test_nothing_is_clear_between_equals_and_much_between_others() -> None:
    first, second = np.tile([0.0, 1.0], 500), np.tile([1.0, 0.0], 500)
    assert paired(first, second, samples=1000)[3] > 0.8
    assert paired(np.ones(1000), second, samples=1000)[3] == pytest.approx(2 / 1001)
    assert paired(first, first, samples=100) == (0.0, 0.0, 0.0, 1.0)


def test_p_is_small_as_often_as_it_says() -> None:
    rng = np.random.default_rng(1)
    small = 0
    for _ in range(200):
        first, second = (rng.random((2, 300)) < 0.5).astype(float)
        small += paired(first, second, samples=300)[3] < 0.1
    assert 8 <= small <= 36  # of 200 about 20


def test_classes_that_stand_together_make_intervals_wider() -> None:
    rng = np.random.default_rng(0)
    classes = np.repeat(np.arange(20), 50)
    gain = rng.normal(0.05, 0.1, 20)[classes]
    first, second = gain + rng.normal(0, 0.01, 1000), np.zeros(1000)
    _, low, high, _ = paired(first, second, samples=1000)
    _, wide_low, wide_high, _ = paired(first, second, classes=classes, samples=1000)
    assert wide_high - wide_low > 3 * (high - low)


@pytest.mark.parametrize(
    ("table", "classes", "words"),
    [
        (np.empty((0, 2)), None, "0 queries"),
        (np.array([[np.nan]]), None, "all numbers finite"),
        (np.ones((3, 1)), np.ones(2), "classes has 2 entries"),
    ],
)
def test_what_cannot_be_drawn_is_refused(table: np.ndarray, classes: np.ndarray | None, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        means(table, classes=classes)


def test_all_pairs_are_compared_best_first(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    groups = {
        loss: [finished(tmp_path / loss, loss, queries=rng.random(400) < level)]
        for loss, level in (("nra", 0.4), ("proxy_anchor", 0.9), ("triplet", 0.6))
    }
    found = pairwise(groups, over="queries", samples=1000)
    assert [(one.better, one.worse) for one in found] == [
        ("proxy_anchor", "triplet"),
        ("proxy_anchor", "nra"),
        ("triplet", "nra"),
    ]
    assert all(one.low < one.mean < one.high for one in found)
    assert all(one.p == pytest.approx(3 * 2 / 1001) for one in found)  # as small as it gets, times three pairs
    assert [one.worse for one in pairwise(groups, best_only=True, samples=100)] == ["triplet", "nra"]


def test_seeds_are_averaged_before_queries_are_drawn(tmp_path: Path) -> None:
    runs = [
        finished(tmp_path / f"{seed}", queries=np.array(queries), overrides={"training.seed": seed})
        for seed, queries in enumerate([[1, 0, 1, 1], [0, 0, 1, 0]])
    ]
    table, classes = answers({"proxy_anchor": runs}, "recall@1")
    assert table[:, 0].tolist() == [0.5, 0.0, 1.0, 0.5]
    assert classes is not None
    assert classes.tolist() == [0, 1, 2, 3]


def test_intervals_hold_the_mean(tmp_path: Path) -> None:
    queries = np.random.default_rng(0).random(300) < 0.7
    run = finished(tmp_path / "a", queries=queries)
    for over in ("classes", "queries"):
        low, high = intervals({"a": [run]}, over=over, samples=500)["a"]
        assert low < queries.mean() < high


def test_runs_tested_on_other_pictures_are_refused(tmp_path: Path) -> None:
    one = finished(tmp_path / "a", queries=np.ones(5))
    two = finished(tmp_path / "b", queries=np.ones(6))
    with pytest.raises(ValueError, match="b was tested on other images"):
        pairwise({"a": [one], "b": [two]})
    with pytest.raises(ValueError, match="did not keep the metrics of each query"):
        pairwise({"a": [finished(tmp_path / "c")]})
    with pytest.raises(ValueError, match="over is 'pictures'; allowed are queries, classes"):
        pairwise({"a": [one]}, over="pictures")
    with pytest.raises(ValueError, match="metric is 'nmi'; allowed are recall@1, map@r"):
        pairwise({"a": [one]}, metric="nmi")
