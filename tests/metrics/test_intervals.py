"""Intervals over classes and seeds: the same numbers as explicit loops and SciPy, and coverage that holds."""

import math
import statistics

import numpy as np
import pytest
import torch
from scipy import stats

import nearfar as nf
from nearfar.metrics import Interval, class_intervals
from nearfar.metrics.intervals import PRIOR, by_class, crossed_means, mean_squares

NAN = math.nan


def looped(table):
    """Mean, standard error and degrees of freedom of one column, by the sums of an analysis of variance."""
    classes, seeds = len(table), len(table[0])
    mean = statistics.fmean(value for row in table for value in row)
    of_row = [statistics.fmean(row) for row in table]
    of_column = [statistics.fmean(row[at] for row in table) for at in range(seeds)]
    rows = seeds * sum((each - mean) ** 2 for each in of_row) / (classes - 1)
    columns = classes * sum((each - mean) ** 2 for each in of_column) / (seeds - 1)
    both = (classes - 1) * (seeds - 1)
    left = [table[c][s] - of_row[c] - of_column[s] + mean for c in range(classes) for s in range(seeds)]
    rest = sum(each**2 for each in left) / both
    variance = max(rows + columns - rest, rows, columns) / (classes * seeds)
    parts = [(rows, classes - 1), (columns, seeds - 1), (rest, both)]
    freedom = variance**2 / sum((square / (classes * seeds)) ** 2 / free for square, free in parts)
    return mean, math.sqrt(variance), freedom


def test_means_and_errors_are_those_of_explicit_sums():
    rng = np.random.default_rng(0)
    table = rng.normal(size=(7, 1, 5)) + rng.normal(size=(1, 4, 5)) + rng.normal(size=(7, 4, 5))
    found = crossed_means(mean_squares(table))
    for column in range(5):
        expected = looped(table[:, :, column].tolist())
        assert [each[column] for each in (found.mean, found.error, found.freedom)] == pytest.approx(expected)


def test_one_seed_is_the_t_interval_of_classes():
    values = np.random.default_rng(0).normal(size=12)
    found = crossed_means(mean_squares(values[:, None, None]))
    low, high = stats.t.interval(0.9, 11, values.mean(), stats.sem(values))
    assert np.concatenate(found.intervals(0.9)) == pytest.approx([low, high])
    assert found.p_values()[0] == pytest.approx(stats.ttest_1samp(values, 0.0).pvalue)


def test_a_difference_of_nothing_has_a_p_of_one():
    table = np.zeros((5, 3, 2))
    table[..., 1] = 0.5  # the same for all classes and seeds
    assert crossed_means(mean_squares(table)).p_values().tolist() == [1.0, 0.0]


def test_related_columns_share_the_usual_spread_of_seeds():
    rng = np.random.default_rng(1)
    table = rng.normal(size=(50, 1, 40)) + rng.normal(size=(1, 3, 40))
    squares, alone = mean_squares(table), crossed_means(mean_squares(table))
    together = crossed_means(squares, related=True)
    usual = np.median(squares.of_seed) / math.log(2)  # the median of χ² with 2 degrees of freedom is 2 ln 2
    assert np.median(squares.of_seed) < usual < 2 * squares.of_seed.mean()
    lucky = squares.of_seed < usual
    assert (together.error[lucky] > alone.error[lucky]).all()
    assert (together.error[~lucky] < alone.error[~lucky]).all()
    of_seed = (2 * squares.of_seed + PRIOR * usual) / (2 + PRIOR)
    variance = np.maximum(squares.of_class + of_seed - squares.of_rest, np.maximum(squares.of_class, of_seed))
    np.testing.assert_allclose(together.error**2, variance)
    one = mean_squares(table[:, :, :1])  # nothing to share it with
    assert crossed_means(one, related=True).error == crossed_means(one).error


def test_values_of_classes_have_the_mean_of_all_queries_and_the_variance_of_a_ratio():
    rng = np.random.default_rng(0)
    classes = np.repeat(np.arange(6), [1, 2, 3, 10, 20, 30])
    values = rng.random((66, 2))
    found = by_class(values, classes)
    np.testing.assert_allclose(found.mean(axis=0), values.mean(axis=0))
    sizes = np.bincount(classes)
    for column in range(2):
        mean = values[:, column].mean()
        left = [values[classes == c, column].sum() - sizes[c] * mean for c in range(6)]
        expected = math.sqrt(6 / 5 * sum(each**2 for each in left)) / 66  # linearized error of a ratio
        assert crossed_means(mean_squares(found[:, None])).error[column] == pytest.approx(expected)


@pytest.mark.parametrize("classes", [5, 20])
def test_intervals_contain_the_truth_as_often_as_they_say(classes):
    rng = np.random.default_rng(classes)
    recall = np.clip(0.7 + 0.1 * rng.normal(size=(classes, 1, 2000)), 0, 1)
    values = rng.binomial(40, recall) / 40
    low, high = crossed_means(mean_squares(values)).share_intervals()
    assert 0.93 < ((low <= 0.7) & (high >= 0.7)).mean() < 0.97


def test_queries_of_a_class_are_not_independent():
    classes = torch.arange(8).repeat_interleave(100)
    values = (classes % 2).double()  # a class is found whole or not at all: eight answers, not 800
    found = class_intervals({"recall@1": values}, classes)["recall@1"]
    assert found.classes == 8
    assert found.high - found.low > 0.7  # the 800 would give 0.07


def test_queries_without_a_value_are_left_out():
    values, classes = np.array([1.0, 0.5, NAN, 0.0, NAN, 1.0]), np.array(["a", "a", "b", "c", "d", "c"])
    found = class_intervals({"map": values}, classes)["map"]
    assert found == class_intervals({"map": values[[0, 1, 3, 5]]}, classes[[0, 1, 3, 5]])["map"]
    assert (found.mean, found.classes) == (0.625, 2)


def test_one_class_has_no_interval():
    found = class_intervals({"a": torch.tensor([0.0, 1.0])}, torch.tensor([3, 3]))["a"]
    assert found.mean == 0.5
    assert math.isnan(found.low)
    assert math.isnan(found.high)


def test_intervals_end_within_zero_and_one():
    found = class_intervals({"a": torch.tensor([0.0, 1.0, 1.0])}, torch.tensor([0, 1, 2]))["a"]
    half = stats.t.ppf(0.975, 2) / 3 / (2 / 9)  # of the logit: the error over the slope of the logistic function
    ends = [1 / (1 + math.exp(-(math.log(2) + sign * half))) for sign in (-1, 1)]
    assert found == Interval(*map(pytest.approx, (2 / 3, *ends)), 3)
    assert class_intervals({"a": torch.ones(3)}, torch.arange(3))["a"] == Interval(1.0, 1.0, 1.0, 3)


def test_per_query_results_of_retrieval():
    generator = torch.Generator().manual_seed(0)
    embeddings, labels = torch.randn(60, 4, generator=generator), torch.randint(20, (60,), generator=generator)
    found = nf.metrics.retrieval(embeddings, labels, ks=(1, 4), per_query=True)
    assert found["queries_without_match"] > 0
    for name, interval in class_intervals(found["per_query"], labels).items():
        assert interval.mean == pytest.approx(found[name])
        assert interval.low <= interval.mean <= interval.high


@pytest.mark.parametrize(
    ("values", "classes", "keywords", "error", "message"),
    [
        ({"a": [0.5]}, torch.ones(1), {}, TypeError, "a is a list; a torch.Tensor or NumPy array is required"),
        ({"a": torch.ones(2)}, [0, 1], {}, TypeError, "classes is a list; a torch.Tensor or NumPy array is required"),
        ({"a": torch.ones(2, 2)}, torch.ones(2), {}, ValueError, r"a has shape \(2, 2\), and classes \(2,\)"),
        ({"a": torch.ones(3)}, torch.ones(2), {}, ValueError, r"a has shape \(3,\), and classes \(2,\)"),
        ({"a": torch.tensor([NAN, NAN])}, torch.ones(2), {}, ValueError, "each of its 2 entries is NaN"),
        ({"a": torch.tensor([1.0, math.inf])}, torch.ones(2), {}, ValueError, "a contains infinity in 1 of 2 entries"),
        ({}, torch.ones(2), {}, ValueError, "values is empty"),
        ({"a": torch.ones(2)}, torch.ones(2), {"confidence": 95}, ValueError, "confidence is 95; it must be > 0.0"),
    ],
)
def test_errors_name_the_argument(values, classes, keywords, error, message):
    with pytest.raises(error, match=message):
        class_intervals(values, classes, **keywords)
